"""Means of runs of rows: the mean query of every tile, q̄_t = Σ_i q_i / |t|, and the means of the parts of every block.

Sums are fp32; a ragged last run divides by the rows that it has. (Twins: `kernels.scores.mean_query`,
`kernels.pyramid.sub_block_means`.)
Tiling: one program = [RUNS runs, ROWS rows] of one head, about 32 KiB in one load (8 where rows are added in order); a longer
run takes several.
Cost: one addition per element, which is read once: B·H·M·D elements. Bound by that read from memory (1.07 GB for
256k queries, 16 heads, D 128 in bf16: 0.26 ms at the copy rate of one H200).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyramidbench.tiling import Tiling

POOL_BYTES = 32 * 1024
POOL_WARPS = 4
"""Bytes that one program loads at a time, and its warps. Mean queries at 256k, 16 heads, H200: 0.26 ms, the copy rate."""

KEY_RUNS = 4
"""A program that adds row by row loads so many times less at once: it holds a sum for each. Predicted, not measured."""


@triton.jit
def _mean_runs(
    x_ptr,
    out_ptr,
    x_strides,
    heads,
    runs,
    seq_len,
    BLOCK_SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    RUNS: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    SIZE: tl.constexpr = (BLOCK_SIZE + PARTS - 1) // PARTS
    groups = tl.cdiv(runs, RUNS)
    program = tl.program_id(0).to(tl.int64)
    head = program // groups
    first = (program % groups).to(tl.int32) * RUNS
    # Neighbouring places hold different runs, so that a run's rows lie in one thread and no sum crosses threads.
    index = tl.arange(0, ROWS * RUNS)
    run = first + index % RUNS
    offs_d = tl.arange(0, BLOCK_D)
    x_ptr += head // heads * x_strides[0] + head % heads * x_strides[1]
    # of shape [RUNS, BLOCK_D], fp32
    total = tl.zeros([RUNS, BLOCK_D], tl.float32)
    for start in range(0, SIZE, ROWS):
        step = start + index // RUNS
        inner = run % PARTS * SIZE + step
        row = run // PARTS * BLOCK_SIZE + inner
        is_row = (step < SIZE) & (inner < BLOCK_SIZE) & (row < seq_len)
        # of shape [ROWS·RUNS, BLOCK_D]
        at = x_ptr + row.to(tl.int64)[:, None] * x_strides[2] + offs_d[None, :]
        x = tl.load(at, mask=is_row[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0).to(tl.float32)
        total += tl.sum(tl.reshape(x, [ROWS, RUNS, BLOCK_D]), 0)
    run = first + tl.arange(0, RUNS)
    begin = run // PARTS * BLOCK_SIZE + run % PARTS * SIZE
    end = tl.minimum(tl.minimum(begin + SIZE, (run // PARTS + 1) * BLOCK_SIZE), seq_len)
    mean = total / tl.maximum(end - begin, 1)[:, None]
    out_at = out_ptr + (head * runs + run)[:, None] * HEAD_DIM + offs_d[None, :]
    tl.store(out_at, mean.to(out_ptr.dtype.element_ty), mask=(run < runs)[:, None] & (offs_d < HEAD_DIM)[None, :])


def mean_queries(q: Tensor, tiling: Tiling) -> Tensor:
    """The mean query of every tile: fp32 [B, H, T, D]. q: [B, H, M, D], any strides with a contiguous last dimension."""
    return _means(q, tiling.query_tile, 1, torch.float32)


def sub_block_means(k: Tensor, *, block_size: int, parts: int) -> Tensor:
    """Means of `parts` equal runs of each block: [B, G, blocks·parts, D] in k's dtype; a run without a key has 0."""
    return _means(k, block_size, parts, k.dtype)


def pool_shape(size: int, head_dim: int, itemsize: int) -> tuple[int, int]:
    """Runs of `size` rows that a program sums side by side, and rows of each that it loads at a time."""
    row_bytes = triton.next_power_of_2(head_dim) * itemsize
    most = max(1, POOL_BYTES // row_bytes)
    # Side by side: at least the rows that the threads load at once, at 16 bytes each, or a run's sum crosses threads.
    at_once = max(1, POOL_WARPS * 32 * 16 // row_bytes)
    rows = min(max(1, most // at_once), triton.next_power_of_2(size))
    return most // rows, rows


def _means(x: Tensor, block_size: int, parts: int, dtype: torch.dtype) -> Tensor:
    batch, heads, seq_len, head_dim = x.shape
    runs = -(-seq_len // block_size) * parts
    out = torch.empty(batch, heads, runs, head_dim, dtype=dtype, device=x.device)
    side_by_side, rows = pool_shape(-(-block_size // parts), head_dim, x.element_size())
    if parts > 1:
        # A part's keys are added one by one, as a growing cache adds them (`kernels.decode_tokens`): equal bits, equal sets.
        side_by_side, rows = max(1, side_by_side * rows // KEY_RUNS), 1
    _mean_runs[(batch * heads * triton.cdiv(runs, side_by_side),)](
        x, out, x.stride()[:3], heads, runs, seq_len,
        BLOCK_SIZE=block_size, PARTS=parts, RUNS=side_by_side, ROWS=rows, HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim), num_warps=POOL_WARPS,
    )  # fmt: skip
    return out
