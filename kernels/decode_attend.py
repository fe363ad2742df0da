"""The last choice of a decoding step and attention to it, split over the chosen blocks; `kernels.decode` is the torch twin.

`_attend`: one program = one query of one set and PER of its listed blocks. Every program ranks the candidates for itself (a few
hundred numbers) instead of waiting for a launch that would: sum_prob: Σ_h exp(S_h - Z_h), Z_h the logsumexp of S_h over
candidates and forced blocks; sum_lse: Σ_h S_h; lse: logsumexp over heads. The first one also writes the list. Then it streams
its blocks with an online softmax, heads of the group as rows, and leaves output and log-sum-exp (base 2) in fp32.
`_combine`: one program = one head's query; the parts add up by their log-sum-exps. Without a split nothing is combined.
Cost: 2·(D + Dv) operations a head and key; each listed block is read once. Bound by memory (9 MB at batch 1, 8 key/value
heads, 35 blocks, D 128) and by the chain of count, masses, threshold and block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyramidbench.kernels.attention_portable import LOG2_E
from pyramidbench.kernels.decode_call import DecodeCall
from pyramidbench.kernels.decode_launch import after_previous
from pyramidbench.kernels.decode_leaf import block_tile, query_tile
from pyramidbench.kernels.decode_place import block_start, new_query
from pyramidbench.kernels.route_tile import write_list
from pyramidbench.kernels.top_k import best, log_sum_exp

COMBINE_WARPS = 4
PROGRAMS_PER_SM = 4
"""As many programs as hide a block's latency; more splits mean more parts to combine. Eight were slower on an H200."""
MOST_REGISTERS = 128
"""Of a thread where a block is small: four programs of four warps fit a multiprocessor, as `split_sizes` counts on. With the
148 that the compiler takes only three do, and of 448 programs (batch 8, K 32) 52 began when the others had ended. Costs 8
bytes of spills; without the bound a step was slower on an H200."""
SMALL_BLOCK_BYTES = 16 << 10


@triton.jit
def joined(mass, other, REDUCE: tl.constexpr):
    """Scores [SLOTS] from log-masses of candidates [SLOTS, heads]; -inf: no such place. other: those of forced blocks, [FORCED,
    heads]; None where `mass` holds them beside the candidates."""
    if REDUCE == "sum_prob":
        top = tl.max(mass, 0)
        if other is not None:
            top = tl.maximum(top, tl.max(other, 0))
        top = tl.where(top == float("-inf"), 0.0, top)[None, :]
        weight = tl.exp(mass - top)
        total = tl.sum(weight, 0)
        if other is not None:
            total += tl.sum(tl.exp(other - top), 0)
        # A head past the group has no mass at all; a query of NaN has none either, and then its set is that of ties.
        return tl.sum(weight * tl.where(total > 0, 1.0 / tl.where(total > 0, total, 1.0), 0.0)[None, :], 1)
    if REDUCE == "sum_lse":
        return tl.sum(mass, 1)
    return log_sum_exp(mass, 1)


@triton.jit
def _choose(
    mass_ptr, slot, found, forced, keep, GROUP: tl.constexpr, HEADS: tl.constexpr, FORCED_SLOTS: tl.constexpr,
    REDUCE: tl.constexpr,
):  # fmt: skip
    """Which of the candidates at places `slot` are the best `keep`, by their masses [places, GROUP]."""
    head, extra = tl.arange(0, HEADS), tl.arange(0, FORCED_SLOTS)
    mask = (slot < found)[:, None] & (head < GROUP)[None, :]
    # of shape [SLOTS, HEADS]; for a sum over heads a missing head counts 0
    mass = tl.load(mass_ptr + slot[:, None] * GROUP + head[None, :], mask=mask, other=float("-inf"))
    if REDUCE == "sum_lse":
        mass = tl.where((head < GROUP)[None, :], mass, 0.0)
    # of shape [FORCED_SLOTS, HEADS]
    other = tl.full([FORCED_SLOTS, HEADS], float("-inf"), tl.float32)
    if REDUCE == "sum_prob":
        mask = (extra < forced)[:, None] & (head < GROUP)[None, :]
        at = mass_ptr + (found + extra)[:, None] * GROUP + head[None, :]
        other = tl.load(at, mask=mask, other=float("-inf"))
    return best(joined(mass, other, REDUCE), slot < found, keep)


