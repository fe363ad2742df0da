"""The predicted work of a walk against the nodes that it scores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pyramidbench.kernels import walk
from pyramidbench.kernels.pyramid import build_pyramid, walked_levels
from pyramidbench.kernels.walk import build, route_reference
from pyramidbench.kernels.walk_cost import nodes_in, scored_nodes, walk_cost, walk_workspace
from pyramidbench.kernels.walk_rules import WalkRules
from pyramidbench.problem import Problem
from pyramidbench.tiling import Tiling

MakeTensors = Callable[..., tuple[Tensor, Tensor, Tensor]]
FLAT = WalkRules(top_k=4, sink_blocks=1, local_blocks=2, levels=1, leaf_candidates=None)
PYRAMID = replace(FLAT, levels="auto", start_width=16, leaf_candidates=3)
FLATS = {
    "exact": FLAT,
    "exact-sum-lse": replace(FLAT, head_reduce="sum_lse"),
    "mean": replace(FLAT, leaf_score="summary", bound_weight=0),
    "sub": replace(FLAT, leaf_score="sub"),
    "filtered": replace(FLAT, leaf_candidates=3),
    "rows": replace(FLAT, score_rows=4),
    "mean-query": replace(FLAT, tile_reduce="mean"),
    "in-budget": replace(FLAT, forced_in_budget=True, top_k=7),
    "tight-budget": replace(FLAT, forced_in_budget=True, top_k=4),
}
PYRAMIDS = {
    "default": PYRAMID,
    "paper": replace(
        PYRAMID,
        beam=1,
        levels="full",
        bound_weight=0,
        node_score="children",
        leaf_candidates=None,
        head_reduce="sum_lse",
    ),
    "fast": replace(PYRAMID, beam=2, leaf_candidates=2, score_rows=4),
    "fastest": replace(PYRAMID, tile_reduce="mean", leaf_score="summary"),
    "wide": replace(PYRAMID, branching=4, levels="full"),
    "three": replace(PYRAMID, branching=3, beam=1.5, levels=3),
}
TILINGS = {
    "token-level": Tiling(1000, 1000, 4, 1, True),
    "tile": Tiling(2000, 2000, 8, 32, True),
    "full": Tiling(500, 1003, 4, 32, False),
    "more-keys": Tiling(300, 1500, 8, 16, True),
}


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Nodes that the walk ranks by score, times the rows that score them: each tile, level and score once."""
    found: dict[tuple[str, int, int], int] = {}
    total: Counter[str] = Counter()
    original = walk._Walk.best_nodes

    def counting(self: Any, nodes: Tensor | int, level: int, keep: int | Tensor, score: Any) -> Tensor:
        listed = torch.arange(nodes).expand(*self.tile.shape, -1) if isinstance(nodes, int) else nodes
        rankable = self.rankable(listed, level).sum(-1)
        scored = torch.where((rankable > keep) & (torch.as_tensor(keep) > 0), rankable, 0)
        if score.__name__ == "leaf_scores" and self.rules.head_reduce == "sum_prob":
            scored = scored + (scored > 0) * self.forced.count().view(scored.shape)
        for tile, count in zip(self.tile.flatten().tolist(), (scored * self.real.sum(-1)).flatten().tolist()):
            kind = {"leaf_scores": "blocks", "summary_scores": "summary"}.get(score.__name__, self.rules.node_score)
            if (kind, level, tile) not in found:
                found[kind, level, tile] = count
                total[kind] += count
        return original(self, nodes, level, keep, score)

    monkeypatch.setattr(walk._Walk, "best_nodes", counting)
    return total


def run(tensors: MakeTensors, tiling: Tiling, rules: WalkRules) -> tuple[WalkRules, int]:
    if not tiling.causal:
        rules = replace(rules, sink_blocks=0, local_blocks=0)
    q, k, _ = tensors(queries=tiling.seq_len_q, keys=tiling.seq_len_kv, heads=1, dim=4, dtype=torch.float32)
    route_reference(q, k, build(k, tiling, rules), tiling, rules, 0.5)
    return rules, walked_levels(rules.levels, tiling.blocks, rules.branching, rules.start_width)


@pytest.mark.parametrize("shape", TILINGS)
@pytest.mark.parametrize("name", FLATS)
def test_a_flat_scan_scores_exactly_what_is_predicted(
    tensors: MakeTensors, counted: Counter[str], shape: str, name: str
) -> None:
    rules, levels = run(tensors, TILINGS[shape], FLATS[name])
    planned = scored_nodes(TILINGS[shape], rules, levels)
    assert (planned.by_summary, planned.by_children, planned.blocks) == (counted["summary"], 0, counted["blocks"])
    assert planned.by_summary + planned.blocks > 0 or name == "tight-budget"


