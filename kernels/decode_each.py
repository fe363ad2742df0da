"""Exact leaves and attention of a decoding step in one: attend to each candidate apart, then choose. Twin: `kernels.decode`.

The exact score of a block is the logsumexp of its logits, which attention to it makes anyway. So `_attend_each`, one program =
one candidate or forced block of one query and set, leaves the block's own output and log-sum-exp (base 2, fp32) for each head
of the group, and `_combine_best`, one program = one warp = some columns of one head's query, ranks the candidates by these sums
and adds up the outputs of the best and the forced ones. Every program ranks for itself; one more a query writes the list. All
that `_combine_best` may need it asks for at once, so it waits for memory once, and a warp needs no barrier.
Cost: reads values of all candidates instead of the chosen ones' keys again; two launches instead of three, one of which waited
for counts, masses, a threshold and then for keys. Pays where latency bounds the step, not where memory does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyramidbench.kernels.attention_portable import LOG2_E
from pyramidbench.kernels.decode_attend import SMALL_BLOCK_BYTES, attend_keys, joined
from pyramidbench.kernels.decode_call import DecodeCall
from pyramidbench.kernels.decode_launch import after_previous, ask_for
from pyramidbench.kernels.decode_leaf import block_tile, query_tile
from pyramidbench.kernels.decode_place import block_start, new_query
from pyramidbench.kernels.route_tile import write_list
from pyramidbench.kernels.top_k import best

LN_2 = tl.constexpr(0.6931471805599453)
EACH_BYTES = 20 << 20
"""Values that a step may read beside those of the chosen blocks: 5 µs at 4 TB/s, for the launch and the three waits that they
save. At D 128, K 32 and P 3 batches of one and two. H200, µs of a step with 8 MB, and with leaves first, third version
(docs/performance.md): 33.6 and 35.1 at 16k, 37.8 and 38.9 at 32k, 55.9 and 58.0 at 256k, 74.8 and 71.2 at 1M; with a start at
up to 2 048 nodes 32.9 and 34.2, 33.6 and 35.4, 47.5 and 49.1, 68.3 and 69.1. More than 8 MB was not measured."""
WARP_NUMBERS = 2048
"""Numbers that a warp of `_combine_best` holds of the parts, and at most of the log-sum-exps: 64 registers a thread each. At
batch 1, K 32 and P 3 that is a warp for 16 columns of a head, 264 programs; the parts' loads and their sum are then 1 200 of
a thread's instructions, and 1 450 with 32 columns, which take as long on an H200."""
MOST_COMBINE_WARPS = 8
PIECES = 2
"""Parts of a small block that `_attend_each` goes through: as stages of a loop, which have keys and values of all parts copied
to shared memory at once. In one part a thread waits for the keys before it loads the values, and a step was slower on an
H200. Six programs fit a multiprocessor still: 792 in one go at batch 1."""


