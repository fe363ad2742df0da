"""Appending tokens to a cache: the torch twin of `kernels.decode_append`.

Only nodes whose tokens are all there are ever ranked, so a node is summed up when it completes, and the open ones at the end
when somebody wants to read them (`finish`). The blocks that the new tokens complete are summed from their keys, and above
them, level by level, the nodes that end with these blocks from their children's statistics: at most O(n/C + log N) nodes for n
tokens, and none for most single tokens. Sums and means run as in `kernels.pyramid.build_pyramid`, so that a cache holds what
a build over all its keys would hold, bit for bit. Cutting tokens off leaves complete nodes complete or drops them. Likewise the
mean of a block's part, for rules that read it, is made when the part completes; a query that sees an open one pools it itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pyramidbench.kernels.cache import CacheStore
from pyramidbench.kernels.pyramid import leaf_statistics, pad_rows, sub_block_means, summary, weighted_mean


def append_reference(store: CacheStore, k: Tensor, v: Tensor, starts: Sequence[int], counts: Sequence[int]) -> None:
    """Write the first counts[b] tokens of k [B, G, T, D] and v [B, G, T, Dv] from token starts[b] on; sequences end there.

    There must be room, and pages. Tokens that stood from starts[b] on are gone.
    """
    for sequence, (start, count) in enumerate(zip(starts, counts, strict=True)):
        store.write(store.k, sequence, start, k[sequence, :, :count])
        store.write(store.v, sequence, start, v[sequence, :, :count])
        complete(store, sequence, start, start + count)
        if store.sizes.parts:
            complete_parts(store, sequence, start, start + count)
    ends = [start + count for start, count in zip(starts, counts, strict=True)]
    store.lengths.copy_(torch.tensor(ends, dtype=torch.int32)[:, None].expand_as(store.lengths))


def complete(store: CacheStore, sequence: int, start: int, end: int) -> None:
    """Make the nodes that tokens [start, end) of a sequence complete what a build makes them."""
    span = store.sizes.block_size
    for level in range(store.sizes.levels):
        first, past = start // span, end // span
        if first == past:
            return
        _store(store, sequence, level, first, _statistics(store, sequence, level, first, past, end))
        span *= store.sizes.branching


def complete_parts(store: CacheStore, sequence: int, start: int, end: int) -> None:
    """Make the means of the parts of blocks that tokens [start, end) of a sequence complete."""
    assert store.parts is not None
    parts, size = store.sizes.parts, store.sizes.block_size
    first, past = store.sizes.full_parts(start), store.sizes.full_parts(end)
    if first == past:
        return
    block = first // parts
    k = store.rows_of(store.k, sequence, block * size, min(-(-past // parts) * size, end))
    means, _ = sub_block_means(k, block_size=size, parts=parts)
    held = store.parts[sequence].flatten(1, 2)
    held[:, first:past] = means.flatten(1, 2)[:, first - block * parts : past - block * parts]


def finish(store: CacheStore, sequence: int, end: int) -> None:
    """Make the open node of each level of a sequence of `end` tokens what a build makes it."""
    span = store.sizes.block_size
    for level in range(store.sizes.levels):
        if end % span:
            node = end // span
            _store(store, sequence, level, node, _statistics(store, sequence, level, node, node + 1, end))
        span *= store.sizes.branching


Statistics = tuple[Tensor, Tensor | None, Tensor | None]


def _statistics(store: CacheStore, sequence: int, level: int, first: int, past: int, end: int) -> Statistics:
    """Mean, maximum and minimum of nodes [first, past) of a level, [1, G, n, D] each, in a sequence of `end` tokens.

    Of blocks from their keys, above from their children's, which must be there.
    """
    sizes, g = store.sizes, store.sizes.branching
    if level == 0:
        size = sizes.block_size
        k = store.rows_of(store.k, sequence, first * size, min(past * size, end))[None]
        return leaf_statistics(k, size, -k.shape[-2] % size, store.stats.dtype, with_bounds=sizes.has_bounds)
    children = min(past * g, sizes.nodes_at(level - 1, end))
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
