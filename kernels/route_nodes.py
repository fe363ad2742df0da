"""Rows that score, and their logits of nodes, inside kernels: s·(q⁺·u + q⁻·w). `kernels.scores` is the twin.

Products run in the nodes' dtype. An fp32 query (a sum or a mean) enters as terms of that dtype that add up to it (24 bits
of bf16), or the nodes are widened.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pyramidbench.kernels.route_tile import score_row
from pyramidbench.kernels.top_k import log_sum_exp


@triton.jit
def load_nodes(at, mask, HEAD_DIM, HAS_BOUNDS: tl.constexpr):
    """u and w of nodes, [n, BLOCK_D] each; the mean twice without bounds."""
    u = tl.load(at, mask=mask, other=0.0)
    if HAS_BOUNDS:
        return u, tl.load(at + HEAD_DIM, mask=mask, other=0.0)
    return u, u


@triton.jit
def log_keys(node, span, seq_len_kv, BLOCK_SIZE: tl.constexpr):
    """Logarithm of the keys under each node of a level whose nodes hold `span` blocks; the last one is clipped."""
    keys = tl.minimum(seq_len_kv - node.to(tl.int64) * span * BLOCK_SIZE, span.to(tl.int64) * BLOCK_SIZE)
    return tl.log(tl.maximum(keys, 1).to(tl.float32))


@triton.jit
def summary_logits(high, low, u, w, HAS_BOUNDS: tl.constexpr):
    """q⁺·u + q⁻·w of rows [rows, BLOCK_D] and nodes [n, BLOCK_D]: fp32 [rows, n]. Without bounds q·u."""
    logits = tl.dot(high, tl.trans(u), input_precision="ieee")
    if HAS_BOUNDS:
        logits = tl.dot(low, tl.trans(w), logits, input_precision="ieee")
    return logits


@triton.jit
def terms(x, DTYPE: tl.constexpr):
    """Three tensors of DTYPE that add up to the fp32 tensor x."""
    first = x.to(DTYPE)
    rest = x - first.to(tl.float32)
    second = rest.to(DTYPE)
    return first, second, (rest - second.to(tl.float32)).to(DTYPE)


@triton.jit
def query_rows(
    q_base, first_head, first_tile, tiles, q_strides, seq_len_q, QUERY_TILE, HEAD_DIM, offs_d,
    GROUP: tl.constexpr, BAND: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, SCORE_ROWS: tl.constexpr,
    IS_POOLED: tl.constexpr, HAS_BOUNDS: tl.constexpr,
):  # fmt: skip
    """Rows of HEADS heads and BAND tiles, q⁺ and q⁻ [BAND·HEADS·ROWS, BLOCK_D] (q twice without bounds), and which are real."""
    index = tl.arange(0, BAND * HEADS * ROWS)
    tile = first_tile + index // (HEADS * ROWS)
    head = first_head + index // ROWS % HEADS
    query, real = score_row(index % ROWS, tl.minimum(tile, tiles - 1), QUERY_TILE, seq_len_q, SCORE_ROWS)
    if IS_POOLED:
        query = tl.minimum(tile, tiles - 1)
        real = index % ROWS == 0
    real = real & (head < GROUP) & (tile < tiles)
    at = q_base + head.to(tl.int64) * q_strides[1] + query.to(tl.int64) * q_strides[2]
    q = tl.load(at[:, None] + offs_d[None, :], mask=real[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)
    if HAS_BOUNDS:
        return tl.where(q > 0, q, 0.0).to(q.dtype), tl.where(q < 0, q, 0.0).to(q.dtype), real
    return q, q, real


@triton.jit
def join_rows(logits, real, heads, BAND: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """Σ over the first `heads` heads of logsumexp over real rows: [BAND, n] from logits [BAND·HEADS·ROWS, n]."""
    logits = tl.where(real[:, None], logits, float("-inf"))
    by_head = log_sum_exp(tl.reshape(logits, [BAND, HEADS, ROWS, logits.shape[1]]), 2)
    return tl.sum(tl.where((tl.arange(0, HEADS) < heads)[None, :, None], by_head, 0.0), 1)


@triton.jit
def summed_query(q_base, row, q_strides, scale, offs_d, HEAD_DIM, GROUP: tl.constexpr, HAS_BOUNDS: tl.constexpr):
    """Σ over heads of the positive and the negative part of one query row, times scale: two [BLOCK_D], fp32."""
    high = tl.zeros([offs_d.shape[0]], tl.float32)
    low = tl.zeros([offs_d.shape[0]], tl.float32)
    at = q_base + row.to(tl.int64) * q_strides[2] + offs_d
    for _ in range(GROUP):
        q = tl.load(at, mask=offs_d < HEAD_DIM, other=0.0).to(tl.float32) * scale
        at += q_strides[1]
        if HAS_BOUNDS:
            high += tl.maximum(q, 0.0)
            low += tl.minimum(q, 0.0)
        else:
            high += q
    return high, low


@triton.jit
def split_terms(vector, ROWS: tl.constexpr, DTYPE: tl.constexpr):
    """An fp32 vector [BLOCK_D] as rows [ROWS, BLOCK_D] of DTYPE that add up to it."""
    row = tl.arange(0, ROWS)[:, None]
    first, second, third = terms(vector, DTYPE)
    zero = tl.zeros_like(first)[None, :]
    return tl.where(
        row == 0, first[None, :], tl.where(row == 1, second[None, :], tl.where(row == 2, third[None, :], zero))
    )


@triton.jit
def _children_logits(
    high, low, scale, level_ptr, offset, node, real, span, blocks, seq_len_kv, offs_d,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BRANCHING: tl.constexpr, HAS_BOUNDS: tl.constexpr,
):  # fmt: skip
    """logsumexp over each node's children of their scaled logits + log c: [rows, n]; `offset`: that of the nodes' level."""
    span = span // BRANCHING
    size = tl.cdiv(blocks, span)
    total = tl.full([high.shape[0], node.shape[0]], float("-inf"), tl.float32)
    for index in range(BRANCHING):
        child = node * BRANCHING + index
        held = real & (child < size)
        at = level_ptr + (offset - size + child).to(tl.int64)[:, None] * (HEAD_DIM * (1 + HAS_BOUNDS)) + offs_d[None, :]
        u, w = load_nodes(at, held[:, None] & (offs_d < HEAD_DIM)[None, :], HEAD_DIM, HAS_BOUNDS)
        logits = summary_logits(high, low, u.to(high.dtype), w.to(high.dtype), HAS_BOUNDS) * scale
        logits += log_keys(child, span, seq_len_kv, BLOCK_SIZE)[None, :]
        logits = tl.where(held[None, :], logits, float("-inf"))
        top = tl.maximum(total, logits)
        top = tl.where(top == float("-inf"), 0.0, top)
        mass = tl.exp(total - top) + tl.exp(logits - top)
        total = tl.where(mass > 0, top + tl.log(tl.where(mass > 0, mass, 1.0)), float("-inf"))
    return total


@triton.jit
def rows_score(
    high, low, row_real, heads, u, w, weight, scale, level_ptr, offset, node, real, span, blocks, seq_len_kv, offs_d,
    is_inner, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BRANCHING: tl.constexpr, HEADS: tl.constexpr,
    ROWS: tl.constexpr, HAS_BOUNDS: tl.constexpr, CHILDREN: tl.constexpr,
):  # fmt: skip
    """Scores [n] of nodes by the rows of some heads: by their summaries, or by those of their children above the blocks."""
    logits = summary_logits(high, low, u.to(high.dtype), w.to(high.dtype), HAS_BOUNDS) * scale + weight[None, :]
    if CHILDREN:  # noqa: SIM102 - the first condition is compiled away
        if is_inner:
            logits = _children_logits(
                high, low, scale, level_ptr, offset, node, real, span, blocks, seq_len_kv, offs_d, BLOCK_SIZE, HEAD_DIM,
                BRANCHING, HAS_BOUNDS,
            )  # fmt: skip
    return tl.sum(join_rows(logits, row_real, heads, 1, HEADS, ROWS), 0)
