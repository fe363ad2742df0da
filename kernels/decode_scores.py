"""Scores of nodes for one new query, inside kernels: by their summaries, or by their children's. `kernels.decode` is the twin.

By summary, the heads' scores add up to one dot product of a node's [u, w] with [Σ q⁺, Σ q⁻], taken in fp32: no matrix product.
By children (preset `paper`) there is a logsumexp between the product and the sum over heads, so each head is a row of a
[16, D] × [D, n] product with one child of each of n nodes at a time, and the children are joined online. A ranked node is
complete, so its children are all there and hold equally many keys: + log c moves out of the logsumexp. A block has no
children and counts as its own only one.
Cost: 2·D elements read and 4·D operations a node; by children `branching` times both, and the operations of 16 rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pyramidbench.kernels.route_nodes import load_nodes, log_keys, summary_logits


@triton.jit
def scoring_query(
    q_base, strides, scale, offs_d, HEAD_DIM, GROUP: tl.constexpr, HEADS: tl.constexpr, HAS_BOUNDS: tl.constexpr,
    CHILDREN: tl.constexpr,
):  # fmt: skip
    """A query's q⁺ and q⁻ (q twice without bounds): summed over the group's heads and scaled, [BLOCK_D] each in fp32; by
    children a row a head, [HEADS, BLOCK_D] in q's dtype."""
    head = tl.arange(0, HEADS)
    mask = (head < GROUP)[:, None] & (offs_d < HEAD_DIM)[None, :]
    # of shape [HEADS, BLOCK_D]
    q = tl.load(q_base + head.to(tl.int64)[:, None] * strides[1] + offs_d[None, :], mask=mask, other=0.0)
    if not CHILDREN:
        q = q.to(tl.float32) * scale
    high, low = q, q
    if HAS_BOUNDS:
        high, low = tl.where(q > 0, q, 0.0).to(q.dtype), tl.where(q < 0, q, 0.0).to(q.dtype)
    if not CHILDREN:
        high, low = tl.sum(high, 0), tl.sum(low, 0)
    return high, low


@triton.jit
def node_scores(
    head_ptr, offset, node, span, real, blocks, length, high, low, scale, offs_d,
    GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BRANCHING: tl.constexpr, HAS_BOUNDS: tl.constexpr,
    CHILDREN: tl.constexpr,
):  # fmt: skip
    """Scores [n], heads added, of nodes that hold `span` blocks each, on levels that begin at `offset` of a head's buffer."""
    if CHILDREN:
        score = _by_children(
            head_ptr, offset, node, span, real, blocks, length, high, low, scale, offs_d, GROUP, BLOCK_SIZE, HEAD_DIM,
            BRANCHING, HAS_BOUNDS,
        )  # fmt: skip
    else:
        score = _by_summary(
            head_ptr, offset, node, span, real, length, high, low, offs_d, GROUP, BLOCK_SIZE, HEAD_DIM, HAS_BOUNDS
        )
    return score


@triton.jit
def _by_summary(
    head_ptr, offset, node, span, real, length, high, low, offs_d,
    GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, HAS_BOUNDS: tl.constexpr,
):  # fmt: skip
    """s·(Σ q⁺·u + Σ q⁻·w) + g·log c: [n]."""
    WIDTH: tl.constexpr = 2 * HEAD_DIM if HAS_BOUNDS else HEAD_DIM
    # of shape [n, BLOCK_D]
    at = head_ptr + (offset + node).to(tl.int64)[:, None] * WIDTH + offs_d[None, :]
    u, w = load_nodes(at, real[:, None] & (offs_d < HEAD_DIM)[None, :], HEAD_DIM, HAS_BOUNDS)
    logits = u.to(tl.float32) * high[None, :]
    if HAS_BOUNDS:
        logits += w.to(tl.float32) * low[None, :]
    return tl.sum(logits, 1) + GROUP * log_keys(node, span, length, BLOCK_SIZE)


@triton.jit
def _by_children(
    head_ptr, offset, node, span, real, blocks, length, high, low, scale, offs_d,
    GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BRANCHING: tl.constexpr, HAS_BOUNDS: tl.constexpr,
):  # fmt: skip
    """Σ over heads of logsumexp over a node's children of s·(q⁺·u + q⁻·w) + log c: [n]."""
    WIDTH: tl.constexpr = 2 * HEAD_DIM if HAS_BOUNDS else HEAD_DIM
    span = tl.zeros_like(node) + span
    is_inner = span > 1
    fan, below = tl.where(is_inner, BRANCHING, 1), tl.maximum(span // BRANCHING, 1)
    child = tl.where(is_inner, node * BRANCHING, node)
    first = tl.where(is_inner, offset - tl.cdiv(blocks, below), offset) + child
    # of shape [HEADS, n]
    top = tl.full([high.shape[0], node.shape[0]], float("-inf"), tl.float32)
    mass = tl.zeros([high.shape[0], node.shape[0]], tl.float32)
    for index in range(BRANCHING):
        held = real & (fan > index)
        at = head_ptr + (first + index).to(tl.int64)[:, None] * WIDTH + offs_d[None, :]
        u, w = load_nodes(at, held[:, None] & (offs_d < HEAD_DIM)[None, :], HEAD_DIM, HAS_BOUNDS)
        logits = summary_logits(high, low, u, w, HAS_BOUNDS) * scale
        logits = tl.where(held[None, :], logits, float("-inf"))
        new_top = tl.maximum(top, logits)
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        # A child of NaN leaves NaN, and its node counts as -inf.
        mass = mass * tl.exp(top - shift) + tl.exp(logits - shift)
        top = new_top
    by_head = tl.where(mass > 0, top + tl.log(tl.where(mass > 0, mass, 1.0)), float("-inf"))
    is_head = (tl.arange(0, high.shape[0]) < GROUP)[:, None]
    return tl.sum(tl.where(is_head, by_head, 0.0), 0) + GROUP * log_keys(child, below, length, BLOCK_SIZE)
