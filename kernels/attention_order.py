"""In which order a program of the backward takes the steps of its list: those that need a mask, and where the others begin.

Programs begin one after another, as places on the device fall free. Lists that all are read from their starts are then read
at different places at any one time, so that a head's whole q and do, or k and v, are in use: 134 MB at 256k keys, D 128, bf16,
more than L2. Where each program begins 1/(programs at work) of its own list further round than the one before it, all are at
the same part of their lists at the same time: a program that started t steps ago of its T is at its start + t/T, and with
starts that advance as the programs do, that is the same for all. The order is fixed, so two runs agree bit for bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pyramidbench.kernels.attention_portable import LIST_CHUNK

STAGGER = 1
"""Programs over which the first step goes once round a list; 1: every list is read from its start. 264 programs of dQ and of
dK, dV are at work on an H200. Which is faster has not been measured (`tests/gpu/bench_backward.py` times both)."""


@triton.jit
def in_turn(at, first, end, program, STEP: tl.constexpr, STAGGER: tl.constexpr):
    """Where a program reads its list, from `first` to before `end`, when it is as far as `at`: further round by its start."""
    # The numbers that this takes cost dK and dV a few bytes of spills (sm_90).
    if STAGGER > 1:
        steps = tl.cdiv(end - first, STEP)
        at += (program % STAGGER).to(tl.int32) * steps // STAGGER * STEP
        at = tl.where(at < first + steps * STEP, at, at - steps * STEP)
    return at


@triton.jit
def rows_to_mask(
    pairs_ptr, first, end, block, tiles, seq_len_q, seq_len_kv,
    QUERY_TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, SEVERAL: tl.constexpr,
):  # fmt: skip
    """How many pairs, from the first on, may have a query before a key of the block: the lowest tiles of each list."""
    last_key = tl.minimum((block + 1) * BLOCK_SIZE, seq_len_kv) - 1
    whole = tl.cdiv(tl.maximum(last_key - (seq_len_kv - seq_len_q), 0), QUERY_TILE)
    masked = 0
    for start in range(first, end, LIST_CHUNK):
        pair = start + tl.arange(0, LIST_CHUNK)
        tile = tl.load(pairs_ptr + pair, mask=pair < end, other=2147483647)
        masked += tl.sum(((tile % tiles < whole) & (pair < end)).to(tl.int32))
    if SEVERAL:
        masked = tl.where(masked > 0, end - first, 0)
    return masked
