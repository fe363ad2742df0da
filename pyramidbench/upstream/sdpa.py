"""torch's scaled_dot_product_attention, with the kernel forced: torch is never left to choose."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from pyramidbench.problem import Problem
from pyramidbench.upstream.dense_kernel import DenseKernel, KernelName

BACKENDS: Mapping[KernelName, SDPBackend] = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
MASK_ROWS = 1024
"""Query rows whose explicit mask is held at a time, where the CPU kernel has no bottom-right causal mode."""


def limit(kernel: KernelName, problem: Problem) -> str | None:
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
        return f"the {kernel} kernel through torch has no bottom-right causal mask (queries: {problem.seq_len_q})"
    return None


def workspace(kernel: KernelName, problem: Problem) -> float:
    """Bytes held besides inputs and output: by "math" the M × N matrices, with their gradients where the pass has them; by
    "cudnn" and "flash" the fp32 sums of the gradient of q. On an H200 that is all of cuDNN's, and half of what flash holds."""
    queries = problem.batch * problem.heads * problem.seq_len_q
    if kernel == "math":
        return (6.0 if problem.needs_gradients else 3.0) * 4 * queries * problem.seq_len_kv
    summed = kernel in ("cudnn", "flash") and problem.device == "cuda" and problem.needs_gradients
    return 4.0 * queries * problem.head_dim if summed else 0.0


def attend(kernel: KernelName, q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Tensor:
    """Dense attention by one of BACKENDS: [B, H, M, Dv]."""
    with sdpa_kernel(BACKENDS[kernel]):
        if not problem.causal or problem.seq_len_q == problem.seq_len_kv:
            return _sdpa(q, k, v, problem, is_causal=problem.causal)
        if problem.device == "cuda" and kernel != "math":
            # Imported here: it brings torch's compiler with it, a second or two that only this case needs.
            from torch.nn.attention.bias import causal_lower_right

            bias = causal_lower_right(problem.seq_len_q, problem.seq_len_kv)
            return _sdpa(q, k, v, problem, attn_mask=bias)
        return torch.cat([_masked_rows(q, k, v, problem, row) for row in range(0, q.shape[2], MASK_ROWS)], dim=2)


def _masked_rows(q: Tensor, k: Tensor, v: Tensor, problem: Problem, first: int) -> Tensor:
    rows = q[:, :, first : first + MASK_ROWS]
    position = torch.arange(first, first + rows.shape[2], device=q.device) + problem.seq_len_kv - problem.seq_len_q
    mask = torch.arange(problem.seq_len_kv, device=q.device) <= position[:, None]
    return _sdpa(rows, k, v, problem, attn_mask=mask)


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, *, attn_mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=problem.scale, enable_gqa=problem.group > 1
    )


SDPA = tuple(
    DenseKernel(name, f"sdpa-{name}", partial(limit, name), partial(attend, name), workspace=partial(workspace, name))
    for name in BACKENDS
)
"""The four kernels of torch, in the order in which "auto" prefers them where it may not measure."""
