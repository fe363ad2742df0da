"""Logits in torch with fp32 sums: 16-bit operands meet in a GPU's matrix units as they are, others in their own precision.

Widened to fp32 first, the same products run on the vector units: on an H200 67 TFLOP/s by the datasheet, where a large product
of bf16 runs at 768 (docs/performance.md). Products of 16-bit numbers are exact in fp32: only the order of the sums differs.
"""

from __future__ import annotations

import torch
from torch import Tensor


def operand(x: Tensor) -> Tensor:
    """The tensor as `logits` takes it: 16-bit on a GPU, elsewhere fp32 or wider."""
    return x if _in_matrix_units(x) else x.to(torch.promote_types(x.dtype, torch.float32))


def logits(rows: Tensor, keys: Tensor, scale: float) -> Tensor:
    """scale · rows · keysᵀ in fp32 or wider: [..., M, N]; rows: [..., M, D], keys: [..., N, D], each an `operand`."""
    if not _in_matrix_units(rows):
        return (rows * scale) @ keys.mT
    flat = torch.bmm(rows.reshape(-1, *rows.shape[-2:]), keys.reshape(-1, *keys.shape[-2:]).mT, out_dtype=torch.float32)
    return flat.view(*rows.shape[:-1], keys.shape[-2]).mul_(scale)


def _in_matrix_units(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in (torch.float16, torch.bfloat16)
