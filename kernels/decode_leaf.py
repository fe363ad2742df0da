"""Log-masses of the leaf candidates of one decoding step, by keys or by parts; `kernels.decode` is the torch twin.

For a head's query and a block's keys x at or before it: S = logsumexp over x of s·q·x; with leaf score "sub", over the means x
of the block's parts, of c keys each, of s·q·x + log c. The forced blocks are scored too where the normaliser of "sum_prob"
needs them. Where nothing would be dropped nothing is scored.
Tiling: `_leaf`: one program = one block of one query's candidates and forced blocks, the heads of its group as rows of one
product: [16, D] × [D, C]. Blocks are many (792 at batch 1, 8 key/value heads, K 32, P 3), so they fill the device.
`_leaf_parts`: one program = RUN blocks, their parts side by side: [16, D] × [D, RUN·parts]. The cache keeps the means of whole
parts; the open one at the end of a sequence is pooled here, by the program that meets it, from at most C / parts keys.
Cost: 2·D·C operations a head and block; C·D elements of keys read once. Bound by memory: 12.6 MB in that case; 0.8 by 4 parts.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pyramidbench.kernels.decode_call import DecodeCall
from pyramidbench.kernels.decode_launch import after_previous
from pyramidbench.kernels.decode_place import block_start, new_query
from pyramidbench.kernels.decode_tokens import part_mean
from pyramidbench.kernels.top_k import log_sum_exp

PART_ROWS = 64
"""Means that a program of `_leaf_parts` scores: as many rows as a block has keys in `_leaf`. Predicted, not measured."""


@triton.jit
def query_tile(q_base, strides, offs_d, HEAD_DIM, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """A query of every head of a group, [ROWS, BLOCK_D]; rows past the group are 0."""
    row = tl.arange(0, ROWS)
    mask = (row < GROUP)[:, None] & (offs_d < HEAD_DIM)[None, :]
    return tl.load(q_base + row.to(tl.int64)[:, None] * strides[1] + offs_d[None, :], mask=mask, other=0.0)


@triton.jit
def block_tile(x_at, stride, seen, offs_d, DIM):
    """Rows of a block that are seen, [BLOCK_N, BLOCK_D]; the others are 0, since what they hold may be NaN."""
    offs_n = tl.arange(0, seen.shape[0])
    mask = seen[:, None] & (offs_d < DIM)[None, :]
    return tl.load(x_at + offs_n[:, None] * stride + offs_d[None, :], mask=mask, other=0.0)


@triton.jit
def _leaf(
    q_ptr, k_ptr, lengths_ptr, pages_ptr, candidates_ptr, count_ptr, mass_ptr, q_strides, k_strides, scale, sets, kv_heads,
    queries, blocks, top_k, sink_blocks, local_blocks, candidate_width, width,
    GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, IS_PAGED: tl.constexpr, BUDGETED: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    item, slot = program // width, (program % width).to(tl.int32)
    index, which, batch = (item % queries).to(tl.int32), item // queries % sets, item // queries // sets
    kv_head = which * kv_heads // sets
    offs_d, offs_n = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    q_base = q_ptr + batch * q_strides[0] + which * GROUP * q_strides[1] + index.to(tl.int64) * q_strides[2]
    # The walk's launches lie before this one, and began when the query was there.
    q = query_tile(q_base, q_strides, offs_d, HEAD_DIM, GROUP, ROWS)
    after_previous(OVERLAPS)
    length, found = tl.load(lengths_ptr + batch * kv_heads + kv_head), tl.load(count_ptr + item)
    # Read without waiting for the count (volatile, or the compiler does wait); behind the last candidate it is not used.
    listed = tl.load(candidates_ptr + item * candidate_width + tl.minimum(slot, candidate_width - 1), volatile=True)
    position, _, sink_end, local_start, forced = new_query(
        length, index, queries, BLOCK_SIZE, sink_blocks, local_blocks
    )
    keep = top_k
    if BUDGETED:
        keep = tl.maximum(top_k - forced, 0)
    extra = slot - found
    block = tl.where(extra < 0, listed, tl.where(extra < sink_end, extra, local_start + extra - sink_end))
    if (found > keep) & (extra < forced):
        seen = (offs_n < BLOCK_SIZE) & (block * BLOCK_SIZE + offs_n <= position)
        k_at = block_start(k_ptr, k_strides, pages_ptr, blocks, batch, kv_head, block, BLOCK_SIZE, IS_PAGED)
        k = block_tile(k_at, k_strides[2], seen, offs_d, HEAD_DIM)
        # of shape [ROWS, BLOCK_N]
        logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        mass = log_sum_exp(tl.where(seen[None, :], logits, float("-inf")), 1)
        row = tl.arange(0, ROWS)
        tl.store(mass_ptr + program * GROUP + row, mass, mask=row < GROUP)


@triton.jit
def _leaf_parts(
    q_ptr, k_ptr, parts_ptr, lengths_ptr, pages_ptr, candidates_ptr, count_ptr, mass_ptr, q_strides, k_strides, scale, sets,
    kv_heads, queries, blocks, top_k, sink_blocks, local_blocks, candidate_width, width,
    GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    IS_PAGED: tl.constexpr, BUDGETED: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr, RUN: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    SIZE: tl.constexpr = (BLOCK_SIZE + PARTS - 1) // PARTS
    runs = tl.cdiv(width, RUN)
    program = tl.program_id(0).to(tl.int64)
    item, start = program // runs, (program % runs).to(tl.int32) * RUN
    index, which, batch = (item % queries).to(tl.int32), item // queries % sets, item // queries // sets
    kv_head = which * kv_heads // sets
    after_previous(OVERLAPS)
    length, found = tl.load(lengths_ptr + batch * kv_heads + kv_head), tl.load(count_ptr + item)
    position, _, sink_end, local_start, forced = new_query(
        length, index, queries, BLOCK_SIZE, sink_blocks, local_blocks
    )
    keep = top_k
    if BUDGETED:
        keep = tl.maximum(top_k - forced, 0)
    if (found > keep) & (start < found + forced):
        place = tl.arange(0, RUN * PADDED)
        slot, part = start + place // PADDED, place % PADDED
        extra = slot - found
        listed = tl.load(candidates_ptr + item * candidate_width + slot, mask=slot < found, other=0)
        block = tl.where(extra < 0, listed, tl.where(extra < sink_end, extra, local_start + extra - sink_end))
        begin = block * BLOCK_SIZE + part * SIZE
        part_end = block * BLOCK_SIZE + tl.minimum((part + 1) * SIZE, BLOCK_SIZE)
        end = tl.minimum(part_end, length)
        held = tl.where((part < PARTS) & (extra < forced), end - begin, 0)
        seen = (held > 0) & (end <= position + 1)
        is_open = seen & (end < part_end)
        offs_d = tl.arange(0, BLOCK_D)
        mask_d = (offs_d < HEAD_DIM)[None, :]
        # of shape [RUN·PADDED, BLOCK_D]
        row = ((batch * kv_heads + kv_head) * blocks + block) * PARTS + part
        mean_at = parts_ptr + row[:, None] * HEAD_DIM + offs_d[None, :]
        means = tl.load(mean_at, mask=(seen & (end == part_end))[:, None] & mask_d, other=0.0)
        if tl.max(is_open.to(tl.int32), 0) > 0:
            own, inner = length // BLOCK_SIZE, length % BLOCK_SIZE // SIZE * SIZE
            k_at = block_start(k_ptr, k_strides, pages_ptr, blocks, batch, kv_head, own, BLOCK_SIZE, IS_PAGED)
            mean = part_mean(
                k_at + inner * k_strides[2], k_strides[2], length % BLOCK_SIZE - inner, offs_d, SIZE, HEAD_DIM
            )
            means = tl.where(is_open[:, None], mean.to(means.dtype), means)
        q_base = q_ptr + batch * q_strides[0] + which * GROUP * q_strides[1] + index.to(tl.int64) * q_strides[2]
        q = query_tile(q_base, q_strides, offs_d, HEAD_DIM, GROUP, ROWS)
        # of shape [ROWS, RUN·PADDED], then [ROWS, RUN]
        logits = tl.dot(q, tl.trans(means), input_precision="ieee") * scale
        logits += tl.log(tl.maximum(held, 1).to(tl.float32))[None, :]
        logits = tl.where(seen[None, :], logits, float("-inf"))
        mass = log_sum_exp(tl.reshape(logits, [ROWS, RUN, PADDED]), 2)
        head, slot = tl.arange(0, ROWS)[:, None], start + tl.arange(0, RUN)[None, :]
        mass_at = mass_ptr + (item * width + slot) * GROUP + head
        tl.store(mass_at, mass, mask=(head < GROUP) & (slot < found + forced) & (slot < width))


def run_leaf(call: DecodeCall, candidates: Tensor, counts: Tensor) -> Tensor:
    """Log-masses fp32 [items, candidates and forced blocks, heads of a group]; forced blocks follow the last candidate."""
    store, rules, parts = call.store, call.rules, call.store.sizes.parts
    width = candidates.shape[1] + (call.forced_width if rules.head_reduce == "sum_prob" else 0)
    masses = call.scratch(width * call.group)
    places = (store.lengths, store.pages, candidates, counts, masses, call.q.stride()[:3], store.k.stride()[:3])
    numbers = (
        call.scale, *call.counts, store.sizes.blocks, rules.top_k, rules.sink_blocks, rules.local_blocks,
        candidates.shape[1], width,
    )  # fmt: skip
    names = ("GROUP", "ROWS", "BLOCK_SIZE", "HEAD_DIM", "BLOCK_D", "IS_PAGED")
    shape = {name: call.shape[name] for name in names} | {"BUDGETED": rules.forced_in_budget} | call.overlap
    if parts:
        padded, run = part_rows(parts)
        _leaf_parts[(call.items * triton.cdiv(width, run),)](
            call.q, store.k, store.parts, *places, *numbers, PARTS=parts, PADDED=padded, RUN=run,
            num_warps=call.launch.num_warps, **shape,
        )  # fmt: skip
    else:
        _leaf[(call.items * width,)](
            call.q, store.k, *places, *numbers, BLOCK_N=call.shape["BLOCK_N"], num_warps=call.launch.num_warps, **shape
        )
    return masses.view(call.items, width, call.group)


def part_rows(parts: int) -> tuple[int, int]:
    """Rows that a block's parts take in a product, a power of two, and blocks of one program."""
    padded = triton.next_power_of_2(parts)
    return padded, max(1, PART_ROWS // padded)
