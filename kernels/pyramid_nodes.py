"""Where the nodes of a pyramid lie, and how the kernels that build one write them: summaries, statistics, keys under a node."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def store_summaries(nodes_ptr, node, held, mean, high, low, weight, offs_d, HEAD_DIM, HAS_BOUNDS: tl.constexpr):
    """u and w (or the mean alone) of nodes [n] from their statistics [n, BLOCK_D]."""
    width = HEAD_DIM * 2 if HAS_BOUNDS else HEAD_DIM
    at = nodes_ptr + node.to(tl.int64)[:, None] * width + offs_d[None, :]
    mask = held[:, None] & (offs_d < HEAD_DIM)[None, :]
    if HAS_BOUNDS:
        tl.store(at, (mean + weight * (high - mean)).to(nodes_ptr.dtype.element_ty), mask=mask)
        tl.store(at + HEAD_DIM, (mean + weight * (low - mean)).to(nodes_ptr.dtype.element_ty), mask=mask)
    else:
        tl.store(at, mean.to(nodes_ptr.dtype.element_ty), mask=mask)


@triton.jit
def keys_under(node, keys_per_node, seq_len):
    """Keys under each node as fp32; the last node of a level is clipped at the end."""
    start = node.to(tl.int64) * keys_per_node
    return tl.minimum(tl.maximum(seq_len - start, 1), keys_per_node).to(tl.float32)


@triton.jit
def store_statistics(stats_ptr, node, held, total, high, low, offs_d, HEAD_DIM, HAS_BOUNDS: tl.constexpr):
    """Sum, maximum and minimum of nodes [n], fp32, at stats_ptr [nodes, 3 or 1, HEAD_DIM]."""
    rows = 3 if HAS_BOUNDS else 1
    at = stats_ptr + node.to(tl.int64)[:, None] * (rows * HEAD_DIM) + offs_d[None, :]
    mask = held[:, None] & (offs_d < HEAD_DIM)[None, :]
    tl.store(at, total, mask=mask)
    if HAS_BOUNDS:
        tl.store(at + HEAD_DIM, high, mask=mask)
        tl.store(at + 2 * HEAD_DIM, low, mask=mask)


@lru_cache(maxsize=32)
def level_table(
    seq_len: int, block_size: int, branching: int, levels: int, device: torch.device
) -> tuple[tuple[int, ...], Tensor]:
    """Offsets of the levels in the node buffer, and the number of keys under each node (fp32, on the device)."""
    size = block_size
    offsets, counts = [0], []
    for _ in range(levels):
        nodes = -(-seq_len // size)
        held = torch.full((nodes,), float(size))
        held[-1] = seq_len - (nodes - 1) * size
        counts.append(held)
        offsets.append(offsets[-1] + nodes)
        size *= branching
    return tuple(offsets), torch.cat(counts).to(device)
