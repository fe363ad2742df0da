"""Appending tokens to a cache: the torch twin of `kernels.decode_append`.

The blocks that the new tokens touch are summed anew from their keys, and above them, level by level, the nodes that cover
these blocks from their children's statistics: O(n/C + log N) nodes for n tokens. Sums and means run as in
`kernels.pyramid.build_pyramid`, so that a cache holds what a build over all its keys would hold, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pyramidbench.kernels.cache import CacheStore
from pyramidbench.kernels.pyramid import leaf_statistics, pad_rows, summary, weighted_mean


def append_reference(store: CacheStore, k: Tensor, v: Tensor, starts: Sequence[int], counts: Sequence[int]) -> None:
    """Write the first counts[b] tokens of k [B, G, T, D] and v [B, G, T, Dv] from token starts[b] on; sequences end there.

    There must be room, and pages. Tokens that stood from starts[b] on are gone.
    """
    for sequence, (start, count) in enumerate(zip(starts, counts, strict=True)):
        store.write(store.k, sequence, start, k[sequence, :, :count])
        store.write(store.v, sequence, start, v[sequence, :, :count])
        refresh(store, sequence, start, start + count)
    ends = [start + count for start, count in zip(starts, counts, strict=True)]
    store.lengths.copy_(torch.tensor(ends, dtype=torch.int32)[:, None].expand_as(store.lengths))


def refresh(store: CacheStore, sequence: int, start: int, end: int) -> None:
    """Make the nodes over tokens [start, end) of a sequence that ends at `end` what a build makes them.

    Where start is `end`, tokens behind it were cut off: then the last block that is left and its ancestors.
    """
    if end == 0:
        return
    sizes, size = store.sizes, store.sizes.block_size
    first, last = min(start, end - 1) // size, (end - 1) // size
    k = store.rows_of(store.k, sequence, first * size, end)[None]
    tail = -end % size
    mean, high, low = leaf_statistics(k, size, tail, store.stats.dtype, with_bounds=sizes.has_bounds)
    _store(store, sequence, 0, first, (mean, high, low))
    for level in range(1, sizes.levels):
        first, last = first // sizes.branching, last // sizes.branching
        _store(store, sequence, level, first, _composed(store, sequence, level, first, last, end))


Statistics = tuple[Tensor, Tensor | None, Tensor | None]


def _composed(store: CacheStore, sequence: int, level: int, first: int, last: int, end: int) -> Statistics:
    """Mean, maximum and minimum of nodes [first, last] of a level from those of their children: [1, G, n, D] each."""
    sizes, g = store.sizes, store.sizes.branching
    children = min((last + 1) * g, sizes.nodes_at(level - 1, end))
    begin = sizes.offsets[level - 1]
    stats = store.stats[sequence, :, begin + first * g : begin + children][None]
    span = sizes.block_size * g ** (level - 1)
    keys = torch.full((children - first * g,), span, dtype=stats.dtype, device=stats.device)
    if children * span > end:
        keys[-1] -= children * span - end
    pad = -len(keys) % g
    mean, _ = weighted_mean(stats[..., 0, :], keys, g, pad)
    if not sizes.has_bounds:
        return mean, None, None
    high = pad_rows(stats[..., 1, :], pad, -math.inf).unflatten(-2, (-1, g)).amax(-2)
    return mean, high, pad_rows(stats[..., 2, :], pad, math.inf).unflatten(-2, (-1, g)).amin(-2)


def _store(store: CacheStore, sequence: int, level: int, first: int, statistics: Statistics) -> None:
    """Write statistics and summaries of a level's nodes from `first` on."""
    mean, high, low = statistics
    place = slice(store.sizes.offsets[level] + first, store.sizes.offsets[level] + first + mean.shape[-2])
    rows = [row[0] for row in statistics if row is not None]
    store.stats[sequence, :, place] = torch.stack(rows, dim=-2)
    store.nodes[sequence, :, place] = summary(mean, high, low, store.sizes.bound_weight)[0].to(store.nodes.dtype)
