"""Sums of chunks of a key block, and their sum: what `kernels.attention_dkdv` does with a block of several chunks.

A chunk's sums are fp32, [C, D] for dk and [C, Dv] for dv. `_add_pieces`: one program = one block; adds its pieces in order,
and writes zeros for a block that no tile lists; a block with one piece is written already.
Places: chunks of a block with several begin `most_pairs` places apart in their segment's pairs, or are a first one, so
2·(begin // most_pairs) + (is not a first one) names at most one chunk: no scan, and room for 2·pairs / most_pairs pieces.
Cost: a piece is written and read once; bound by memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyramidbench.kernels.transpose import Transposed

PIECE_ELEMENTS = 4096


@triton.jit
def put(at, value, mask, ADDS: tl.constexpr):
    """Store a tile, or add it to what is there."""
    if ADDS:
        value += tl.load(at, mask=mask, other=0.0)
    tl.store(at, value.to(at.dtype.element_ty), mask=mask)


@triton.jit
def _add_pieces(
    pieces_ptr, out_ptr, first_ptr, chunks_ptr, chunk_count_ptr,
    runs, blocks, places, most_chunks, most_pairs, seq_len_kv,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, ADDS: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    segment = program // blocks
    block = (program % blocks).to(tl.int32)
    count = tl.load(chunk_count_ptr + segment)
    all_pairs = tl.load(chunks_ptr + (segment * most_chunks + count) * 3 - 1, mask=count > 0, other=0)
    first = tl.load(first_ptr + program)
    end = tl.load(first_ptr + program + 1, mask=block + 1 < blocks, other=0)
    end = tl.where(block + 1 < blocks, end, all_pairs)
    pieces = tl.cdiv(end - first, most_pairs)
    if pieces == 1:
        return
    elements = tl.minimum(BLOCK_SIZE, seq_len_kv - block * BLOCK_SIZE) * HEAD_DIM
    pieces_ptr += segment * 2 * tl.cdiv(places, most_pairs) * BLOCK_SIZE * HEAD_DIM
    out_ptr += (segment // runs * seq_len_kv + block * BLOCK_SIZE) * HEAD_DIM
    for start in range(0, elements, ELEMENTS):
        # of shape [ELEMENTS]
        element = start + tl.arange(0, ELEMENTS)
        acc = tl.zeros([ELEMENTS], tl.float32)
        for piece in range(0, pieces):
            slot = 2 * ((first + piece * most_pairs) // most_pairs) + (piece > 0)
            at = pieces_ptr + slot.to(tl.int64) * BLOCK_SIZE * HEAD_DIM + element
            acc += tl.load(at, mask=element < elements, other=0.0)
        put(out_ptr + element, acc, element < elements, ADDS)


@dataclass(frozen=True)
class Pieces:
    """Sums of chunks of at most `most_pairs` pairs: fp32 [segments, places, C, D] and [segments, places, C, Dv]."""

    dk: Tensor
    dv: Tensor
    most_pairs: int


def piece_places(pairs: int, most_pairs: int) -> int:
    """Places for the pieces of a segment of up to `pairs` pairs."""
    return 2 * triton.cdiv(pairs, most_pairs)


def pieces_room(
    segments: int, places: int, shape: tuple[int, int, int], most_pairs: int, device: torch.device
) -> Pieces:
    """Room for `places` pieces of each segment; shape: block size, D, Dv."""
    block_size, *dims = shape
    dk, dv = (torch.empty(segments, places, block_size, dim, dtype=torch.float32, device=device) for dim in dims)
    return Pieces(dk, dv, most_pairs)


def add_pieces(pieces: Pieces, by_block: Transposed, runs: int, results: tuple[Tensor, Tensor]) -> None:
    """Finish dk and dv [heads, N, ..] of the segments in `by_block`; with several runs a head, add to them."""
    (segments, pairs), most_chunks, blocks = by_block.pairs.shape, by_block.chunks.shape[1], by_block.first.shape[1]
    for part, result in zip((pieces.dk, pieces.dv), results):
        _add_pieces[(segments * blocks,)](
            part, result, by_block.first, by_block.chunks, by_block.chunk_counts,
            runs, blocks, pairs, most_chunks, pieces.most_pairs, result.shape[1],
            BLOCK_SIZE=part.shape[2], HEAD_DIM=part.shape[3], ADDS=runs > 1, ELEMENTS=PIECE_ELEMENTS,
        )  # fmt: skip
