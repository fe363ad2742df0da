"""FlashAttention-4, in CuTe DSL: [B, S, H, D], causal masks bottom-right, forward and backward on Hopper and Blackwell.

Source of the signature and the limits: flash_attn/cute/interface.py of flash-attn-4 4.0.0b36. It returns the output and
the log-sum-exp, and compiles a kernel for each shape family when first called.
"""

from __future__ import annotations

from torch import Tensor

from pyramidbench.problem import Problem
from pyramidbench.upstream import importing
from pyramidbench.upstream.dense_kernel import DenseKernel
from pyramidbench.upstream.layout import by_token, first
from pyramidbench.upstream.limits import capability_gap, device_limit, dtype_limit

WHAT = "FlashAttention-4"
MODULES = ("flash_attn.cute",)
INSTALL = "pip install 'pyramidbench[fa4]', on CUDA 13 'flash-attn-4[cu13]' besides"
LARGEST_HEAD_DIM = 256


def gap() -> str | None:
    """Why FlashAttention-4 cannot run on this machine, or None."""
    return importing.gap(WHAT, MODULES, "flash_attn_func", INSTALL) or capability_gap(WHAT, (9, 10, 11))


def limit(problem: Problem) -> str | None:
    """Why FlashAttention-4 cannot do a problem, or None."""
    reason = device_limit(WHAT, problem) or dtype_limit(WHAT, problem)
    if reason is not None:
        return reason
    for dim in (problem.head_dim, problem.head_dim_v):
        if dim > LARGEST_HEAD_DIM or dim % 8:
            return f"{WHAT} takes head dims up to {LARGEST_HEAD_DIM} in steps of 8, not {dim}"
    if problem.causal and problem.seq_len_q > problem.seq_len_kv:
        return f"{WHAT} does not say what queries before the first key get; give no more queries than keys"
    return None


def attend(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Tensor:
    """Dense attention: [B, H, M, Dv], differentiable."""
    call = importing.function(MODULES, "flash_attn_func")
    output = first(call(*by_token(q, k, v), softmax_scale=problem.scale, causal=problem.causal))
    return output.transpose(1, 2)


FA4 = DenseKernel("fa4", "fa4", limit, attend, gap)
