"""Dense attention: torch's scaled_dot_product_attention with its kernel forced, or FlashAttention-3. What everything is
measured against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from pyramidbench.cost import Cost, attention_cost
from pyramidbench.method import Kind, Method
from pyramidbench.problem import Problem
from pyramidbench.selection import BlockSelection
from pyramidbench.tiling import Tiling

KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
FA3_MODULES = {"fa3_fwd_interface": "fa3_fwd_config", "flash_attn_interface": "flash_attn_config"}
"""Modules that bring FlashAttention-3's forward, the wheel fa3-fwd and the project's own build, with how each was built."""
MASK_ROWS = 1024
"""Query rows whose explicit mask is held at a time, where the CPU kernel has no bottom-right causal mode."""


@dataclass(frozen=True)
class Dense(Method):
    """Attends to every visible key. Nothing is chosen, so recall and mass are 1 by definition.

    Parameters: kernel, one of "cudnn", "flash", "efficient", "math", or "auto": the first of these that the problem
    allows ("flash" before "math" on a CPU). Torch is never left to choose; the result's `backend` names what ran.
    "fa3" is FlashAttention-3 from the package fa3-fwd (or flash-attn's build for Hopper): float16 and bfloat16, forward
    only, and never chosen by "auto".
    Cost: 4·D·H·P operations for P visible pairs.
    Differs from the source: causal means bottom-right alignment, also where M and N differ.
    """

    kind: ClassVar[Kind] = "dense"
    source: ClassVar[str] = (
        "torch.nn.functional.scaled_dot_product_attention; FlashAttention-2, arXiv 2307.08691; "
        "FlashAttention-3, arXiv 2407.08608"
    )
    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {
        "default": {},
        **{name: {"kernel": name} for name in (*KERNELS, "fa3")},
    }

    kernel: Literal["auto", "cudnn", "flash", "efficient", "math", "fa3"] = "auto"

    def unavailable(self) -> str | None:
        return fa3_gap() if self.kernel == "fa3" else None

    def unsupported(self, problem: Problem) -> str | None:
        if self.kernel == "auto":
            return None
        return fa3_limit(problem) if self.kernel == "fa3" else kernel_limit(self.kernel, problem)

    def chosen(self, problem: Problem) -> str:
        """The kernel that runs: the forced one, or the first that the problem allows."""
        if self.kernel != "auto":
            return self.kernel
        return next(name for name in KERNELS if kernel_limit(name, problem) is None)

    def backend(self, problem: Problem) -> str:
        return "fa3" if self.kernel == "fa3" else f"sdpa-{self.chosen(problem)}"

    def select(self, q: Tensor, k: Tensor, problem: Problem) -> None:  # noqa: ARG002 - part of the contract
        return None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, selection: BlockSelection | None, problem: Problem) -> Tensor:
        assert selection is None
        if self.kernel == "fa3":
            return fa3(q, k, v, problem)
        with sdpa_kernel(KERNELS[self.chosen(problem)]):
            if not problem.causal or problem.seq_len_q == problem.seq_len_kv:
                return _sdpa(q, k, v, problem, is_causal=problem.causal)
            if problem.device == "cuda" and self.chosen(problem) != "math":
                bias = causal_lower_right(problem.seq_len_q, problem.seq_len_kv)
                return _sdpa(q, k, v, problem, attn_mask=bias)
            return torch.cat(
                [self._masked_rows(q, k, v, problem, row) for row in range(0, q.shape[2], MASK_ROWS)], dim=2
            )

    def _masked_rows(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem, first: int) -> Tensor:
        rows = q[:, :, first : first + MASK_ROWS]
        position = torch.arange(first, first + rows.shape[2], device=q.device) + problem.seq_len_kv - problem.seq_len_q
        mask = torch.arange(problem.seq_len_kv, device=q.device) <= position[:, None]
        return _sdpa(rows, k, v, problem, attn_mask=mask)

    def cost(self, problem: Problem) -> Cost:
        tiling = Tiling(problem.seq_len_q, problem.seq_len_kv, 128, 128, problem.causal)
        # Every key is read at least once, also by a single query.
        listed = max(tiling.visible_pairs() / (128 * 128), float(tiling.blocks))
        workspace = 0.0
        if self.chosen(problem) == "math":
            matrices = 6.0 if problem.needs_gradients else 3.0
            workspace = matrices * 4 * problem.batch * problem.heads * problem.seq_len_q * problem.seq_len_kv
        return Cost((attention_cost(problem, tiling.visible_pairs(), listed, 128),), workspace)


def kernel_limit(kernel: str, problem: Problem) -> str | None:
    """Why a kernel of torch cannot do a problem, or None."""
    on_gpu = problem.device == "cuda"
    uneven = problem.causal and problem.seq_len_q != problem.seq_len_kv
    if kernel in ("cudnn", "efficient") and not on_gpu:
        return f"the {kernel} kernel needs a CUDA device; on a CPU use flash or math"
    if kernel in ("cudnn", "flash") and on_gpu and problem.dtype not in ("float16", "bfloat16"):
        return f"the {kernel} kernel computes in float16 and bfloat16, not in {problem.dtype}"
    if kernel == "efficient" and (problem.dtype == "float64" or problem.group > 1):
        return "the efficient kernel has no float64 and no grouped key/value heads"
    if kernel == "flash" and problem.head_dim != problem.head_dim_v:
        return f"the flash kernel needs one head dim; q has {problem.head_dim} and v has {problem.head_dim_v}"
    if kernel in ("cudnn", "efficient") and uneven:
        return f"the {kernel} kernel through torch has no bottom-right causal mask for {problem.seq_len_q} queries"
    return None


def _load_fa3() -> tuple[ModuleType, bool]:
    """The first module that brings FlashAttention-3, and whether its build has float16 (the wheel fa3-fwd has not).

    Raises:
        ImportError: none can be imported; the message says why for each.
    """
    reasons = []
    for name, config in FA3_MODULES.items():
        try:
            module = import_module(name)
        except (ImportError, OSError) as error:
            reasons.append(f"{name}: {' '.join(str(error).split())}")
            continue
        flags = import_module(config).CONFIG["build_flags"] if find_spec(config) is not None else {}
        return module, not flags.get("FLASHATTENTION_DISABLE_FP16", False)
    raise ImportError("; ".join(reasons))


def fa3_gap() -> str | None:
    """Why FlashAttention-3 cannot run on this machine, or None."""
    try:
        _load_fa3()
    except ImportError as error:
        return f"FlashAttention-3 cannot be imported ({error}); pip install 'pyramidbench[fa3]'"
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] not in (8, 9):
        return "FlashAttention-3 is built for Ampere, Ada and Hopper devices"
    return None


def fa3_limit(problem: Problem) -> str | None:
    """Why FlashAttention-3 cannot do a problem, or None."""
    if problem.needs_gradients:
        return f"FlashAttention-3 is here a forward pass only, and the pass is {problem.direction}; use dense:cudnn"
    if problem.device != "cuda":
        return "FlashAttention-3 needs a CUDA device; on a CPU use flash or math"
    if problem.dtype not in ("float16", "bfloat16"):
        return f"FlashAttention-3 computes in float16 and bfloat16, not in {problem.dtype}"
    if problem.dtype == "float16" and fa3_gap() is None and not _load_fa3()[1]:
        return "this build of FlashAttention-3 leaves float16 out; use bfloat16"
    if problem.head_dim != problem.head_dim_v:
        return f"FlashAttention-3 is called with one head dim; q has {problem.head_dim} and v has {problem.head_dim_v}"
    if problem.head_dim > 256 or problem.head_dim % 8:
        return f"FlashAttention-3 takes head dims up to 256 in steps of 8, not {problem.head_dim}"
    return None


def fa3(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Tensor:
    """FlashAttention-3: [B, H, M, Dv]. It takes [B, M, H, D] with any strides, and aligns causal masks bottom-right.

    Raises:
        ValueError: an input that requires a gradient.
    """
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (q, k, v)):
        raise ValueError("dense:fa3 has a forward pass only, and an input requires a gradient; use dense:cudnn")
    module, _ = _load_fa3()
    by_token = (tensor.transpose(1, 2) for tensor in (q, k, v))
    # With a cache it splits the keys over the device, which one new token needs.
    attend = module.flash_attn_with_kvcache if problem.direction == "decode" else module.flash_attn_func
    result = attend(*by_token, softmax_scale=problem.scale, causal=problem.causal)
    # Some versions return the log-sum-exp besides.
    output: Tensor = result[0] if isinstance(result, tuple) else result
    return output.transpose(1, 2)


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, *, attn_mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=problem.scale, enable_gqa=problem.group > 1
    )
