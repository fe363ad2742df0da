"""One decoding step on a cache: the blocks of each new query, and attention to them. The torch twin of `kernels.decode_step`.

The walk is that of `kernels.walk` at token level, for a few queries at the end of each of a batch of sequences with lengths of
their own. Every size here follows from the rules and the cache's capacity; what a length hides is masked, and lengths are read
where they lie, so that nothing waits for the host. Query i of M of a sequence of N tokens sits at p = i + N - M; each query
has a set of its own, which the heads of a group share.

What may be ranked on a level is one interval [lo, hi): behind the nodes that hold a sink, before those that hold a local
block. So a level's candidates are the children of node lo - 1, of the kept nodes and of node hi of the level above, as in
`kernels.route_walk`. Index tensors are [B, sets, M, …], int64.
Source: docs/selection.md for the walk; docs/decode.md for the cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pyramidbench.kernels.cache import CacheStore
from pyramidbench.kernels.walk_rules import WalkRules


@dataclass(frozen=True)
class NewQueries:
    """Where the new queries stand, all [B, 1, M]: position p; `end`, past the blocks that may be ranked; the forced blocks
    [0, sink_end) and [local_start, local_end)."""

    position: Tensor
    end: Tensor
    sink_end: Tensor
    local_start: Tensor
    local_end: Tensor

    @classmethod
    def of(cls, store: CacheStore, queries: int, rules: WalkRules) -> NewQueries:
        size = store.sizes.block_size
        position = store.lengths[:, :1, None].long() - queries + torch.arange(queries, device=store.lengths.device)
        local_end = torch.div(position, size, rounding_mode="floor") + 1
        first_local = (local_end - rules.local_blocks).clamp(min=0)
        sink_end = local_end.clamp(min=0, max=rules.sink_blocks)
        end = torch.minimum((position + 1).clamp(min=0) // size, first_local)
        return cls(position, end, sink_end, torch.maximum(first_local, sink_end), local_end.clamp(min=0))

    def forced_count(self) -> Tensor:
        return self.sink_end + (self.local_end - self.local_start).clamp(min=0)

    def forced(self, width: int) -> Tensor:
        """The forced blocks, ascending, padded with -1: [B, 1, M, width]."""
        step = torch.arange(width, device=self.position.device)
        block = torch.where(
            step < self.sink_end[..., None], step, self.local_start[..., None] + step - self.sink_end[..., None]
        )
        return block.masked_fill(step >= self.forced_count()[..., None], -1)


def choose_reference(q: Tensor, store: CacheStore, rules: WalkRules, scale: float) -> Tensor:
    """Blocks of every new query: int32 [B, sets, M, S], ascending, padded with -1; S is the widest list that may be.

    q: [B, H, M, D]. Sets are the key/value heads, or the query heads with head_reduce "none".
    """
    sets = q.shape[1] if rules.head_reduce == "none" else store.sizes.kv_heads
    queries = q.unflatten(1, (sets, -1)).transpose(2, 3).to(store.stats.dtype) * scale
    where = NewQueries.of(store, q.shape[2], rules)
    walk = _Walk(queries, where, store, rules)
    chosen = walk.best_blocks(walk.leaves())
    listed = torch.cat([chosen, where.forced(rules.sink_blocks + rules.local_blocks).expand(*chosen.shape[:3], -1)], -1)
    return ascending(listed).to(torch.int32)


def ascending(listed: Tensor) -> Tensor:
    """Each list in ascending order, its padding of -1 behind."""
    end = torch.iinfo(listed.dtype).max
    ordered = torch.where(listed < 0, end, listed).sort(-1).values
    return ordered.masked_fill(ordered == end, -1)


class _Walk:
    """The new queries on their way down. queries: [B, sets, M, g, D], scaled, in fp32 or fp64."""

    def __init__(self, queries: Tensor, where: NewQueries, store: CacheStore, rules: WalkRules) -> None:
        self.queries, self.where, self.store, self.rules = queries, where, store, rules
        self.summary_queries = queries
        if store.sizes.has_bounds:
            self.summary_queries = torch.cat([queries.clamp(min=0), queries.clamp(max=0)], dim=-1)
        self.shape = (*queries.shape[:3],)

    def leaves(self) -> Tensor:
        """Candidates among the blocks, before any is ranked: [B, sets, M, A], ascending, padded with -1."""
        rules, sizes = self.rules, self.store.sizes
        top = self.store.top_level(rules, self.store.lengths[:, :1, None])[..., None]
        listed = torch.full((*self.shape, 0), -1, device=self.queries.device)
        for level in range(sizes.levels - 1, -1, -1):
            lo, hi = self.interval(level)
            width = min(
                max(start_nodes(sizes.levels, sizes.blocks, rules, level), 1), sizes.nodes_at(level, sizes.max_len)
            )
            step = torch.arange(max(width, listed.shape[-1]), device=self.queries.device)
            below = torch.nn.functional.pad(listed, (0, len(step) - listed.shape[-1]), value=-1)
            listed = torch.where(top == level, lo + step, below)
            listed = listed.masked_fill((listed < lo) | (listed >= hi) | (top < level), -1)
            if level:
                listed = self.children(self.best(listed, rules.inner_width(), self.node_scores(listed, level)), lo, hi)
        return listed

    def interval(self, level: int) -> tuple[Tensor, Tensor]:
        """[lo, hi) of a level, [B, 1, M, 1] each."""
        span = self.rules.branching**level
        return (self.where.sink_end[..., None] + span - 1) // span, self.where.end[..., None] // span

    def children(self, kept: Tensor, lo: Tensor, hi: Tensor) -> Tensor:
        """Children of node lo - 1, of the kept nodes and of node hi: those that may be ranked are among them."""
        edge = (*self.shape, 1)
        opened = torch.cat([(lo - 1).expand(edge), kept, torch.where(hi >= lo, hi, -1).expand(edge)], dim=-1)
        below = opened[..., None] * self.rules.branching + torch.arange(self.rules.branching, device=kept.device)
        return below.masked_fill(opened[..., None] < 0, -1).flatten(-2)

    def best_blocks(self, leaves: Tensor) -> Tensor:
        """The K best of the candidates, padded with -1: [B, sets, M, K]."""
        rules = self.rules
        keep = torch.full_like(self.where.end, rules.top_k)
        if rules.forced_in_budget:
            keep = (keep - self.where.forced_count()).clamp(min=0)
        if rules.leaf_score == "summary":
            return self.best(leaves, rules.top_k, self.node_scores(leaves, 0), keep)
        if rules.leaf_candidates is not None:
            leaves = self.best(leaves, rules.leaf_candidates * rules.top_k, self.node_scores(leaves, 0))
        return self.best(leaves, rules.top_k, self.leaf_scores(leaves), keep)

    def best(self, listed: Tensor, width: int, scores: Tensor, keep: Tensor | None = None) -> Tensor:
        """The `keep` (at most `width`, the default) best of nodes that are listed in ascending order, ties to the lower one.

        Returned in ascending order, padded with -1.
        """
        lowest = torch.finfo(scores.dtype).min
        scores = torch.where(scores.isnan(), lowest, scores.clamp(min=lowest)).masked_fill(listed < 0, -math.inf)
        best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :width]
        chosen = listed.gather(-1, best)
        if keep is not None:
            chosen = chosen.masked_fill(torch.arange(best.shape[-1], device=best.device) >= keep[..., None], -1)
        return ascending(chosen)

    def node_scores(self, nodes: Tensor, level: int) -> Tensor:
        """Scores by summary, or above the blocks by those of the children where the rules say so: [B, sets, M, A]."""
        if level == 0 or self.rules.node_score == "summary":
            return self.logits(nodes, level).sum(-2)
        g = self.rules.branching
        below = (nodes[..., None] * g + torch.arange(g, device=nodes.device)).flatten(-2)
        size = self.store.sizes.block_size * g ** (level - 1)
        outside = below * size >= self.store.lengths[:, :1, None, None]
        logits = self.logits(below.masked_fill(outside, -1), level - 1).masked_fill(outside[..., None, :], -math.inf)
        return logits.unflatten(-1, (-1, g)).logsumexp(-1).sum(-2)

    def logits(self, nodes: Tensor, level: int) -> Tensor:
        """s·(q⁺·u + q⁻·w) + log c of each head: [B, sets, M, g, A]."""
        span = self.store.sizes.block_size * self.rules.branching**level
        keys = (self.store.lengths[:, :1, None, None] - nodes * span).clamp(min=1, max=span)
        summaries = self.store.nodes_of(level, nodes).to(self.queries.dtype)
        return self.summary_queries @ summaries.mT + keys.to(self.queries.dtype).log()[..., None, :]

    def leaf_scores(self, leaves: Tensor) -> Tensor:
        """Block scores with the heads joined: [B, sets, M, A]."""
        masses = self.masses(leaves)
        if self.rules.head_reduce == "sum_prob":
            forced = self.where.forced(self.rules.sink_blocks + self.rules.local_blocks).expand(*self.shape, -1)
            normaliser = torch.cat([masses, self.masses(forced)], dim=-1).logsumexp(-1, keepdim=True)
            return (masses - normaliser).exp().sum(-2)
        return masses.sum(-2) if self.rules.head_reduce == "sum_lse" else masses.logsumexp(-2)

    def masses(self, blocks: Tensor) -> Tensor:
        """Log-mass of blocks by their keys, or by their parts' means, as far as the query sees them: [B, sets, M, g, A]."""
        size = self.store.sizes.block_size
        first = blocks[..., None] * size
        seen = torch.minimum(self.where.position, self.store.lengths[:, :1, None].long() - 1)[..., None, None]
        if self.rules.leaf_score == "sub":
            keys, log_keys, last = self._parts(blocks, first)
        else:
            keys, log_keys = self.store.blocks_of(self.store.k, blocks), None
            last = first + torch.arange(size, device=first.device)
        visible = (last <= seen) & (blocks >= 0)[..., None]
        rows = keys.to(self.queries.dtype).masked_fill_(~visible[..., None], 0)
        logits = (self.queries @ rows.flatten(3, 4).mT).unflatten(-1, visible.shape[-2:])
        logits = logits if log_keys is None else logits + log_keys[..., None, :, :]
        masses = logits.masked_fill(~visible[..., None, :, :], -math.inf).logsumexp(-1)
        return torch.where(masses.isnan(), -math.inf, masses)

    def _parts(self, blocks: Tensor, first: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Means of the parts of blocks [B, sets, M, A], the logarithm of their keys and their last keys: [..., A, parts]."""
        sizes, tokens = self.store.sizes, self.store.lengths[:, :1, None, None, None].long()
        edges = (torch.arange(sizes.parts + 1, device=first.device) * sizes.part_size).clamp(max=sizes.block_size)
        begin, end = first + edges[:-1], first + edges[1:]
        counts = (torch.minimum(end, tokens) - begin).clamp(min=0)
        means = self.store.parts_of(blocks)
        # Kept are the means of whole parts; a sequence has at most one open one.
        is_open = (begin < tokens) & (end > tokens)
        means = torch.where(is_open[..., None], self._open_part(blocks.shape[1]), means)
        # A part without a key lies behind every query, whatever is in its place.
        last = torch.where(counts > 0, torch.minimum(end, tokens) - 1, torch.iinfo(torch.int64).max)
        return means, counts.to(self.queries.dtype).log(), last

    def _open_part(self, sets: int) -> Tensor:
        """The mean of the keys behind the last whole part of each sequence: [B, sets, 1, 1, 1, D] in k's dtype."""
        sizes, tokens = self.store.sizes, self.store.lengths[:, :1, None].long()
        own = (tokens // sizes.block_size).clamp(max=sizes.blocks - 1).expand(-1, sets, -1)
        keys = self.store.blocks_of(self.store.k, own).to(self.store.stats.dtype)
        held = tokens[..., None] % sizes.block_size
        begin = held // sizes.part_size * sizes.part_size
        key = torch.arange(sizes.block_size, device=keys.device)
        rows = torch.where(((key >= begin) & (key < held))[..., None], keys, 0)
        # Summed in the order of `pyramid.sub_block_means`: a part's keys, and zeros behind them.
        padded = torch.nn.functional.pad(rows, (0, 0, 0, sizes.part_size * sizes.parts - sizes.block_size))
        total = padded.unflatten(-2, (sizes.parts, sizes.part_size)).sum(-2).sum(-2)
        return (total / (held - begin).clamp(min=1)).to(self.store.k.dtype)[..., None, None, :]


def start_nodes(levels: int, blocks: int, rules: WalkRules, level: int) -> int:
    """The most nodes that a walk may find on a level that it starts at, whatever the length; 0 where it starts at none."""
    nodes = -(-blocks // rules.branching**level)
    if rules.levels == "full":
        return 1
    if rules.levels == "auto":
        return min(nodes, rules.start_width)
    return nodes if level == levels - 1 else 1


def attend_reference(q: Tensor, store: CacheStore, blocks: Tensor, scale: float) -> Tensor:
    """Softmax attention of q [B, H, M, D] to the keys of its blocks, int [B, sets, M, S], up to its position: [B, H, M, Dv]."""
    sets, size, wide = blocks.shape[1], store.sizes.block_size, store.stats.dtype
    queries = q.unflatten(1, (sets, -1)).transpose(2, 3).to(wide) * scale
    key = (blocks.long()[..., None] * size + torch.arange(size, device=q.device)).flatten(-2)
    position = store.lengths[:, :1, None] - q.shape[2] + torch.arange(q.shape[2], device=q.device)
    seen = (key <= position[..., None]) & (blocks >= 0).repeat_interleave(size, -1)
    keys, values = (store.blocks_of(x, blocks.long()).to(wide).flatten(3, 4) for x in (store.k, store.v))
    # What the unused tail holds may be NaN, which a weight of 0 does not undo. (Both are copies: they were gathered.)
    logits = (queries @ keys.masked_fill_(~seen[..., None], 0).mT).masked_fill(~seen[..., None, :], -math.inf)
    weights = logits.softmax(-1).masked_fill(~seen.any(-1)[..., None, None], 0)
    output = weights @ values.masked_fill_(~seen[..., None], 0)
    return output.transpose(2, 3).flatten(1, 2).to(q.dtype)