@triton.jit
def attend_keys(q, k, v, seen, scale_log2, acc, row_max, row_sum):
    """One step of an online softmax over the keys that are seen: (acc [ROWS, BLOCK_DV], row_max, row_sum).

    Some key must have been seen by then: of a listed block, which starts at or before the query, the first one is.
    """
    # of shape [ROWS, n]
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
    scores = tl.where(seen[None, :], scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    weights, rescale = tl.exp2(scores - new_max[:, None]), tl.exp2(row_max - new_max)
    row_sum = row_sum * rescale + tl.sum(weights, 1)
    return tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee"), new_max, row_sum


@triton.jit
def _attend(
    q_ptr, k_ptr, v_ptr, lengths_ptr, pages_ptr, candidates_ptr, count_ptr, mass_ptr, list_ptr, part_ptr, part_lse_ptr,
    q_strides, k_strides, v_strides, scale_log2, sets, kv_heads, queries, blocks, top_k, sink_blocks, local_blocks,
    candidate_width, mass_width, list_width, splits, per,
    GROUP: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, IS_PAGED: tl.constexpr,
    SLOTS: tl.constexpr, FORCED_SLOTS: tl.constexpr, REDUCE: tl.constexpr, IS_EXACT: tl.constexpr, BUDGETED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    item, split = program // splits, (program % splits).to(tl.int32)
    index, which, batch = (item % queries).to(tl.int32), item // queries % sets, item // queries // sets
    kv_head = which * kv_heads // sets
    slot, row, offs_n = tl.arange(0, SLOTS), tl.arange(0, ROWS), tl.arange(0, BLOCK_N)
    offs_d, offs_dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    q_base = q_ptr + batch * q_strides[0] + which * GROUP * q_strides[1] + index.to(tl.int64) * q_strides[2]
    # What lies before this launch began when the query was there.
    q = query_tile(q_base, q_strides, offs_d, HEAD_DIM, GROUP, ROWS)
    after_previous(OVERLAPS)
    length, found = tl.load(lengths_ptr + batch * kv_heads + kv_head), tl.load(count_ptr + item)
    # Read without waiting for the count; what lies behind the last candidate is not used.
    candidate = tl.load(candidates_ptr + item * candidate_width + slot, mask=slot < candidate_width, other=-1)
    position, _, sink_end, local_start, forced = new_query(
        length, index, queries, BLOCK_SIZE, sink_blocks, local_blocks
    )
    keep = tl.maximum(top_k - forced, 0) if BUDGETED else top_k
    chosen = slot < found
    if IS_EXACT:  # noqa: SIM102 - the first condition is compiled away
        if found > keep:
            mass_at = mass_ptr + item * mass_width * GROUP
            chosen = _choose(mass_at, slot, found, forced, keep, GROUP, HEADS, FORCED_SLOTS, REDUCE)
    kept, order = tl.sum(chosen.to(tl.int32)), tl.cumsum(chosen.to(tl.int32)) - 1
    if split == 0:
        write_list(list_ptr + item * list_width, candidate, chosen, sink_end, local_start, forced, list_width)

    # of shape [ROWS, BLOCK_DV]
    acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    row_max, row_sum = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    for place in range(split * per, tl.minimum(split * per + per, forced + kept)):
        ranked = tl.sum(tl.where(chosen & (order == place - sink_end), candidate, 0))
        block = tl.where(place < sink_end + kept, ranked, local_start + place - sink_end - kept)
        block = tl.where(place < sink_end, place, block)
        seen = (offs_n < BLOCK_SIZE) & (block * BLOCK_SIZE + offs_n <= position)
        k_at = block_start(k_ptr, k_strides, pages_ptr, blocks, batch, kv_head, block, BLOCK_SIZE, IS_PAGED)
        v_at = block_start(v_ptr, v_strides, pages_ptr, blocks, batch, kv_head, block, BLOCK_SIZE, IS_PAGED)
        k = block_tile(k_at, k_strides[2], seen, offs_d, HEAD_DIM)
        v = block_tile(v_at, v_strides[2], seen, offs_dv, HEAD_DIM_V)
        acc, row_max, row_sum = attend_keys(q, k, v, seen, scale_log2, acc, row_max, row_sum)
    is_empty = row_sum == 0
    row_sum = tl.where(is_empty, 1.0, row_sum)
    part = program * GROUP + row
    at = part_ptr + part[:, None] * HEAD_DIM_V + offs_dv[None, :]
    out = (acc / row_sum[:, None]).to(part_ptr.dtype.element_ty)
    tl.store(at, out, mask=(row < GROUP)[:, None] & (offs_dv < HEAD_DIM_V)[None, :])
    tl.store(part_lse_ptr + part, tl.where(is_empty, float("-inf"), row_max + tl.log2(row_sum)), mask=row < GROUP)


@triton.jit
def _combine(
    part_ptr, part_lse_ptr, out_ptr, splits,
    GROUP: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, SPLITS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    after_previous(OVERLAPS)
    item, head = program // GROUP, program % GROUP
    split, offs_dv = tl.arange(0, SPLITS), tl.arange(0, BLOCK_DV)
    part = (item * splits + split) * GROUP + head
    lse = tl.load(part_lse_ptr + part, mask=split < splits, other=float("-inf"))
    top = tl.max(lse, 0)
    weight = tl.exp2(lse - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weight, 0)
    # of shape [SPLITS, BLOCK_DV]
    mask = (split < splits)[:, None] & (offs_dv < HEAD_DIM_V)[None, :]
    parts = tl.load(part_ptr + part[:, None] * HEAD_DIM_V + offs_dv[None, :], mask=mask, other=0.0)
    out = tl.sum(parts * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + program * HEAD_DIM_V + offs_dv, out.to(out_ptr.dtype.element_ty), mask=offs_dv < HEAD_DIM_V)


def run_attend(call: DecodeCall, candidates: Tensor, counts: Tensor, masses: Tensor | None, lists: Tensor) -> Tensor:
    """Attention of every query to its chosen and forced blocks, [items, heads of a group, Dv] in q's dtype; fills `lists`."""
    store, rules, sizes = call.store, call.rules, call.store.sizes
    splits, per = split_sizes(call.list_width, call.items, call.q.device)
    held = sizes.block_size * max(sizes.head_dim, sizes.head_dim_v) * call.q.element_size()
    out = torch.empty(call.items, call.group, sizes.head_dim_v, dtype=call.q.dtype, device=call.q.device)
    parts, heads = out, triton.next_power_of_2(call.group)
    if splits > 1:
        parts = torch.empty(call.items, splits, call.group, sizes.head_dim_v, device=call.q.device)
    part_lse = call.scratch(splits * call.group)
    _attend[(call.items * splits,)](
        call.q, store.k, store.v, store.lengths, store.pages, candidates, counts, masses, lists, parts, part_lse,
        call.q.stride()[:3], store.k.stride()[:3], store.v.stride()[:3], call.scale * LOG2_E, *call.counts, sizes.blocks,
        rules.top_k, rules.sink_blocks, rules.local_blocks, candidates.shape[1],
        0 if masses is None else masses.shape[1], lists.shape[1],
        splits, per, HEADS=heads, SLOTS=triton.next_power_of_2(max(16, candidates.shape[1])),
        FORCED_SLOTS=triton.next_power_of_2(max(1, call.forced_width)), REDUCE=rules.head_reduce,
        IS_EXACT=masses is not None, BUDGETED=rules.forced_in_budget, num_warps=call.launch.num_warps,
        num_stages=call.launch.num_stages, maxnreg=MOST_REGISTERS if held <= SMALL_BLOCK_BYTES else None,
        **{name: value for name, value in call.shape.items() if name != "HAS_BOUNDS"}, **call.overlap,
    )  # fmt: skip
    if splits > 1:
        _combine[(call.items * call.group,)](
            parts, part_lse, out, splits, GROUP=call.group, HEAD_DIM_V=sizes.head_dim_v, BLOCK_DV=call.shape["BLOCK_DV"],
            SPLITS=triton.next_power_of_2(splits), num_warps=COMBINE_WARPS, **call.overlap,
        )  # fmt: skip
    return out


def split_sizes(width: int, items: int, device: torch.device) -> tuple[int, int]:
    """Splits of a list of up to `width` blocks, and blocks of each: as many as the device has room for programs."""
    multiprocessors = 4 if device.type != "cuda" else torch.cuda.get_device_properties(device).multi_processor_count
    room = max(1, multiprocessors * PROGRAMS_PER_SM // items)
    per = -(-width // min(width, room))
    return -(-width // per), per
