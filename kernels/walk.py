"""The walk: choose K blocks per query tile coarse to fine, scoring a bounded number of nodes on each level.

A = all nodes of the start level. On each level: of the nodes in A that are complete for the tile and hold no forced
block, the best β·K by score stay; A becomes the children of those and of the forced blocks' ancestors. Among the blocks
the best P·K by summary (if there are more) go on to the block score, and the best K of these are kept, with the forced
ones. Straddling nodes are ancestors of forced blocks, so they are opened and never ranked: one pyramid over all keys is
causal by construction. At most branching·(β·K + forced) nodes are scored per level: O(log N) levels, O(N log N) in all.

One level is the flat (single-pass) selection: every complete block is scored, without a gather.
Source: "Block Sparse Attention with Log-Linear Complexity" (arXiv 2609.31093); docs/selection.md says what differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from pyramidbench.kernels.panels import Panels, membership, panels_of, unite
from pyramidbench.kernels.pyramid import Pyramid, build_pyramid, walked_levels
from pyramidbench.kernels.scores import (
    block_scores,
    children_scores,
    join_heads,
    mean_query,
    split_signs,
    summary_scores,
)
from pyramidbench.kernels.walk_keys import WalkKeys
from pyramidbench.kernels.walk_rules import WalkRules
from pyramidbench.selection import merge, ranked_count, stack_lists, top_indices, top_n_indices
from pyramidbench.stages import part
from pyramidbench.tiling import Forced, Tiling

_Score = Callable[[Tensor | None, int, int | None], Tensor]


def build(k: Tensor, tiling: Tiling, rules: WalkRules) -> Pyramid:
    """The pyramid that a walk under these rules reads; k: [B, G, N, D]."""
    levels = walked_levels(rules.levels, tiling.blocks, rules.branching, rules.start_width)
    return build_pyramid(
        k,
        block_size=tiling.block_size,
        branching=rules.branching,
        levels=levels,
        bound_weight=rules.bounds(k.shape[-1]) if rules.needs_summaries(levels) else 0.0,
    )


def route_reference(q: Tensor, k: Tensor, pyramid: Pyramid, tiling: Tiling, rules: WalkRules, scale: float) -> Tensor:
    """Blocks of every tile: int32 [B, sets, T, S], ascending, padded with -1.

    q: [B, H, M, D], k: [B, G, N, D]. Sets are the key/value heads, or the query heads with head_reduce "none".
    """
    batch, heads, kv_heads = q.shape[0], q.shape[1], k.shape[1]
    group = 1 if rules.head_reduce == "none" else heads // kv_heads
    sets = heads // group
    lists = []
    for index in range(batch * sets):
        b, first = index // sets, index % sets * group
        keys = WalkKeys.of(k[b, first * kv_heads // heads], pyramid, (b, first * kv_heads // heads), rules)
        lists.append(_walk_set(q[b, first : first + group], keys, tiling, rules, scale))
    return stack_lists(lists).to(torch.int32).view(batch, sets, tiling.tiles, -1)


def _walk_set(q: Tensor, keys: WalkKeys, tiling: Tiling, rules: WalkRules, scale: float) -> Tensor:
    """Blocks of every tile for one set: int64 [T, S]. q: [group, M, D]."""
    rows = None if rules.tile_reduce == "mean" else rules.score_rows
    columns = _columns_per_panel(keys, tiling, rules)
    parts = []
    for panels in panels_of(tiling, rows, columns, q.shape[0], q.shape[-1], q.device):
        queries = panels.queries(q).to(keys.blocks.dtype) * scale
        parts.append(_Walk(panels, queries, keys, tiling, rules).run())
    return stack_lists(parts)[: tiling.tiles]


def _columns_per_panel(keys: WalkKeys, tiling: Tiling, rules: WalkRules) -> int:
    """Roughly the widest row of logits that one panel needs."""
    per_block = 1 if rules.leaf_score == "summary" else keys.blocks.shape[1]
    if keys.pyramid.levels == 1:
        scanned = tiling.blocks
        return max(scanned, scanned * per_block if rules.leaf_candidates is None else 0)
    candidates = (rules.leaf_candidates or math.ceil(rules.branching * rules.beam)) * max(1, rules.top_k)
    return max(rules.start_width, min(tiling.blocks, candidates) * per_block)


class _Walk:
    """One chunk of panels on its way down. Node lists are int64 [P, share, A], padded with -1."""

    def __init__(self, panels: Panels, queries: Tensor, keys: WalkKeys, tiling: Tiling, rules: WalkRules) -> None:
        self.keys, self.tiling, self.rules = keys, tiling, rules
        self.tile = panels.tile
        self.real = panels.real
        if rules.tile_reduce == "mean":
            queries = mean_query(queries, panels.real)
            self.real = torch.ones_like(panels.real[..., :1])
        self.queries = queries
        self.summary_queries = split_signs(queries) if keys.pyramid.has_bounds else queries
        self.forced: Forced = tiling.forced(self.tile.flatten(), rules.sink_blocks, rules.local_blocks)
        self.forced_list = self.forced.list().view(*self.tile.shape, -1)

    def run(self) -> Tensor:
        """Blocks of each tile, int64 [P·share, S]."""
        pyramid = self.keys.pyramid
        nodes: Tensor | int = pyramid.size(pyramid.levels - 1)
        for level in range(pyramid.levels - 1, 0, -1):
            with part(f"level {level}"):
                kept = self.best_nodes(nodes, level, self.rules.inner_width(), self.node_scores)
                opened = merge(kept, self.forced_ancestors(level))
                nodes = self.children(opened, level)
        with part("level 0"):
            kept = self.best_blocks(nodes)
            return merge(kept, self.forced_list).flatten(0, 1)

    def best_blocks(self, nodes: Tensor | int) -> Tensor:
        rules = self.rules
        keep = ranked_count(rules.top_k, self.forced, rules.forced_in_budget).view(self.tile.shape)
        if rules.leaf_score == "summary":
            return self.best_nodes(nodes, 0, keep, self.summary_scores)
        if rules.leaf_candidates is not None:
            nodes = self.best_nodes(nodes, 0, rules.leaf_candidates * rules.top_k, self.summary_scores)
        return self.best_nodes(nodes, 0, keep, self.leaf_scores)

    def best_nodes(self, nodes: Tensor | int, level: int, keep: int | Tensor, score: _Score) -> Tensor:
        """The best `keep` rankable nodes of each tile; scores nothing where none would be dropped."""
        listed = (
            torch.arange(nodes, device=self.tile.device).expand(*self.tile.shape, -1)
            if isinstance(nodes, int)
            else nodes
        )
        may = self.rankable(listed, level)
        widest = int(keep.max()) if isinstance(keep, Tensor) else keep
        narrowest = int(keep.min()) if isinstance(keep, Tensor) else keep
        if int(may.sum(-1).max()) <= narrowest:
            return merge(listed.masked_fill(~may, -1))
        if widest == 0:
            return listed[..., :0]
        if isinstance(nodes, int):
            used = int(listed.masked_fill(~may, -1).max()) + 1
            scores = score(None, level, used)
            listed, may = listed[..., :used], may[..., :used]
        else:
            listed = merge(listed.masked_fill(~may, -1))
            may = listed >= 0
            scores = score(listed, level, None)
        scores = torch.where(may, scores.clamp(min=torch.finfo(scores.dtype).min), -torch.inf)
        if isinstance(keep, Tensor):
            best = top_n_indices(scores.flatten(0, 1), keep.flatten()).view(*self.tile.shape, -1)
        else:
            best = top_indices(scores, keep)
        return listed.gather(-1, best.clamp(min=0)).masked_fill(best < 0, -1)

    def rankable(self, nodes: Tensor, level: int) -> Tensor:
        """Complete and holding no forced block: bool [P, share, A]."""
        span = self.keys.pyramid.span(level)
        complete = self.tiling.complete(nodes, self.tile[..., None], span * self.tiling.block_size)
        forced = self.forced.contains(nodes.flatten(0, 1), span).view_as(nodes)
        return complete & ~forced & (nodes >= 0)

    def forced_ancestors(self, level: int) -> Tensor:
        span = self.keys.pyramid.span(level)
        nodes = torch.where(self.forced_list < 0, -1, self.forced_list // span)
        nodes[..., 1:] = nodes[..., 1:].masked_fill(nodes[..., 1:] == nodes[..., :-1], -1)
        return nodes

    def children(self, nodes: Tensor, level: int) -> Tensor:
        width = self.keys.pyramid.branching
        below = (nodes[..., None] * width + torch.arange(width, device=nodes.device)).flatten(-2)
        outside = (below < 0) | (below >= self.keys.pyramid.size(level - 1))
        return below.masked_fill(outside, -1)

    def node_scores(self, nodes: Tensor | None, level: int, first: int | None) -> Tensor:
        return self.summary_scores(nodes, level, first, by_children=self.rules.node_score == "children")

    def summary_scores(
        self, nodes: Tensor | None, level: int, first: int | None, *, by_children: bool = False
    ) -> Tensor:
        """Scores [P, share, A] of listed nodes, or of the `first` nodes of the level."""
        score, rows = (
            (children_scores, self.keys.level(level - 1)) if by_children else (summary_scores, self.keys.level(level))
        )
        if nodes is None:
            assert first is not None
            return score(self.summary_queries, self.real, self.keys.pyramid, rows, level, first)
        union, slot = unite(nodes)
        return score(self.summary_queries, self.real, self.keys.pyramid, rows, level, union).gather(-1, slot)

    def leaf_scores(self, nodes: Tensor | None, level: int, first: int | None) -> Tensor:
        """Block scores [P, share, A] with the heads joined."""
        assert level == 0
        forced = self.forced_scores() if self.rules.head_reduce == "sum_prob" else None
        if nodes is None:
            assert first is not None
            scores = block_scores(self.queries, self.keys.blocks, self.keys.log_weight, first)
            member = self.rankable(torch.arange(first, device=self.tile.device).expand(*self.tile.shape, -1), 0)
            return join_heads(scores, self.real, member, forced, self.rules.head_reduce)
        union, slot = unite(nodes)
        scores = block_scores(self.queries, self.keys.blocks, self.keys.log_weight, union)
        member = membership(nodes, slot, union.shape[1])
        return join_heads(scores, self.real, member, forced, self.rules.head_reduce).gather(-1, slot)

    def forced_scores(self) -> Tensor | None:
        """Block scores of the forced blocks, as far as the tile's first query sees them: [P, share, G, R, F].

        Later rows of the tile see more of them; but a key that the first query may not see must not move the tile's
        set, or the first query's output would depend on its future.
        """
        if self.forced_list.shape[-1] == 0:
            return None
        union, slot = unite(self.forced_list)
        visible = membership(self.forced_list, slot, union.shape[1])[..., None].expand(
            -1, -1, -1, self.keys.blocks.shape[1]
        )
        if self.tiling.causal:
            end = union[:, None, :, None] * self.tiling.block_size + self.part_ends()
            end = end.clamp(max=self.tiling.seq_len_kv - 1)
            visible = visible & (end <= self.tiling.first_position(self.tile)[..., None, None])
        return block_scores(self.queries, self.keys.blocks, self.keys.log_weight, union, visible)

    def part_ends(self) -> Tensor:
        """Offset in its block of each key (or of each part's last key), [c]."""
        parts = self.keys.blocks.shape[1]
        size = -(-self.tiling.block_size // parts)
        return ((torch.arange(parts, device=self.tile.device) + 1) * size).clamp(max=self.tiling.block_size) - 1
