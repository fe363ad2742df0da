"""FlashAttention-2 from the package flash-attn: [B, S, H, D], causal masks bottom-right, forward and backward.

Source of the signature: flash_attn/flash_attn_interface.py of Dao-AILab/flash-attention, 2.8.
"""

from __future__ import annotations

from torch import Tensor

from pyramidbench.problem import Problem
from pyramidbench.upstream import importing
from pyramidbench.upstream.dense_kernel import DenseKernel
from pyramidbench.upstream.layout import by_token, first
from pyramidbench.upstream.limits import capability_gap, device_limit, dtype_limit, head_dim_limit

WHAT = "FlashAttention-2"
MODULES = ("flash_attn",)
INSTALL = "pip install 'pyramidbench[flash]'"


def gap() -> str | None:
    """Why FlashAttention-2 cannot run on this machine, or None. The package flash-attn-4 alone does not bring it."""
    return importing.gap(WHAT, MODULES, "flash_attn_func", INSTALL) or capability_gap(WHAT, (8, 9, 10, 11, 12))


def limit(problem: Problem) -> str | None:
    """Why FlashAttention-2 cannot do a problem, or None."""
    return device_limit(WHAT, problem) or dtype_limit(WHAT, problem) or head_dim_limit(WHAT, problem, 256)


def attend(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Tensor:
    """Dense attention: [B, H, M, D], differentiable."""
    call = importing.function(MODULES, "flash_attn_func")
    output = first(call(*by_token(q, k, v), softmax_scale=problem.scale, causal=problem.causal))
    return output.transpose(1, 2)


FA2 = DenseKernel("fa2", "fa2", limit, attend, gap)
