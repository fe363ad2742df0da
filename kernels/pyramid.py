"""The pyramid: summaries of contiguous runs of keys, level by level, in one buffer.

Level 0 has a node per block of C keys; a node of level l + 1 covers `branching` nodes of level l; the last node of a
level is clipped at the end of the keys. For each node: the exact mean m of its keys, and their elementwise maximum a and
minimum b. All three compose exactly from the children. What is stored is u = (1 - α)·m + α·a and w = (1 - α)·m + α·b
side by side (2·D numbers), so that q⁺·u + q⁻·w is one dot product with [q⁺, q⁻]; with α = 0, u = w = m and D numbers do.

Cost: N·D additions; k is read once and about n₁·branching/(branching - 1) summaries are written: bound by the read.
Source: "Block Sparse Attention with Log-Linear Complexity" (arXiv 2609.31093) for the hierarchy of means; the bound is
that of Quest (arXiv 2406.10774).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pyramid:
    """Node summaries of every level. `nodes`: [B, G, offsets[-1], D or 2·D] in k's dtype; `keys`: [offsets[-1]] counts.

    Level l lies at nodes[..., offsets[l]:offsets[l + 1], :]. `sub_means` refines level 0 by that many parts (or None).
    """

    nodes: Tensor
    keys: Tensor
    offsets: tuple[int, ...]
    block_size: int
    branching: int
    has_bounds: bool

    @property
    def levels(self) -> int:
        return len(self.offsets) - 1

    def size(self, level: int) -> int:
        """Number of nodes of a level."""
        return self.offsets[level + 1] - self.offsets[level]

    def span(self, level: int) -> int:
        """Blocks under a (full) node of a level."""
        span: int = self.branching**level
        return span

    def at(self, level: int) -> Tensor:
        """Summaries of one level, [B, G, nodes, D or 2·D]."""
        return self.nodes[..., self.offsets[level] : self.offsets[level + 1], :]

    def log_keys(self, level: int) -> Tensor:
        """Logarithm of the number of keys under each node of one level, [nodes]."""
        return self.keys[self.offsets[level] : self.offsets[level + 1]].log()


def level_count(blocks: int, branching: int) -> int:
    """Levels from the blocks up to a single root, both included."""
    levels = 1
    while blocks > 1:
        blocks = -(-blocks // branching)
        levels += 1
    return levels


def walked_levels(levels: int | str, blocks: int, branching: int, start_width: int) -> int:
    """Number of levels that a walk uses: as given (at most up to the root), "full", or "auto".

    "auto" starts at the finest level that has at most `start_width` nodes.
    """
    full = level_count(blocks, branching)
    if levels == "full":
        return full
    if levels == "auto":
        walked = 1
        while blocks > start_width:
            blocks = -(-blocks // branching)
            walked += 1
        return min(walked, full)
    return min(int(levels), full)


def build_pyramid(k: Tensor, *, block_size: int, branching: int, levels: int, bound_weight: float) -> Pyramid:
    """Summaries of `levels` levels over all keys.

    k: [B, G, N, D], any float dtype. Sums run in fp32 (fp64 for fp64 keys) and are rounded to k's dtype when stored.
    """
    wide = torch.promote_types(k.dtype, torch.float32)
    tail = -k.shape[-2] % block_size
    keys = torch.full((-(-k.shape[-2] // block_size),), block_size, dtype=wide, device=k.device)
    keys[-1] -= tail
    mean, high, low = leaf_statistics(k, block_size, tail, wide, with_bounds=bound_weight > 0)
    stored, counts = [summary(mean, high, low, bound_weight)], [keys]
    for _ in range(levels - 1):
        pad = -keys.shape[0] % branching
        mean, keys = weighted_mean(mean, keys, branching, pad)
        if high is not None and low is not None:
            high = pad_rows(high, pad, -math.inf).unflatten(-2, (-1, branching)).amax(-2)
            low = pad_rows(low, pad, math.inf).unflatten(-2, (-1, branching)).amin(-2)
        stored.append(summary(mean, high, low, bound_weight))
        counts.append(keys)
    offsets = [0]
    for part in counts:
        offsets.append(offsets[-1] + part.shape[0])
    nodes = torch.cat(stored, dim=-2).to(k.dtype)
    return Pyramid(nodes, torch.cat(counts), tuple(offsets), block_size, branching, bound_weight > 0)


def sub_block_means(k: Tensor, *, block_size: int, parts: int) -> tuple[Tensor, Tensor]:
    """Means of `parts` equal runs of each block: [B, G, blocks, parts, D] in k's dtype, and their key counts [blocks, parts].

    A run beyond the last key has count 0 and a mean of 0.
    """
    wide = torch.promote_types(k.dtype, torch.float32)
    size = -(-block_size // parts)
    blocks = -(-k.shape[-2] // block_size)
    key = torch.arange(size * parts, device=k.device).expand(blocks, -1)
    position = torch.arange(blocks, device=k.device)[:, None] * block_size + key
    inside = (key < block_size) & (position < k.shape[-2])
    rows = k[..., position.clamp(max=k.shape[-2] - 1), :].to(wide)
    rows = torch.where(inside[..., None], rows, 0).unflatten(-2, (parts, size))
    counts = inside.unflatten(-1, (parts, size)).sum(-1)
    return (rows.sum(-2) / counts.clamp(min=1)[..., None]).to(k.dtype), counts.to(wide)


def whole_parts(tokens: int, block_size: int, parts: int) -> int:
    """Parts of blocks whose tokens are all there, in a sequence of so many; at a block's end those that have none count too."""
    return tokens // block_size * parts + tokens % block_size // -(-block_size // parts)


def leaf_statistics(
    k: Tensor, block_size: int, tail: int, wide: torch.dtype, *, with_bounds: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Mean, maximum and minimum of each block; the ragged last block counts only its own keys."""
    full = k.shape[-2] // block_size
    blocks = k[..., : full * block_size, :].unflatten(-2, (full, block_size))
    parts = [blocks, k[..., full * block_size :, :].unsqueeze(-3)] if tail else [blocks]
    mean = torch.cat([part.sum(-2, dtype=wide) / part.shape[-2] for part in parts], dim=-2)
    if not with_bounds:
        return mean, None, None
    high = torch.cat([part.amax(-2) for part in parts if part.shape[-3]], dim=-2).to(wide)
    low = torch.cat([part.amin(-2) for part in parts if part.shape[-3]], dim=-2).to(wide)
    return mean, high, low


def weighted_mean(mean: Tensor, keys: Tensor, branching: int, pad: int) -> tuple[Tensor, Tensor]:
    """Means of `branching` children, weighted by their true key counts; padded children weigh nothing."""
    weight = torch.nn.functional.pad(keys, (0, pad)).unflatten(0, (-1, branching))
    total = weight.sum(-1)
    children = pad_rows(mean, pad, 0.0).unflatten(-2, (-1, branching))
    return (children * weight[..., None]).sum(-2) / total[:, None], total


def pad_rows(rows: Tensor, count: int, value: float) -> Tensor:
    """`count` more rows of one value behind rows [..., n, D]."""
    return torch.nn.functional.pad(rows, (0, 0, 0, count), value=value) if count else rows


def summary(mean: Tensor, high: Tensor | None, low: Tensor | None, bound_weight: float) -> Tensor:
    """u and w side by side, or the mean alone where there are no bounds."""
    if high is None or low is None:
        return mean
    return torch.cat([mean.lerp(high, bound_weight), mean.lerp(low, bound_weight)], dim=-1)
