"""What one warp group of `kernels.attention_hopper` does: 64 rows of every tile of its program, in Gluon.

For a row i and the listed keys x that it sees:  o_i = Σ exp(s·q_i·k_x - lse_i)·v_x, lse_i = logsumexp(s·q_i·k_x).
The keys come in steps of BLOCK_N, which the feeding warp has brought into the rings in shared memory. The products
q·Kᵀ of step i and P·V of step i - 1 are issued together, and the softmax of step i is computed while P·V runs. Steps are
taken from the end of a list, so that the few blocks that need an element mask come first.
Scores, maxima, sums and the accumulator are fp32, the exponentials base 2; the weights are rounded to v's dtype.

Source: FlashAttention-3 (arXiv 2407.08608), section 3.2, for the order of the two products.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

GROUP_ROWS = gl.constexpr(64)


class Sizes(NamedTuple):
    """Of a call, all int32: `width` of its lists, `programs` in all."""

    heads: Any
    kv_heads: Any
    sets: Any
    tiles: Any
    width: Any
    seq_len_q: Any
    seq_len_kv: Any
    programs: Any


class Memory(NamedTuple):
    """What the warps of a program share: q [GROUPS, 1, heads, queries, D], k [STAGES, N, D], v [STAGES, N, Dv].

    Each comes with barriers that tell when it is full and when it is empty.
    """

    q: Any
    q_full: Any
    q_empty: Any
    k: Any
    k_full: Any
    k_empty: Any
    v: Any
    v_full: Any
    v_empty: Any


@gluon.jit
def place(program, sizes, QUERY_TILE: gl.constexpr, GROUPS: gl.constexpr):
    """Batch, set, tile, chunk of the tile's rows, and list of a program."""
    chunks = gl.cdiv(sizes.heads // sizes.sets * QUERY_TILE, GROUPS * GROUP_ROWS)
    listed = program // chunks
    run = listed // sizes.tiles
    return run // sizes.sets, run % sizes.sets, listed % sizes.tiles, program % chunks, listed


@gluon.jit
def steps_of(
    count, tile, sizes, QUERY_TILE: gl.constexpr, BLOCK_SIZE: gl.constexpr, STEP: gl.constexpr, IS_CAUSAL: gl.constexpr
):
    """Steps of a list (at least one), and how many of them, at its beginning, surely need no mask.

    Lists ascend and end with the blocks that some row of the tile sees in part, so that arithmetic suffices.
    """
    first_sees, last_sees = sizes.seq_len_kv, sizes.seq_len_kv
    if IS_CAUSAL:
        before = tile * QUERY_TILE + sizes.seq_len_kv - sizes.seq_len_q
        first_sees = gl.minimum(gl.maximum(before + 1, 0), sizes.seq_len_kv)
        last_sees = gl.minimum(gl.maximum(before + QUERY_TILE, 0), sizes.seq_len_kv)
    partial = gl.cdiv(last_sees, BLOCK_SIZE) - first_sees // BLOCK_SIZE
    return gl.maximum(gl.cdiv(count, STEP), 1), gl.maximum(count - partial, 0) // STEP


@gluon.jit
def _issue_scores(q, memory, done, S_LAYOUT: gl.constexpr):
    """Scores [M, N] of step `done`, not waited for."""
    STAGES: gl.constexpr = memory.k.shape[0]
    BLOCK_N: gl.constexpr = memory.k.shape[1]
    mbarrier.wait(memory.k_full.index(done % STAGES), done // STAGES & 1)
    zero = gl.zeros([GROUP_ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    k = memory.k.index(done % STAGES).permute((1, 0))
    return warpgroup_mma(q, k, zero, use_acc=False, is_async=True)


@gluon.jit
def _mask(scores, first, list_ptr, count, position, sizes, BLOCK_SIZE: gl.constexpr, IS_CAUSAL: gl.constexpr):
    """Scores [M, N] of the blocks from list place `first` on, with -inf for keys that a row does not see."""
    BLOCK_N: gl.constexpr = scores.shape[1]
    # of shape [N]
    offs_n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores.type.layout))
    slot = first + offs_n // BLOCK_SIZE
    key = gl.load(list_ptr + slot, mask=slot < count, other=0) * BLOCK_SIZE + offs_n % BLOCK_SIZE
    seen = ((slot < count) & (key < sizes.seq_len_kv))[None, :]
    if IS_CAUSAL:
        seen = seen & (key[None, :] <= position[:, None])
    return gl.where(seen, scores, float("-inf"))


@gluon.jit
def _fold(scores, row_max, row_sum, scale_log2, MASKED: gl.constexpr):
    """One online-softmax step: weights [M, N], new maxima and sums, and the factor that rescales the old sums [M]."""
    new_max = gl.maximum(row_max, gl.max(scores, 1) * scale_log2)
    shift = new_max
    if MASKED:
        shift = gl.where(new_max == float("-inf"), 0.0, new_max)
    rescale = gl.exp2(row_max - shift)
    weights = gl.exp2(scores * scale_log2 - shift[:, None])
    return weights, new_max, row_sum * rescale + gl.sum(weights, 1), rescale


@gluon.jit
def _advance(
    q, memory, done, weights, row_max, row_sum, acc, scale_log2, first, list_ptr, count, position, sizes,
    BLOCK_SIZE: gl.constexpr, IS_CAUSAL: gl.constexpr, MASKED: gl.constexpr, S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Scores and weights of step `done`, and the values of the step before."""
    STAGES: gl.constexpr = memory.k.shape[0]
    O_LAYOUT: gl.constexpr = acc.type.layout
    scores = _issue_scores(q, memory, done, S_LAYOUT)
    acc = warpgroup_mma(weights, memory.v.index((done - 1) % STAGES), acc, is_async=True)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    mbarrier.arrive(memory.k_empty.index(done % STAGES), count=1)
    if MASKED:
        scores = _mask(scores, first, list_ptr, count, position, sizes, BLOCK_SIZE, IS_CAUSAL)
    next_weights, row_max, row_sum, rescale = _fold(scores, row_max, row_sum, scale_log2, MASKED)
    next_weights = gl.convert_layout(next_weights.to(memory.v.dtype), gl.DotOperandLayout(0, O_LAYOUT, 2))
    # The values of this step are waited for here, and the wait below takes the new weights, lest a compiler move the
    # exponentials behind that wait: the assembler does within a basic block, and this wait is a loop.
    mbarrier.wait(memory.v_full.index(done % STAGES), done // STAGES & 1)
    acc, weights, next_weights = warpgroup_mma_wait(0, deps=(acc, weights, next_weights))
    mbarrier.arrive(memory.v_empty.index((done - 1) % STAGES), count=1)
    acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, O_LAYOUT))[:, None]
    return next_weights, row_max, row_sum, acc


@gluon.jit
def _store(acc, row_max, row_sum, out_ptr, lse_ptr, batch, which, tile, first_row, sizes, QUERY_TILE: gl.constexpr):
    """Output and log-sum-exp of 64 rows."""
    ROWS: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    row_max, row_sum = gl.convert_layout(row_max, ROWS), gl.convert_layout(row_sum, ROWS)
    group = sizes.heads // sizes.sets
    # of shape [M]
    row = first_row + gl.arange(0, GROUP_ROWS, ROWS)
    query = tile * QUERY_TILE + row % QUERY_TILE
    row_mask = (row < group * QUERY_TILE) & (query < sizes.seq_len_q)
    out_row = (batch.to(gl.int64) * sizes.heads + which * group + row // QUERY_TILE) * sizes.seq_len_q + query
    empty = row_sum == 0
    row_sum = gl.where(empty, 1.0, row_sum)
    out = gl.where(empty[:, None], 0.0, acc * (1.0 / row_sum)[:, None])
    lse = gl.where(empty, float("-inf"), (row_max + gl.log2(row_sum)) * 0.6931471805599453)
    HEAD_DIM_V: gl.constexpr = acc.shape[1]
    offs_dv = gl.arange(0, HEAD_DIM_V, gl.SliceLayout(0, acc.type.layout))
    out_at = out_ptr + out_row[:, None] * HEAD_DIM_V + offs_dv[None, :]
    gl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=row_mask[:, None])
    gl.store(lse_ptr + out_row, lse, mask=row_mask)


@gluon.jit
def attend_rows(
    memory, sizes, indices_ptr, counts_ptr, out_ptr, lse_ptr, scale_log2,
    GROUP: gl.constexpr, QUERY_TILE: gl.constexpr, BLOCK_SIZE: gl.constexpr, IS_CAUSAL: gl.constexpr,
):  # fmt: skip
    """Warp group GROUP of a program, over all its tiles."""
    GROUPS: gl.constexpr = memory.q.shape[0]
    STAGES: gl.constexpr = memory.k.shape[0]
    BLOCK_N: gl.constexpr = memory.k.shape[1]
    HEAD_DIM: gl.constexpr = memory.k.shape[2]
    HEAD_DIM_V: gl.constexpr = memory.v.shape[2]
    STEP: gl.constexpr = BLOCK_N // BLOCK_SIZE
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM_V, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    done = 0
    for program in range(gl.program_id(0), sizes.programs, gl.num_programs(0)):
        batch, which, tile, chunk, listed = place(program, sizes, QUERY_TILE, GROUPS)
        first_row = (chunk * GROUPS + GROUP) * GROUP_ROWS
        row = first_row + gl.arange(0, GROUP_ROWS, ROWS)
        position = tile * QUERY_TILE + row % QUERY_TILE + sizes.seq_len_kv - sizes.seq_len_q
        list_ptr = indices_ptr + listed.to(gl.int64) * sizes.width
        count = gl.load(counts_ptr + listed)
        steps, whole = steps_of(count, tile, sizes, QUERY_TILE, BLOCK_SIZE, STEP, IS_CAUSAL)

        # of shape [M, D]; in registers: products that read q from shared memory took 3 % longer (64k and 256k keys)
        mbarrier.wait(memory.q_full.index(0), program // gl.num_programs(0) & 1)
        q = memory.q.index(GROUP).reshape([GROUP_ROWS, HEAD_DIM]).load(gl.DotOperandLayout(0, S_LAYOUT, 2))
        fence_async_shared()
        mbarrier.arrive(memory.q_empty.index(0), count=1)

        row_max = gl.full([GROUP_ROWS], float("-inf"), gl.float32, ROWS)
        row_sum = gl.zeros([GROUP_ROWS], gl.float32, ROWS)
        # of shape [M, Dv]
        acc = gl.zeros([GROUP_ROWS, HEAD_DIM_V], gl.float32, O_LAYOUT)
        scores = _issue_scores(q, memory, done, S_LAYOUT)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        mbarrier.arrive(memory.k_empty.index(done % STAGES), count=1)
        scores = _mask(scores, (steps - 1) * STEP, list_ptr, count, position, sizes, BLOCK_SIZE, IS_CAUSAL)
        weights, row_max, row_sum, _ = _fold(scores, row_max, row_sum, scale_log2, True)
        weights = gl.convert_layout(weights.to(memory.v.dtype), gl.DotOperandLayout(0, O_LAYOUT, 2))
        mbarrier.wait(memory.v_full.index(done % STAGES), done // STAGES & 1)
        done += 1

        for step in range(1, steps - whole):
            weights, row_max, row_sum, acc = _advance(
                q, memory, done, weights, row_max, row_sum, acc, scale_log2,
                (steps - 1 - step) * STEP, list_ptr, count, position, sizes,
                BLOCK_SIZE, IS_CAUSAL, True, S_LAYOUT,
            )  # fmt: skip
            done += 1
        for _ in range(gl.maximum(steps - whole, 1), steps):
            weights, row_max, row_sum, acc = _advance(
                q, memory, done, weights, row_max, row_sum, acc, scale_log2,
                0, list_ptr, count, position, sizes, BLOCK_SIZE, IS_CAUSAL, False, S_LAYOUT,
            )  # fmt: skip
            done += 1

        acc = warpgroup_mma(weights, memory.v.index((done - 1) % STAGES), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(memory.v_empty.index((done - 1) % STAGES), count=1)
        _store(acc, row_max, row_sum, out_ptr, lse_ptr, batch, which, tile, first_row, sizes, QUERY_TILE)
