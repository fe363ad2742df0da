"""Vertical and slash lines: how much attention a few probing queries give to each key, and to each distance. Torch twins.

A vertical line is a key that all queries look at; a slash is a distance that every query looks back by. Both are read
from the exact attention of the rows of a probe. Cost: 2·D·H·rows·start operations per probe.
Source: MInference (arXiv 2407.02490, section 3.2, the vertical-slash head); FlexPrefill (arXiv 2502.20766, section 3.2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor
from torch.nn.functional import pad

from pyramidbench.tiling import Tiling


@dataclass(frozen=True)
class Lines:
    """What a probe before query `start` saw, per head and summed over its rows: fp32 [B, H, start] each.

    vertical: attention to each key. slash: attention at each distance, 0 … start - 1.
    """

    start: int
    vertical: Tensor
    slash: Tensor


def probe_lines(q: Tensor, k: Tensor, start: int, rows: int, scale: float) -> Lines:
    """Lines of the `rows` queries before `start`, which see the keys before `start`. q: [B, H, N, D], k: [B, G, N, D]."""
    wide = torch.promote_types(q.dtype, torch.float32)
    rows = min(rows, start)
    group = q.shape[1] // k.shape[1]
    future = torch.ones(rows, start, dtype=torch.bool, device=q.device).triu(start - rows + 1)
    vertical, slash = [], []
    for heads, keys in zip(q[:, :, start - rows : start].flatten(0, 1).split(group), k[:, :, :start].flatten(0, 1)):
        weights = (heads.to(wide) * scale @ keys.to(wide).mT).masked_fill_(future, -torch.inf).softmax(-1)
        vertical.append(weights.sum(1))
        slash.append(_sum_diagonals(weights))
    return Lines(start, *(torch.cat(part).unflatten(0, q.shape[:2]) for part in (vertical, slash)))


def _sum_diagonals(weights: Tensor) -> Tensor:
    """Sums over equal distances: [g, start]; weights: [g, rows, start], row i at position start - rows + i.

    Seen from the end, the last row has distance o at place o, and each row before it one place further on.
    """
    group, rows, start = weights.shape
    width = start + rows
    turned = pad(weights.flip(1, 2), (0, rows)).flatten(1)
    return pad(turned, (0, rows)).view(group, rows, width + 1)[..., :start].sum(1)


def probe_starts(seq_len: int, rows: int, every: int) -> list[int]:
    """Where a new probe comes into force: after `rows` queries, doubling from there up to `every`, then each `every`."""
    starts = []
    at = rows
    while at < seq_len:
        starts.append(at)
        at = min(2 * at, (at // every + 1) * every)
    return starts


def over_blocks(vertical: Tensor, tiling: Tiling, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """A value per key joined over the keys of each block: [B, H, blocks]."""
    tail = tiling.blocks * tiling.block_size - vertical.shape[-1]
    return reduce(pad(vertical, (0, tail)).unflatten(-1, (tiling.blocks, tiling.block_size)))


def over_windows(slash: Tensor, tile: Tensor, tiling: Tiling, reduce: Callable[[Tensor, int, int], Tensor]) -> Tensor:
    """A value per distance joined over the distances between a tile and each block: [B, H, T, blocks].

    reduce: joins windows of a width that begin a stride apart, as max_pool1d does. Right for blocks that end before the tile's
    first query; distances that the probe does not know count 0.
    """
    width, start = tiling.query_tile + tiling.block_size - 1, slash.shape[-1]
    block = torch.arange(tiling.blocks, device=tile.device)
    nearest = tiling.first_position(tile)[:, None] - (block + 1) * tiling.block_size + 1
    # The nearest distances of all tiles and blocks lie whole strides apart: no other window is asked for.
    stride = gcd(tiling.query_tile, tiling.block_size)
    phase = (tiling.offset + 1) % stride
    windows = -(-start // stride) + 1  # the last one begins behind what is known
    joined = reduce(pad(slash, (0, windows * stride + width))[..., phase:], width, stride)
    return joined[..., ((nearest - phase) // stride).clamp(min=0, max=windows)]
