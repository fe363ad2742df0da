"""What a walk costs: operations and bytes by stage, counted tile by tile from the geometry alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyramidbench.cost import StageCost, append_cost
from pyramidbench.kernels.panels import chunk_elements
from pyramidbench.kernels.pyramid import walked_levels, whole_parts
from pyramidbench.kernels.walk_rules import WalkRules
from pyramidbench.problem import Problem
from pyramidbench.selection import ranked_count
from pyramidbench.tiling import Forced, Tiling


@dataclass(frozen=True)
class ScoredNodes:
    """Nodes scored by one head, summed over tiles and weighted by the rows that score them."""

    by_summary: float
    by_children: float
    blocks: float
    read_nodes: float
    read_blocks: float


def walk_cost(problem: Problem, tiling: Tiling, rules: WalkRules) -> tuple[StageCost, StageCost]:
    """The build and route stages. Node counts are exact when causal, else upper bounds (by a last node's missing children)."""
    levels = walked_levels(rules.levels, tiling.blocks, rules.branching, rules.start_width)
    scored = scored_nodes(tiling, rules, levels)
    heads, kv_heads = problem.batch * problem.heads, problem.batch * problem.kv_heads
    bounds = rules.bounds(problem.head_dim) > 0
    width = problem.head_dim * (2 if bounds else 1)
    per_block = {"exact": tiling.block_size, "sub": rules.sub_blocks, "summary": 0}[rules.leaf_score]
    route_flops = (
        heads
        * 2.0
        * (
            width * (scored.by_summary + rules.branching * scored.by_children)
            + problem.head_dim * per_block * scored.blocks
        )
    )
    read = width * scored.read_nodes * (rules.branching if rules.node_score == "children" else 1)
    read += problem.head_dim * per_block * scored.read_blocks
    route = StageCost("route", route_flops, kv_heads * read * problem.itemsize)
    if not rules.needs_summaries(levels):
        return StageCost("build", 0.0, 0.0), route
    keys = kv_heads * problem.seq_len_kv * problem.head_dim
    written = kv_heads * nodes_in(tiling.blocks, rules.branching, levels) * width
    return StageCost("build", keys * (3.0 if bounds else 1.0), (keys + written) * problem.itemsize), route


def walk_workspace(problem: Problem, tiling: Tiling, rules: WalkRules) -> float:
    """Bytes held besides inputs and output: pyramid, block lists, fp32 copies of one head's keys, one chunk of logits."""
    head_copies = 4.0 * problem.seq_len_kv * (problem.head_dim + problem.head_dim_v)
    logits = min(chunk_elements(problem.device), problem.group * problem.seq_len_q * problem.seq_len_kv)
    held = pyramid_bytes(problem, tiling, rules) + lists_bytes(problem, tiling, rules)
    return held + head_copies + 6.0 * 4 * logits


def attention_scratch(problem: Problem) -> float:
    """Bytes that the attention twin holds: fp32 copies of one head's keys and values, and of a chunk the gathered keys and
    values, the logits and their mask."""
    head_copies = 4.0 * problem.seq_len_kv * (problem.head_dim + problem.head_dim_v)
    return head_copies + 4.0 * 4 * min(
        chunk_elements(problem.device), problem.group * problem.seq_len_q * problem.seq_len_kv
    )


def pyramid_bytes(problem: Problem, tiling: Tiling, rules: WalkRules) -> float:
    """Bytes of the summaries of keys, all walked levels together."""
    levels = walked_levels(rules.levels, tiling.blocks, rules.branching, rules.start_width)
    width = problem.head_dim * (2 if rules.bounds(problem.head_dim) > 0 and rules.needs_summaries(levels) else 1)
    nodes = problem.batch * problem.kv_heads * nodes_in(tiling.blocks, rules.branching, levels)
    return float(nodes * width * problem.itemsize)


def lists_bytes(problem: Problem, tiling: Tiling, rules: WalkRules) -> float:
    """Bytes of the chosen blocks of every tile while they are made: int64, sorted and cut."""
    sets = problem.batch * (problem.heads if rules.head_reduce == "none" else problem.kv_heads)
    return 3 * 8.0 * sets * tiling.tiles * longest_list(tiling, rules)


def longest_list(tiling: Tiling, rules: WalkRules) -> int:
    """Blocks that a tile lists at most."""
    listed = rules.top_k + rules.sink_blocks + rules.local_blocks + -(-tiling.query_tile // tiling.block_size)
    return min(listed, tiling.blocks)


def nodes_in(blocks: int, branching: int, levels: int) -> int:
    """Nodes of all walked levels together."""
    total = 0
    for _ in range(levels):
        total += blocks
        blocks = -(-blocks // branching)
    return total


def scored_nodes(tiling: Tiling, rules: WalkRules, levels: int) -> ScoredNodes:
    """Count what the walk scores for one head, over all tiles."""
    tile = torch.arange(tiling.tiles)
    forced = tiling.forced(tile, rules.sink_blocks, rules.local_blocks)
    held = tiling.last_position(tile) - tiling.first_position(tile) + 1
    rows = (
        torch.ones_like(held) if rules.tile_reduce == "mean" else held.clamp(max=rules.score_rows or tiling.query_tile)
    )
    summary = children = read_nodes = 0.0
    rankable = rankable_nodes(tiling, tile, forced, rules.branching ** (levels - 1))
    arrived = rankable
    for level in range(levels - 1, 0, -1):
        scored = ranked_by_score(arrived, rules.inner_width())
        if rules.node_score == "children":
            children += float((scored * rows).sum())
        else:
            summary += float((scored * rows).sum())
        read_nodes += float(scored.sum())
        below = rankable_nodes(tiling, tile, forced, rules.branching ** (level - 1))
        # All children of a rankable node are rankable; the others below are children of forced nodes, always opened.
        opened = below - rules.branching * rankable + childless(tiling, rules.branching, level)
        arrived, rankable = arrived.clamp(max=rules.inner_width()) * rules.branching + opened, below
    keep = ranked_count(rules.top_k, forced, rules.forced_in_budget)
    limit = None if rules.leaf_candidates is None else rules.leaf_candidates * rules.top_k
    if rules.leaf_score == "summary":
        by_summary, exact = ranked_by_score(arrived, keep), torch.zeros_like(arrived)
    else:
        by_summary = torch.zeros_like(arrived) if limit is None else ranked_by_score(arrived, limit)
        exact = ranked_by_score(arrived if limit is None else arrived.clamp(max=limit), keep)
        if rules.head_reduce == "sum_prob":
            exact = exact + forced.count() * (exact > 0)
    return ScoredNodes(
        by_summary=summary + float((by_summary * rows).sum()),
        by_children=children,
        blocks=float((exact * rows).sum()),
        read_nodes=read_nodes + float(by_summary.sum()),
        read_blocks=float(exact.sum()),
    )


def ranked_by_score(nodes: Tensor, keep: Tensor | int) -> Tensor:
    """Nodes that need a score: all of them, or none where every one stays or none may."""
    return torch.where((nodes > keep) & (torch.as_tensor(keep) > 0), nodes, 0)


def rankable_nodes(tiling: Tiling, tile: Tensor, forced: Forced, span: int) -> Tensor:
    """Complete nodes of `span` blocks that hold no forced block, per tile."""
    if not tiling.causal:
        return (-(-tiling.blocks // span) - -(-forced.sink_end // span)).clamp(min=0)
    complete = (tiling.first_position(tile) + 1).clamp(min=0) // (span * tiling.block_size)
    return (torch.minimum(complete, forced.local_start // span) - -(-forced.sink_end // span)).clamp(min=0)


def childless(tiling: Tiling, branching: int, level: int) -> int:
    """Children that the last node of a level lacks; when causal, that node is complete only where it is forced."""
    if tiling.causal:
        return 0
    span: int = branching ** (level - 1)
    return branching * -(-tiling.blocks // (span * branching)) - -(-tiling.blocks // span)


def step_cost(problem: Problem, tiling: Tiling, rules: WalkRules) -> tuple[StageCost, StageCost]:
    """The append and route stages of a decoding step on a cache that keeps its pyramid.

    The append writes the new tokens. Only where they complete a block it reads the block's keys, and for each node that ends
    with it moves the statistics (three fp32 vectors, or one without bounds) of the children and a summary. Likewise a part of a
    block, where the rules score by them: its keys are read and its mean is written.
    """
    levels = walked_levels(rules.levels, tiling.blocks, rules.branching, rules.start_width)
    spans = [tiling.block_size * rules.branching**level for level in range(levels)]
    old = problem.seq_len_kv - problem.seq_len_q
    ends = [problem.seq_len_kv // span - old // span for span in spans]
    heads = problem.batch * problem.kv_heads
    rows = 3 if rules.bounds(problem.head_dim) > 0 else 1
    summary = problem.itemsize * problem.head_dim * (2 if rows == 3 else 1)
    path = sum(ends) * (4.0 * problem.head_dim * rows * rules.branching + summary)
    block = ends[0] * problem.itemsize * problem.head_dim * tiling.block_size
    tokens = append_cost(problem)
    summed = rows * (ends[0] * tiling.block_size + sum(ends) * rules.branching)
    if rules.leaf_score == "sub":
        sizes = (tiling.block_size, rules.sub_blocks)
        ended = whole_parts(problem.seq_len_kv, *sizes) - whole_parts(old, *sizes)
        size = -(-tiling.block_size // rules.sub_blocks)
        summed += ended * size
        block += ended * problem.itemsize * problem.head_dim * (1 + size)
    append = StageCost("append", float(heads * problem.head_dim * summed), tokens.bytes + heads * (block + path))
    return append, walk_cost(problem, tiling, rules)[1]