@triton.jit
def fetch_ahead(
    x_at, stride, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Ask for a block's rows, so that L2 has them when they are loaded: one request for each line of 128 bytes.

    A load would do, were it not that the compiler puts it behind the barriers of the product before its own.
    """
    if AHEAD:
        PER_LINE: tl.constexpr = 1024 // x_at.dtype.element_ty.primitive_bitwidth
        LINES: tl.constexpr = (BLOCK_DIM + PER_LINE - 1) // PER_LINE
        row = tl.minimum(tl.arange(0, BLOCK_N), BLOCK_SIZE - 1)
        first = tl.minimum(tl.arange(0, LINES) * PER_LINE, DIM - 1)
        ask_for(x_at + row[:, None] * stride + first[None, :])


@triton.jit
def _attend_each(
    q_ptr, k_ptr, v_ptr, lengths_ptr, pages_ptr, candidates_ptr, count_ptr, part_ptr, part_lse_ptr, q_strides, k_strides,
    v_strides, scale_log2, sets, kv_heads, queries, blocks, sink_blocks, local_blocks, candidate_width, width,
    GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, IS_PAGED: tl.constexpr, PIECE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    item, slot = program // width, (program % width).to(tl.int32)
    index, which, batch = (item % queries).to(tl.int32), item // queries % sets, item // queries // sets
    kv_head = which * kv_heads // sets
    row, offs_n = tl.arange(0, ROWS), tl.arange(0, PIECE)
    offs_d, offs_dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    q_base = q_ptr + batch * q_strides[0] + which * GROUP * q_strides[1] + index.to(tl.int64) * q_strides[2]
    # The walk's launches lie before this one, and began when the query was there and the tokens were counted.
    q = query_tile(q_base, q_strides, offs_d, HEAD_DIM, GROUP, ROWS)
    length = tl.load(lengths_ptr + batch * kv_heads + kv_head)
    position, _, sink_end, local_start, forced = new_query(
        length, index, queries, BLOCK_SIZE, sink_blocks, local_blocks
    )
    after_previous(OVERLAPS)
    found = tl.load(count_ptr + item)
    # Read without waiting for the count (volatile, or the compiler does wait); behind the last candidate it is not used.
    listed = tl.load(candidates_ptr + item * candidate_width + tl.minimum(slot, candidate_width - 1), volatile=True)
    extra = slot - found
    block = tl.where(extra < 0, listed, tl.where(extra < sink_end, extra, local_start + extra - sink_end))
    if extra < forced:
        k_at = block_start(k_ptr, k_strides, pages_ptr, blocks, batch, kv_head, block, BLOCK_SIZE, IS_PAGED)
        v_at = block_start(v_ptr, v_strides, pages_ptr, blocks, batch, kv_head, block, BLOCK_SIZE, IS_PAGED)
        fetch_ahead(v_at, v_strides[2], BLOCK_SIZE, BLOCK_N, HEAD_DIM_V, BLOCK_DV, OVERLAPS and PIECE == BLOCK_N)
        # of shape [ROWS, BLOCK_DV]
        acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
        row_max, row_sum = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
        for start in tl.range(0, BLOCK_N, PIECE):
            key = start + offs_n
            seen = (key < BLOCK_SIZE) & (block * BLOCK_SIZE + key <= position)
            k = block_tile(k_at + start * k_strides[2], k_strides[2], seen, offs_d, HEAD_DIM)
            v = block_tile(v_at + start * v_strides[2], v_strides[2], seen, offs_dv, HEAD_DIM_V)
            acc, row_max, row_sum = attend_keys(q, k, v, seen, scale_log2, acc, row_max, row_sum)
        out = acc / row_sum[:, None]
        part = program * GROUP + row
        at = part_ptr + part[:, None] * HEAD_DIM_V + offs_dv[None, :]
        tl.store(at, out, mask=(row < GROUP)[:, None] & (offs_dv < HEAD_DIM_V)[None, :])
        tl.store(part_lse_ptr + part, row_max + tl.log2(row_sum), mask=row < GROUP)


@triton.jit
def _chosen(lse, head, is_candidate, is_forced, keep, GROUP: tl.constexpr, REDUCE: tl.constexpr):
    """Which of the candidates are the best `keep`, by their log-sum-exps (base 2) [SLOTS, HEADS] and the forced blocks'."""
    is_head = (head < GROUP)[None, :]
    # A NaN has no mass.
    mass = tl.where((lse == lse) & is_head & (is_candidate | is_forced)[:, None], lse * LN_2, float("-inf"))
    if REDUCE == "sum_lse":
        mass = tl.where(is_head, mass, 0.0)
    return best(joined(mass, None, REDUCE), is_candidate, keep)


@triton.jit
def _combine_best(
    lengths_ptr, candidates_ptr, count_ptr, part_ptr, part_lse_ptr, list_ptr, out_ptr, sets, kv_heads, queries, top_k,
    sink_blocks, local_blocks, candidate_width, width, list_width,
    GROUP: tl.constexpr, HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM_V: tl.constexpr, COLUMNS: tl.constexpr,
    SLOTS: tl.constexpr, REDUCE: tl.constexpr, BUDGETED: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    CHUNKS: tl.constexpr = (HEAD_DIM_V + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0).to(tl.int64)
    item, share = program // (GROUP * CHUNKS + 1), (program % (GROUP * CHUNKS + 1)).to(tl.int32)
    # The last one has the list to write, and no head.
    mine, writes_list = share // CHUNKS, share == GROUP * CHUNKS
    index, which, batch = (item % queries).to(tl.int32), item // queries % sets, item // queries // sets
    kv_head = which * kv_heads // sets
    slot, head, offs_dv = tl.arange(0, SLOTS), tl.arange(0, HEADS), share % CHUNKS * COLUMNS + tl.arange(0, COLUMNS)
    is_dim, held, listed = (
        offs_dv < HEAD_DIM_V,
        tl.where(writes_list, 0, width),
        tl.where(writes_list, candidate_width, 0),
    )
    # What differs between places is 32 bits wide and follows from constants, so it stands in the loads themselves.
    lse_at = part_lse_ptr + item * width * GROUP + slot * GROUP
    parts_at = part_ptr + (item * width * GROUP + mine) * HEAD_DIM_V + slot[:, None] * (GROUP * HEAD_DIM_V)
    # The walk's launches, that lie between, began when the tokens were counted.
    length = tl.load(lengths_ptr + batch * kv_heads + kv_head)
    _, _, sink_end, local_start, forced = new_query(length, index, queries, BLOCK_SIZE, sink_blocks, local_blocks)
    after_previous(OVERLAPS)
    found = tl.load(count_ptr + item)
    # Places that no block filled hold anything, and are left out below.
    mask = (slot < width)[:, None] & (head < GROUP)[None, :]
    lse = tl.load(lse_at[:, None] + head[None, :], mask=mask, other=float("-inf"))
    own = tl.load(lse_at + mine, mask=slot < held, other=float("-inf"))
    candidate = tl.load(candidates_ptr + item * candidate_width + slot, mask=slot < listed, other=-1)
    # of shape [SLOTS, COLUMNS]
    parts = tl.load(parts_at + offs_dv[None, :], mask=(slot < held)[:, None] & is_dim[None, :], other=0.0)
    keep = tl.maximum(top_k - forced, 0) if BUDGETED else top_k
    is_candidate, is_forced = slot < found, (slot >= found) & (slot < found + forced)
    chosen = is_candidate
    if found > keep:
        chosen = _chosen(lse, head, is_candidate, is_forced, keep, GROUP, REDUCE)
    if writes_list:
        write_list(list_ptr + item * list_width, candidate, chosen, sink_end, local_start, forced, list_width)
    else:
        taken = chosen | is_forced
        own = tl.where(taken, own, float("-inf"))
        top = tl.max(own, 0)
        weight = tl.exp2(own - tl.where(top == float("-inf"), 0.0, top))
        total = tl.sum(weight, 0)
        out = tl.sum(tl.where(taken[:, None], parts, 0.0) * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
        out_at = out_ptr + (item * GROUP + mine) * HEAD_DIM_V + offs_dv
        tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=is_dim)


def piece_rows(call: DecodeCall) -> int:
    """Keys of a part of a block; all of them where shared memory would not hold keys and values of several programs."""
    sizes, rows = call.store.sizes, int(call.shape["BLOCK_N"])
    held = sizes.block_size * max(sizes.head_dim, sizes.head_dim_v) * call.q.element_size()
    return max(16, rows // PIECES) if held <= SMALL_BLOCK_BYTES else rows


def combine_tile(call: DecodeCall, width: int) -> tuple[int, int, int]:
    """Places, columns and warps of a program that chooses among `width` parts: one warp, and no barrier, where it can."""
    slots, heads = triton.next_power_of_2(max(16, width)), triton.next_power_of_2(call.group)
    warps = max(1, slots * max(8, heads) // 2048)
    return slots, min(int(call.shape["BLOCK_DV"]), warps * WARP_NUMBERS // slots), warps


def pays_each(call: DecodeCall) -> bool:
    """Whether attending to every candidate costs little enough."""
    sizes, width = call.store.sizes, call.passed + call.forced_width
    if call.rules.leaf_score != "exact" or combine_tile(call, width)[2] > MOST_COMBINE_WARPS:
        return False
    values = sizes.block_size * sizes.head_dim_v * call.q.element_size()
    return call.items * (width - call.list_width) * values <= EACH_BYTES


def run_each(call: DecodeCall, candidates: Tensor, counts: Tensor, lists: Tensor) -> Tensor:
    """Attention of every query to its best and forced blocks, [items, heads of a group, Dv] in q's dtype; fills `lists`."""
    store, rules, sizes = call.store, call.rules, call.store.sizes
    width = candidates.shape[1] + call.forced_width
    out = torch.empty(call.items, call.group, sizes.head_dim_v, dtype=call.q.dtype, device=call.q.device)
    piece = piece_rows(call)
    parts, part_lse = call.scratch(width * call.group * sizes.head_dim_v), call.scratch(width * call.group)
    names = ("GROUP", "ROWS", "BLOCK_SIZE", "BLOCK_N", "HEAD_DIM", "HEAD_DIM_V", "BLOCK_D", "BLOCK_DV", "IS_PAGED")
    _attend_each[(call.items * width,)](
        call.q, store.k, store.v, store.lengths, store.pages, candidates, counts, parts, part_lse, call.q.stride()[:3],
        store.k.stride()[:3], store.v.stride()[:3], call.scale * LOG2_E, *call.counts, sizes.blocks, rules.sink_blocks,
        rules.local_blocks, candidates.shape[1], width, PIECE=piece, num_warps=call.launch.num_warps,
        num_stages=PIECES + 1, **{name: call.shape[name] for name in names}, **call.overlap,
    )  # fmt: skip
    slots, columns, warps = combine_tile(call, width)
    shares = call.group * triton.cdiv(sizes.head_dim_v, columns) + 1
    _combine_best[(call.items * shares,)](
        store.lengths, candidates, counts, parts, part_lse, lists, out, *call.counts, rules.top_k, rules.sink_blocks,
        rules.local_blocks, candidates.shape[1], width, lists.shape[1], HEADS=triton.next_power_of_2(call.group),
        COLUMNS=columns, SLOTS=slots, REDUCE=rules.head_reduce, BUDGETED=rules.forced_in_budget, num_warps=warps,
        **{name: call.shape[name] for name in ("GROUP", "BLOCK_SIZE", "HEAD_DIM_V")}, **call.overlap,
    )  # fmt: skip
    return out
