"""Gradients of block-sparse attention in keys and values, block by block: the last step of `kernels.attention_bwd`.

For a key x of block b, over the rows i of the tiles that list b, with p_ix = exp(s·q_i·k_x - lse_i) where x ≤ p_i, else 0:
dv_x = Σ_i p_ix·do_i;  dk_x = s · Σ_i p_ix·(do_i·v_x - δ_i)·q_i. A block that no tile lists gets 0.
Lists of one key/value head stand after one another (its sets × tiles): transpose.py turns them into each block's pairs, in
order, cut into chunks. `_attend_dkdv`: one program = a chunk × BLOCK_N keys of its block, loaded once; it streams the rows
of the chunk's pairs, BLOCK_M at a time, with the keys as rows of every product, so that weights need not leave registers.
The only chunk of its block writes dk and dv; others write pieces, which attention_pieces.py adds in order. No atomics: two
runs agree bit for bit. A block that every tile lists is many chunks, so many programs.
A key's sums meet no other key, so keys past a block's or the sequence's end need no mask: they are not stored.
Cost: 4·(D + Dv) operations per (row, key) pair; a (row, block) pair reads D + Dv elements. Bound by the matrix units and,
where q and do of a head outgrow L2, by memory. Sums are fp32; weights are rounded to do's dtype, gradients of logits to q's.
Source: FlashAttention-2 (arXiv 2307.08691), algorithm 2.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from pyramidbench.kernels.attention_band import load_tile
from pyramidbench.kernels.attention_dq import RowStats
from pyramidbench.kernels.attention_pieces import Pieces, put
from pyramidbench.kernels.attention_portable import LIST_CHUNK, LOG2_E, AttendTile
from pyramidbench.kernels.transpose import Transposed
from pyramidbench.selection import BlockSelection


@triton.jit
def _rows_to_mask(
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


@triton.jit
def _rows_at(
    start, rows, pairs_ptr, q_ptr, d_out_ptr, log_sums_ptr, delta_ptr, q_rows, d_out_rows, q_strides, d_out_strides,
    batch, first_head, tiles, seq_len_q,
    GROUP: tl.constexpr, QUERY_TILE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, SEVERAL: tl.constexpr,
    USE_TMA: tl.constexpr,
):  # fmt: skip
    """BLOCK_M of a chunk's `rows` rows: q [BLOCK_M, BLOCK_D], do [BLOCK_M, BLOCK_DV], log-sum-exps, δ and queries [BLOCK_M]."""
    ROWS: tl.constexpr = GROUP * QUERY_TILE
    row = start + tl.arange(0, BLOCK_M)
    # For the copy engine all rows belong to one pair.
    pair_at = pairs_ptr + (start if USE_TMA else row) // ROWS
    tile = tl.load(pair_at) if USE_TMA else tl.load(pair_at, mask=row < rows, other=0)
    base_head = first_head
    if SEVERAL:
        base_head = first_head + tile // tiles * GROUP
        tile = tile % tiles
    head = base_head + row % ROWS // QUERY_TILE
    query = tile * QUERY_TILE + row % ROWS % QUERY_TILE
    real = (row < rows) & (query < seq_len_q)
    stats_row = head * seq_len_q + query
    log_sum = tl.load(log_sums_ptr + stats_row, mask=real, other=float("inf"))
    delta = tl.load(delta_ptr + stats_row, mask=real, other=0.0)
    if USE_TMA:
        at_head = (base_head + start % ROWS // QUERY_TILE).to(tl.int32)
        at_query = tile * QUERY_TILE + start % ROWS % QUERY_TILE
        q = q_rows.load([batch.to(tl.int32), at_head, at_query, 0]).reshape(BLOCK_M, BLOCK_D)
        d_out = d_out_rows.load([batch.to(tl.int32), at_head, at_query, 0]).reshape(BLOCK_M, BLOCK_DV)
    else:
        q_at = q_ptr + head * q_strides[1] + query.to(tl.int64) * q_strides[2]
        q = load_tile(q_at, real, tl.arange(0, BLOCK_D), HEAD_DIM)
        d_out_at = d_out_ptr + head * d_out_strides[1] + query.to(tl.int64) * d_out_strides[2]
        d_out = load_tile(d_out_at, real, tl.arange(0, BLOCK_DV), HEAD_DIM_V)
    return q, d_out, log_sum, delta, query


@triton.jit
def _add_product(acc, a, b):
    """acc + a·b in fp32. fp32 rows are summed among themselves first: one chain of additions was 2 to 7 times less exact."""
    if a.dtype == tl.float32:
        # The bound keeps the compiler from folding the addition into the chain.
        return acc + tl.dot(a, b, input_precision="ieee", max_num_imprecise_acc=a.shape[1])
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _add_rows(
    k, v, q, d_out, log_sum, delta, position, key, dk, dv, scale_log2, MASKED: tl.constexpr
):  # fmt: skip
    """dk [BLOCK_N, BLOCK_D] and dv [BLOCK_N, BLOCK_DV] with the share of BLOCK_M rows."""
    # of shape [BLOCK_N, BLOCK_M]
    scores = tl.dot(k, tl.trans(q), input_precision="ieee")
    weights = tl.exp2(scores * scale_log2 - log_sum[None, :])
    if MASKED:
        weights = tl.where(key[:, None] <= position[None, :], weights, 0.0)
    dv = _add_product(dv, weights.to(d_out.dtype), d_out)
    d_scores = weights * (tl.dot(v, tl.trans(d_out), input_precision="ieee") - delta[None, :])
    dk = _add_product(dk, d_scores.to(q.dtype), q)
    return dk, dv


@triton.jit(do_not_specialize=["first_segment"])
def _attend_dkdv(
    q_ptr, k_ptr, v_ptr, d_out_ptr, log_sums_ptr, delta_ptr, dk_ptr, dv_ptr, dk_pieces_ptr, dv_pieces_ptr,
    pairs_ptr, chunks_ptr, chunk_count_ptr, first_ptr, q_rows, d_out_rows,
    q_strides, k_strides, v_strides, d_out_strides, scale, scale_log2,
    first_segment, runs, heads, kv_heads, tiles, blocks, places, most_chunks, most_pairs, seq_len_q, seq_len_kv,
    GROUP: tl.constexpr, QUERY_TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, IS_CAUSAL: tl.constexpr, SEVERAL: tl.constexpr, ADDS: tl.constexpr, USE_TMA: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = GROUP * QUERY_TILE
    PARTS: tl.constexpr = (BLOCK_SIZE + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0).to(tl.int64)
    segment = program // PARTS // most_chunks
    chunk = (program // PARTS % most_chunks).to(tl.int32)
    count = tl.load(chunk_count_ptr + segment)
    if chunk >= count:
        return
    chunk_at = chunks_ptr + (segment * most_chunks + chunk) * 3
    block, first, end = tl.load(chunk_at), tl.load(chunk_at + 1), tl.load(chunk_at + 2)
    block_first = tl.load(first_ptr + segment * blocks + block)
    next_block = tl.load(chunk_at + 3, mask=chunk + 1 < count, other=-1)
    alone = (first == block_first) & (next_block != block)
    batch = (first_segment + segment) // runs // kv_heads
    kv_head = (first_segment + segment) // runs % kv_heads
    first_head = kv_head * (heads // kv_heads)

    offs_d, offs_dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    # of shape [BLOCK_N]
    in_block = (program % PARTS).to(tl.int32) * BLOCK_N + tl.arange(0, BLOCK_N)
    key = block * BLOCK_SIZE + in_block
    real = (in_block < BLOCK_SIZE) & (key < seq_len_kv)
    k_at = k_ptr + batch * k_strides[0] + kv_head * k_strides[1] + key.to(tl.int64) * k_strides[2]
    k = load_tile(k_at, real, offs_d, HEAD_DIM)
    v_at = v_ptr + batch * v_strides[0] + kv_head * v_strides[1] + key.to(tl.int64) * v_strides[2]
    v = load_tile(v_at, real, offs_dv, HEAD_DIM_V)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    q_ptr += batch * q_strides[0]
    d_out_ptr += batch * d_out_strides[0]
    log_sums_ptr += batch * heads * seq_len_q
    delta_ptr += batch * heads * seq_len_q
    pairs_ptr += segment * places

    rows = (end - first) * ROWS
    masked = 0
    if IS_CAUSAL:
        masked = _rows_to_mask(
            pairs_ptr, first, end, block, tiles, seq_len_q, seq_len_kv, QUERY_TILE, BLOCK_SIZE, SEVERAL
        )  # fmt: skip
        masked = tl.cdiv(masked * ROWS, BLOCK_M) * BLOCK_M
        for start in range(0, masked, BLOCK_M):
            q, d_out, log_sum, delta, query = _rows_at(
                start, rows, pairs_ptr + first, q_ptr, d_out_ptr, log_sums_ptr, delta_ptr, q_rows, d_out_rows,
                q_strides, d_out_strides, batch, first_head, tiles, seq_len_q, GROUP, QUERY_TILE, HEAD_DIM, HEAD_DIM_V,
                BLOCK_M, BLOCK_D, BLOCK_DV, SEVERAL, USE_TMA,
            )  # fmt: skip
            position = query + seq_len_kv - seq_len_q
            dk, dv = _add_rows(k, v, q, d_out, log_sum, delta, position, key, dk, dv, scale_log2, True)
    for start in range(masked, rows, BLOCK_M):
        q, d_out, log_sum, delta, query = _rows_at(
            start, rows, pairs_ptr + first, q_ptr, d_out_ptr, log_sums_ptr, delta_ptr, q_rows, d_out_rows,
            q_strides, d_out_strides, batch, first_head, tiles, seq_len_q, GROUP, QUERY_TILE, HEAD_DIM, HEAD_DIM_V,
            BLOCK_M, BLOCK_D, BLOCK_DV, SEVERAL, USE_TMA,
        )  # fmt: skip
        dk, dv = _add_rows(k, v, q, d_out, log_sum, delta, query, key, dk, dv, scale_log2, False)

    dk *= scale
    mask_d = real[:, None] & (offs_d < HEAD_DIM)[None, :]
    mask_dv = real[:, None] & (offs_dv < HEAD_DIM_V)[None, :]
    if alone:
        row = (segment // runs * seq_len_kv + key)[:, None]
        put(dk_ptr + row * HEAD_DIM + offs_d[None, :], dk, mask_d, ADDS)
        put(dv_ptr + row * HEAD_DIM_V + offs_dv[None, :], dv, mask_dv, ADDS)
    else:
        slot = 2 * (first // most_pairs) + (first != block_first).to(tl.int32)
        row = ((segment * 2 * tl.cdiv(places, most_pairs) + slot) * BLOCK_SIZE + in_block)[:, None]
        put(dk_pieces_ptr + row * HEAD_DIM + offs_d[None, :], dk, mask_d, False)
        put(dv_pieces_ptr + row * HEAD_DIM_V + offs_dv[None, :], dv, mask_dv, False)


def dkdv_tile(
    rows: int, query_tile: int, block_size: int, head_dim: int, head_dim_v: int, itemsize: int, *, tma: bool = False
) -> AttendTile:
    """Rows a step, keys a program and launch shape for lists shared by `rows` rows; `tma`: rows come by the copy engine.

    H200, bf16, D 128, blocks of 64, tiles of 128, 256k, 16 heads, ms by rows/warps/stages: 64/4/2 42.7, 64/4/1 47.4, 32/4/3
    49.0, 32/4/2 49.3, 64/4/3 81.6 (shared memory for one program), 64/8/2 84.4, 128/8/2 83.7. 64/4/2 without the copy
    engine 51.3. Token level at 64k, 32 heads in groups of 4: 32/4/3 11.0, 64/4/2 11.2, 64/8/2 18.4.
    """
    block, widest = max(16, triton.next_power_of_2(block_size)), max(head_dim, head_dim_v)
    if itemsize == 4:
        # fp32 products run on the vector units; more keys or rows spill.
        return AttendTile(16, min(block, 32 if widest <= 128 else 16), 8, 1)
    if widest > 128:
        tile = AttendTile(32, min(block, 64), 8, 1)
    elif block == 128:
        tile = AttendTile(64, 128, 8, 2)
    else:
        tile = AttendTile(64, block, 4, 2)
    return AttendTile(
        tile.BLOCK_M, tile.BLOCK_N, tile.num_warps, tile.num_stages, tma and copies_rows(rows, query_tile, tile)
    )


def copies_rows(rows: int, query_tile: int, tile: AttendTile) -> bool:
    """Whether every step's rows are one box of q: some queries of some heads."""
    whole = query_tile % tile.BLOCK_M == 0 or tile.BLOCK_M % query_tile == 0
    return rows % tile.BLOCK_M == 0 and whole


def run_dkdv(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor], stats: RowStats, by_block: Transposed, first_segment: int, runs: int,
    pieces: Pieces, results: tuple[Tensor, Tensor], selection: BlockSelection, scale: float, tile: AttendTile,
) -> None:  # fmt: skip
    """Write dk and dv of the blocks with one chunk, and pieces of the others, of the segments in `by_block`, which start at
    `first_segment`; with several runs a head, add to dk and dv.

    inputs: q, k, v, d_out; results: dk [heads, N, D] and dv [heads, N, Dv] of the segments' key/value heads, contiguous.
    """
    (q, k, v, d_out), (heads, kv_heads) = inputs, (inputs[0].shape[1], inputs[1].shape[1])
    (segments, places), most_chunks, blocks = by_block.pairs.shape, by_block.chunks.shape[1], by_block.first.shape[1]
    sets, tiles = selection.indices.shape[1:3]
    block_d, block_dv = (max(16, triton.next_power_of_2(x.shape[3])) for x in (q, v))
    box = [1, max(1, tile.BLOCK_M // selection.query_tile), min(tile.BLOCK_M, selection.query_tile)]
    rows = [
        TensorDescriptor.from_tensor(x, [*box, block]) if tile.tma else None
        for x, block in ((q, block_d), (d_out, block_dv))
    ]
    lists = (by_block.chunks, by_block.chunk_counts, by_block.first)
    grid = (segments * most_chunks * triton.cdiv(selection.block_size, tile.BLOCK_N),)
    _attend_dkdv[grid](
        q, k, v, d_out, *stats, *results, pieces.dk, pieces.dv, by_block.pairs, *lists, *rows,
        *(x.stride()[:3] for x in inputs), scale, scale * LOG2_E, first_segment, runs, heads, kv_heads, tiles, blocks,
        places, most_chunks, pieces.most_pairs, q.shape[2], k.shape[2],
        GROUP=heads // sets, QUERY_TILE=selection.query_tile, BLOCK_SIZE=selection.block_size, HEAD_DIM=q.shape[3],
        HEAD_DIM_V=v.shape[3], BLOCK_M=tile.BLOCK_M, BLOCK_N=tile.BLOCK_N, BLOCK_D=block_d, BLOCK_DV=block_dv,
        IS_CAUSAL=selection.causal, SEVERAL=sets > kv_heads, ADDS=runs > 1, USE_TMA=tile.tma,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
