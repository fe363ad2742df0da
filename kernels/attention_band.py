"""Attention to a list's band, the blocks that it shares with its neighbours: the first step of `kernels.attention_by_key`.

The band of a list: its leading run 0, 1, … of at most SINK_BAND blocks, and its trailing run that ends in the tile's own
block, of at most LOCAL_BAND blocks. The rest, its middle, is the slots [begin, end).
Tiling: one program = BLOCK_M consecutive rows of a set (query-major, so that a list's rows stand together), which stream the
union of their bands under each row's own mask, by the online softmax of FlashAttention-2 (arXiv 2307.08691).
Cost: a few blocks a program, read once for BLOCK_M / (rows a list) lists. Bound by latency: three or four steps a program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyramidbench.selection import BlockSelection

LOG2_E = 1.4426950408889634
SINK_BAND = 1
LOCAL_BAND = 2
MIDDLE_LISTS = 256


@triton.jit
def _own_block(tile, QUERY_TILE, seq_len_q, seq_len_kv, BLOCK_SIZE):
    """The block of a tile's last query; negative before the first key."""
    last = tl.minimum((tile + 1) * QUERY_TILE, seq_len_q) - 1 + seq_len_kv - seq_len_q
    return tl.where(last < 0, -1, tl.maximum(last, 0) // BLOCK_SIZE)


@triton.jit
def _middle(
    lists_ptr, count_ptr, begin_ptr, end_ptr, items, tiles, width, seq_len_q, seq_len_kv,
    QUERY_TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, IS_CAUSAL: tl.constexpr,
    SINKS: tl.constexpr, LOCALS: tl.constexpr, LISTS: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0).to(tl.int64) * LISTS + tl.arange(0, LISTS)
    count = tl.load(count_ptr + item, mask=item < items, other=0)
    begin = tl.zeros([LISTS], tl.int32)
    for place in tl.static_range(SINKS):
        block = tl.load(lists_ptr + item * width + place, mask=place < count, other=-1)
        begin += ((block == place) & (begin == place)).to(tl.int32)
    end = count
    if IS_CAUSAL:
        own = _own_block((item % tiles).to(tl.int32), QUERY_TILE, seq_len_q, seq_len_kv, BLOCK_SIZE)
        for place in tl.static_range(LOCALS):
            block = tl.load(lists_ptr + item * width + end - 1, mask=end > begin, other=-1)
            end -= ((block >= 0) & (block == own - place) & (end == count - place)).to(tl.int32)
    tl.store(begin_ptr + item, begin, mask=item < items)
    tl.store(end_ptr + item, end, mask=item < items)


@triton.jit
def load_tile(at, mask, offs_d, HEAD_DIM: tl.constexpr):
    """Rows [n, BLOCK_D] at the addresses `at` [n]; 0 outside the mask and past the head dim."""
    return tl.load(at[:, None] + offs_d[None, :], mask=mask[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def _band(
    q_ptr, k_ptr, v_ptr, begin_ptr, end_ptr, count_ptr, out_ptr, lse_ptr, q_strides, k_strides, v_strides,
    scale_log2, sets, kv_heads, tiles, seq_len_q, seq_len_kv,
    GROUP: tl.constexpr, QUERY_TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = GROUP * QUERY_TILE
    parts = tl.cdiv(tiles * ROWS, BLOCK_M)
    program = tl.program_id(0).to(tl.int64)
    which = program // parts % sets
    batch = program // parts // sets
    offs_n, offs_d, offs_dv = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)

    row = (program % parts).to(tl.int32) * BLOCK_M + tl.arange(0, BLOCK_M)
    tile = tl.minimum(row // ROWS, tiles - 1)
    query = tile * QUERY_TILE + row % QUERY_TILE
    real = (row < tiles * ROWS) & (query < seq_len_q)
    query = tl.minimum(query, seq_len_q - 1)
    position = query + seq_len_kv - seq_len_q
    head = which * GROUP + row % ROWS // QUERY_TILE
    item = program // parts * tiles + tile
    begin = tl.load(begin_ptr + item)
    run = tl.load(count_ptr + item) - tl.load(end_ptr + item)
    own = _own_block(tile, QUERY_TILE, seq_len_q, seq_len_kv, BLOCK_SIZE)
    # The union of the rows' bands: sinks, then the local blocks from the first on.
    sinks = tl.max(begin)
    local = tl.maximum(tl.min(own - run + 1), sinks)
    steps = sinks + tl.maximum(tl.max(tl.where(run > 0, own, -1)) - local + 1, 0)

    k_base = k_ptr + batch * k_strides[0] + which * kv_heads // sets * k_strides[1]
    v_base = v_ptr + batch * v_strides[0] + which * kv_heads // sets * v_strides[1]
    # of shape [BLOCK_M, BLOCK_D]
    q_at = q_ptr + batch * q_strides[0] + head * q_strides[1] + query.to(tl.int64) * q_strides[2]
    q = load_tile(q_at, real, offs_d, HEAD_DIM)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    for step in range(0, steps):
        block = tl.where(step < sinks, step, local + step - sinks)
        key = block * BLOCK_SIZE + offs_n
        inside = (offs_n < BLOCK_SIZE) & (key < seq_len_kv)
        # The keys that a row sees here: none of a block outside its band, all up to its position of one inside.
        limit = tl.where((block < begin) | ((block > own - run) & (block <= own)), seq_len_kv - 1, -1)
        if IS_CAUSAL:
            limit = tl.minimum(limit, position)
        # of shape [BLOCK_N, BLOCK_D]
        k = load_tile(k_base + key.to(tl.int64) * k_strides[2], inside, offs_d, HEAD_DIM)
        # of shape [BLOCK_M, BLOCK_N]
        seen = inside[None, :] & (key[None, :] <= limit[:, None])
        scores = tl.where(seen, tl.dot(q, tl.trans(k), input_precision="ieee"), float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores * scale_log2 - shift[:, None])
        rescale = tl.exp2(row_max - shift)
        row_max = new_max
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        # of shape [BLOCK_N, BLOCK_DV]
        v = load_tile(v_base + key.to(tl.int64) * v_strides[2], inside, offs_dv, HEAD_DIM_V)
        acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")

    seen_any = row_sum > 0
    row_sum = tl.where(seen_any, row_sum, 1.0)
    out = acc * (1.0 / row_sum)[:, None]
    out_row = (batch * sets * GROUP + head) * seq_len_q + query
    out_at = out_ptr + out_row[:, None] * HEAD_DIM_V + offs_dv[None, :]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=real[:, None] & (offs_dv < HEAD_DIM_V)[None, :])
    lse = tl.where(seen_any, (row_max + tl.log2(row_sum)) * 0.6931471805599453, float("-inf"))
    tl.store(lse_ptr + out_row, lse, mask=real)


def run_middle(selection: BlockSelection, indices: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Where each list's middle begins and ends: int32 [B, sets, tiles] each. indices, counts: contiguous."""
    begins, ends = torch.empty_like(counts), torch.empty_like(counts)
    _middle[(triton.cdiv(counts.numel(), MIDDLE_LISTS),)](
        indices, counts, begins, ends, counts.numel(), counts.shape[-1], indices.shape[-1],
        selection.seq_len_q, selection.seq_len_kv, QUERY_TILE=selection.query_tile, BLOCK_SIZE=selection.block_size,
        IS_CAUSAL=selection.causal, SINKS=SINK_BAND, LOCALS=LOCAL_BAND, LISTS=MIDDLE_LISTS,
    )  # fmt: skip
    return begins, ends


def run_band(
    tensors: tuple[Tensor, Tensor, Tensor], lists: tuple[Tensor, Tensor, Tensor], results: tuple[Tensor, Tensor],
    selection: BlockSelection, scale: float, shape: dict[str, int | bool],
) -> None:  # fmt: skip
    """Write output and log-sum-exp of the bands alone. tensors: q, k, v; lists: begins, ends, counts; results: output
    [B, H, M, Dv] and log-sum-exp [B, H, M]; shape: the constants and launch shape of `_band`."""
    (q, k, _), (batch, sets, tiles) = tensors, lists[0].shape
    rows = q.shape[1] // sets * selection.query_tile
    strides = [tensor.stride()[:3] for tensor in tensors]
    sizes = (sets, k.shape[1], tiles, selection.seq_len_q, selection.seq_len_kv)
    grid = (batch * sets * triton.cdiv(tiles * rows, int(shape["BLOCK_M"])),)
    _band[grid](*tensors, *lists, *results, *strides, scale * LOG2_E, *sizes, **shape)
