"""Exact log-masses of the leaf candidates of one decoding step; `kernels.decode` is the torch twin.

For a head's query and a block's keys x at or before it: S = logsumexp over x of s·q·x. The forced blocks are scored too where
the normaliser of "sum_prob" needs them. Where nothing would be dropped nothing is scored.
Tiling: one program = one block of one query's candidates and forced blocks, the heads of its group as rows of one product:
[16, D] × [D, C]. Blocks are many (792 at batch 1, 8 key/value heads, K 32, P 3), so they fill the device.
Cost: 2·D·C operations a head and block; C·D elements of keys read once. Bound by memory: 12.6 MB in that case.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pyramidbench.kernels.decode_call import DecodeCall
from pyramidbench.kernels.decode_launch import after_previous
from pyramidbench.kernels.decode_place import block_start, new_query
from pyramidbench.kernels.top_k import log_sum_exp


@triton.jit
def query_tile(q_base, strides, offs_d, HEAD_DIM, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """A query of every head of a group, [ROWS, BLOCK_D]; rows past the group are 0."""
    row = tl.arange(0, ROWS)
    mask = (row < GROUP)[:, None] & (offs_d < HEAD_DIM)[None, :]
    return tl.load(q_base + row[:, None] * strides[1] + offs_d[None, :], mask=mask, other=0.0)


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
    after_previous(OVERLAPS)
    length, found = tl.load(lengths_ptr + batch * kv_heads + kv_head), tl.load(count_ptr + item)
    position, _, sink_end, local_start, forced = new_query(
        length, index, queries, BLOCK_SIZE, sink_blocks, local_blocks
    )
    keep = top_k
    if BUDGETED:
        keep = tl.maximum(top_k - forced, 0)
    extra = slot - found
    listed = tl.load(candidates_ptr + item * candidate_width + slot, mask=slot < found, other=0)
    block = tl.where(extra < 0, listed, tl.where(extra < sink_end, extra, local_start + extra - sink_end))
    if (found > keep) & (extra < forced):
        offs_d = tl.arange(0, BLOCK_D)
        offs_n = tl.arange(0, BLOCK_N)
        q_base = q_ptr + batch * q_strides[0] + which * GROUP * q_strides[1] + index.to(tl.int64) * q_strides[2]
        q = query_tile(q_base, q_strides, offs_d, HEAD_DIM, GROUP, ROWS)
        seen = (offs_n < BLOCK_SIZE) & (block * BLOCK_SIZE + offs_n <= position)
        k_at = block_start(k_ptr, k_strides, pages_ptr, blocks, batch, kv_head, block, BLOCK_SIZE, IS_PAGED)
        k = block_tile(k_at, k_strides[2], seen, offs_d, HEAD_DIM)
        # of shape [ROWS, BLOCK_N]
        logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        mass = log_sum_exp(tl.where(seen[None, :], logits, float("-inf")), 1)
        row = tl.arange(0, ROWS)
        tl.store(mass_ptr + program * GROUP + row, mass, mask=row < GROUP)


def run_leaf(call: DecodeCall, candidates: Tensor, counts: Tensor) -> Tensor:
    """Log-masses fp32 [items, candidates and forced blocks, heads of a group]; forced blocks follow the last candidate."""
    store, rules = call.store, call.rules
    width = candidates.shape[1] + (call.forced_width if rules.head_reduce == "sum_prob" else 0)
    masses = call.scratch(width * call.group)
    names = ("GROUP", "ROWS", "BLOCK_SIZE", "BLOCK_N", "HEAD_DIM", "BLOCK_D", "IS_PAGED")
    _leaf[(call.items * width,)](
        call.q, store.k, store.lengths, store.pages, candidates, counts, masses, call.q.stride()[:3], store.k.stride()[:3],
        call.scale, *call.counts, store.sizes.blocks, rules.top_k, rules.sink_blocks, rules.local_blocks,
        candidates.shape[1], width, BUDGETED=rules.forced_in_budget, num_warps=call.launch.num_warps,
        **{name: call.shape[name] for name in names}, **call.overlap,
    )  # fmt: skip
    return masses.view(call.items, width, call.group)
