"""FlashAttention-3: the wheel fa3-fwd, or flash-attn's own build for Hopper. [B, S, H, D], bottom-right, forward only here.

Source of the signature: fa3_fwd_interface.py of the wheel fa3-fwd 0.0.3, which is hopper/flash_attn_interface.py of
Dao-AILab/flash-attention.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from pyramidbench.problem import Problem
from pyramidbench.upstream import importing
from pyramidbench.upstream.dense_kernel import DenseKernel
from pyramidbench.upstream.layout import by_token, first
from pyramidbench.upstream.limits import capability_gap, device_limit, dtype_limit, head_dim_limit

WHAT = "FlashAttention-3"
MODULES = {"fa3_fwd_interface": "fa3_fwd_config", "flash_attn_interface": "flash_attn_config"}
"""Modules that bring the forward, the wheel fa3-fwd and the project's own build, with how each was built."""
INSTALL = "pip install 'pyramidbench[fa3]'"


def gap() -> str | None:
    """Why FlashAttention-3 cannot run on this machine, or None."""
    return importing.gap(WHAT, tuple(MODULES), "flash_attn_func", INSTALL) or capability_gap(WHAT, (8, 9))


def limit(problem: Problem) -> str | None:
    """Why FlashAttention-3 cannot do a problem, or None."""
    if problem.needs_gradients:
        return f"{WHAT} is here a forward pass only, and the pass is {problem.direction}; use dense:cudnn"
    reason = device_limit(WHAT, problem) or dtype_limit(WHAT, problem) or head_dim_limit(WHAT, problem, 256)
    if reason is None and problem.dtype == "float16" and not _has_float16():
        return "this build of FlashAttention-3 leaves float16 out; use bfloat16"
    return reason


def _has_float16() -> bool:
    """Whether the build that would be called has float16 (the wheel fa3-fwd has not); True where there is none."""
    for module, config in MODULES.items():
        try:
            importing.function((module,), "flash_attn_func")
        except ImportError:
            continue
        flags = import_module(config).CONFIG["build_flags"] if find_spec(config) is not None else {}
        return not flags.get("FLASHATTENTION_DISABLE_FP16", False)
    return True


def attend(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Tensor:
    """Dense attention: [B, H, M, D].

    Raises:
        ValueError: an input that requires a gradient.
    """
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (q, k, v)):
        raise ValueError("dense:fa3 has a forward pass only, and an input requires a gradient; use dense:cudnn")
    # With a cache it splits the keys over the device, which one new token needs.
    name = "flash_attn_with_kvcache" if problem.direction == "decode" else "flash_attn_func"
    call = importing.function(tuple(MODULES), name)
    output = first(call(*by_token(q, k, v), softmax_scale=problem.scale, causal=problem.causal))
    return output.transpose(1, 2)


FA3 = DenseKernel("fa3", "fa3", limit, attend, gap)
