"""Vertical and slash lines: how much attention a few probing queries give to each key, and to each distance. Torch twins.

A vertical line is a key that all queries look at; a slash is a distance that every query looks back by. Both are read
from the exact attention of the rows of a probe. Cost: 2·D·H·rows·start operations per probe.
Source: MInference (arXiv 2407.02490, section 3.2, the vertical-slash head); FlexPrefill (arXiv 2502.20766, section 3.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, pad

from pyramidbench.kernels.products import logits, operand
from pyramidbench.tiling import Tiling


@dataclass(frozen=True)
class Lines:
    """What P probes saw, per head and summed over their rows: fp32 [g, P, n] each, for the first n keys and distances.

    vertical: attention to each key. slash: attention at each distance. Both are 0 from a probe's own end on.
    """

    vertical: Tensor
    slash: Tensor


def probe_lines(q: Tensor, k: Tensor, starts: Sequence[int], rows: int, scale: float) -> Lines:
    """Lines of the `rows` queries before each of `starts`, none of which is below `rows`; they see the keys before it.

    q: [g, N, D], the heads that read the keys k [N, D].
    """
    start = torch.tensor(starts, device=q.device)
    row = start[:, None] - rows + torch.arange(rows, device=q.device)
    key = torch.arange(max(starts), device=q.device)
    queries = q[:, row]
    # of shape [g, P, rows, n]
    seen = logits(operand(queries.flatten(0, 2)), operand(k[: len(key)]), scale).unflatten(0, queries.shape[:3])
    weights = seen.masked_fill_(key > row[..., None], -torch.inf).softmax(-1)
    # Sums along diagonals count distances from the last key on; a probe's own are counted from its end.
    shift = key + len(key) - start[:, None]
    slash = _sum_diagonals(weights).gather(-1, shift.clamp(max=len(key) - 1).expand(q.shape[0], -1, -1))
    return Lines(weights.sum(2), slash.masked_fill_(shift >= len(key), 0))


def _sum_diagonals(weights: Tensor) -> Tensor:
    """Sums over equal distances: [g, P, n]; weights: [g, P, rows, n], each row one key further on than the row before it.

    Seen from the end, the last row has distance o at place o, and each row before it one place further on.
    """
    rows, keys = weights.shape[2:]
    turned = pad(weights.flip(2, 3), (0, rows)).flatten(2)
    return pad(turned, (0, rows)).unflatten(2, (rows, keys + rows + 1))[..., :keys].sum(2)


def probe_starts(seq_len: int, rows: int, every: int) -> list[int]:
    """Where a new probe comes into force: after `rows` queries, doubling from there up to `every`, then each `every`."""
    starts = []
    at = rows
    while at < seq_len:
        starts.append(at)
        at = min(2 * at, (at // every + 1) * every)
    return starts


def over_blocks(values: Tensor, tiling: Tiling) -> Tensor:
    """Sums of a value per key (or distance) over each block of keys (or of distances): [..., blocks]; values: [..., n]."""
    tail = tiling.blocks * tiling.block_size - values.shape[-1]
    return pad(values, (0, tail)).unflatten(-1, (tiling.blocks, tiling.block_size)).sum(-1)


def over_windows(slash: Tensor, tiling: Tiling) -> Tensor:
    """Sums of a value per distance [..., n] over windows of all distances between a tile and a block: [..., windows].

    A tile and block of their own are at `window_of`.
    """
    width, stride = tiling.query_tile + tiling.block_size - 1, gcd(tiling.query_tile, tiling.block_size)
    phase, windows = (tiling.offset + 1) % stride, -(-tiling.seq_len_kv // stride) + 1
    # The last window begins behind all distances.
    padded = pad(slash, (0, windows * stride + phase + width - slash.shape[-1]))
    return width * avg_pool1d(padded.flatten(0, -2)[..., phase:], width, stride).unflatten(0, slash.shape[:-1])


def window_of(tile: Tensor, tiling: Tiling) -> Tensor:
    """The window of the distances between tiles and blocks: int64 [T, blocks]. Right for blocks that end before a tile's first
    query.

    The nearest distances of all tiles and blocks lie whole strides apart: no other window is asked for.
    """
    stride = gcd(tiling.query_tile, tiling.block_size)
    phase, windows = (tiling.offset + 1) % stride, -(-tiling.seq_len_kv // stride) + 1
    block = torch.arange(tiling.blocks, device=tile.device)
    nearest = tiling.first_position(tile)[:, None] - (block + 1) * tiling.block_size + 1
    return ((nearest - phase) // stride).clamp(min=0, max=windows)