@pytest.mark.parametrize("rules", [FLAT, PYRAMID], ids=["flat", "pyramid"])
def test_nothing_is_scored_for_a_budget_of_none(
    tensors: MakeTensors, monkeypatch: pytest.MonkeyPatch, rules: WalkRules
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("scored a node")

    for score in ("summary_scores", "children_scores", "block_scores"):
        monkeypatch.setattr(walk, score, refuse)
    nothing, levels = run(tensors, TILINGS["tile"], replace(rules, top_k=0))
    planned = scored_nodes(TILINGS["tile"], nothing, levels)
    assert (planned.by_summary, planned.by_children, planned.blocks) == (0, 0, 0)


@pytest.mark.parametrize("shape", TILINGS)
@pytest.mark.parametrize("name", PYRAMIDS)
def test_a_walk_scores_what_is_predicted(tensors: MakeTensors, counted: Counter[str], shape: str, name: str) -> None:
    rules, levels = run(tensors, TILINGS[shape], PYRAMIDS[name])
    planned = scored_nodes(TILINGS[shape], rules, levels)
    predicted = {"summary": planned.by_summary, "children": planned.by_children, "blocks": planned.blocks}
    assert levels > 1
    if TILINGS[shape].causal:
        assert predicted == {kind: counted[kind] for kind in predicted}
    for kind, most in predicted.items():
        # The last node of a level may have fewer children than the plan gives it.
        assert counted[kind] <= most <= 1.02 * counted[kind], f"{kind}: {counted[kind]} scored, {most} predicted"


PROBLEM = Problem(2, 6, 3, 1024, 1024, 8, 8, "bfloat16", True, 0.35)


def test_operations_follow_from_the_scored_nodes() -> None:
    tiling = Tiling(1024, 1024, 16, 16, True)
    for rules, node_width, per_block in (
        (PYRAMID, 16, 16),
        (replace(PYRAMID, bound_weight=0), 8, 16),
        (replace(PYRAMID, node_score="children"), 16, 16),
        (replace(PYRAMID, leaf_score="sub"), 16, 4),
    ):
        nodes = scored_nodes(tiling, rules, walked_levels(rules.levels, 64, 2, 16))
        dots = node_width * (nodes.by_summary + 2 * nodes.by_children) + 8 * per_block * nodes.blocks
        assert walk_cost(PROBLEM, tiling, rules)[1].flops == 2 * 6 * 2 * dots


def test_the_build_reads_all_keys_once_and_writes_all_nodes(tensors: MakeTensors) -> None:
    tiling = Tiling(1024, 1024, 16, 16, True)
    _, k, _ = tensors(queries=1024, batch=2, heads=6, kv_heads=3, dtype=torch.bfloat16)
    pyramid = build(k, tiling, PYRAMID)
    stage, _ = walk_cost(PROBLEM, tiling, PYRAMID)
    assert stage.bytes == 2 * (k.numel() + pyramid.nodes.numel())
    assert stage.flops == 3 * k.numel()
    assert walk_cost(PROBLEM, tiling, FLAT)[0].bytes == 0


@pytest.mark.parametrize("blocks", [1, 2, 63, 64, 1000])
@pytest.mark.parametrize("branching", [2, 3, 4])
def test_nodes_of_all_levels(tensors: MakeTensors, blocks: int, branching: int) -> None:
    _, k, _ = tensors(queries=blocks * 2)
    for levels in range(1, walked_levels("full", blocks, branching, 1) + 1):
        pyramid = build_pyramid(k, block_size=2, branching=branching, levels=levels, bound_weight=0)
        assert nodes_in(blocks, branching, levels) == pyramid.offsets[-1]


def test_work_grows_as_n_log_n_and_workspace_as_n() -> None:
    flops, held = [], []
    for length in (1 << 16, 1 << 17, 1 << 18):
        problem = replace(PROBLEM, seq_len_q=length, seq_len_kv=length, head_dim=64, head_dim_v=64)
        tiling, rules = Tiling(length, length, 64, 64, True), replace(PYRAMID, start_width=64, top_k=16)
        flops.append(walk_cost(problem, tiling, rules)[1].flops)
        held.append(walk_workspace(problem, tiling, rules))
    assert 2 < flops[1] / flops[0] < 2.4
    assert 2 < flops[2] / flops[1] < 2.4
    assert held[2] - held[1] == pytest.approx(2 * (held[1] - held[0]), rel=0.01)
