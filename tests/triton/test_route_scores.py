"""Scores of whole levels by `kernels.route_scores` against the twin's, node by node."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from pyramidbench.kernels.panels import panels_of
from pyramidbench.kernels.scores import mean_query, split_signs, summary_scores
from pyramidbench.kernels.walk import build
from pyramidbench.kernels.walk_rules import WalkRules
from pyramidbench.tiling import Tiling


@dataclass(frozen=True)
class Case:
    name: str
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    block_size: int
    query_tile: int
    rules: dict[str, object] = field(default_factory=dict)
    causal: bool = True
    batch: int = 1


MEAN = {"tile_reduce": "mean", "leaf_score": "summary"}
SMALL = [
    Case("mean-group-2", 4, 2, 300, 300, 16, 16, 32, MEAN, batch=2),
    Case("mean-no-bounds-not-causal", 2, 2, 100, 333, 24, 16, 48, {**MEAN, "bound_weight": 0}, causal=False),
    Case("token-level-group-3", 3, 1, 70, 200, 16, 16, 1, {"leaf_score": "summary"}),
    Case("rows-group-2", 2, 1, 200, 250, 16, 16, 64, {"score_rows": 8}),
]
LARGE = [
    Case("mean", 2, 2, 8192, 8192, 128, 64, 128, MEAN),
    Case("token-level-group-16", 16, 1, 2000, 16384, 128, 64, 1, {"leaf_score": "summary"}),
    Case("rows", 2, 2, 4000, 4000, 64, 64, 128, {"score_rows": 16}),
]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_small(case: Case, dtype: torch.dtype, device: str) -> None:
    assert largest_error(case, dtype, device) < 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_large(case: Case, dtype: torch.dtype, device: str) -> None:
    # Half of what makes a near-tie (1e-3).
    assert largest_error(case, dtype, device) < 5e-4


def largest_error(case: Case, dtype: torch.dtype, device: str) -> float:
    """Over all nodes that a tile may rank: |score - the twin's in fp64|. Every such node must have been written."""
    from pyramidbench.kernels.route_call import call_of
    from pyramidbench.kernels.route_scores import Scorer
    from pyramidbench.kernels.route_window import Levels, columns_of, windows

    torch.manual_seed(0)
    q = torch.randn(case.batch, case.queries, case.heads, case.head_dim, device=device).to(dtype).transpose(1, 2)
    k = torch.randn(case.batch, case.kv_heads, case.keys, case.head_dim, device=device).to(dtype)
    tiling = Tiling(case.queries, case.keys, case.block_size, case.query_tile, case.causal)
    rules = WalkRules(**{"top_k": 2, "sink_blocks": 1, "local_blocks": 2, "start_width": 4, "beam": 1, **case.rules})
    pyramid = build(k, tiling, rules)
    call = call_of(q, k, pyramid, tiling, rules, case.head_dim**-0.5)
    levels = Levels(0, pyramid.levels, pyramid.branching)
    scorer = Scorer(call, levels)
    sets = case.batch * case.kv_heads
    (window,) = windows(tiling, levels, sets, 0, scorer.tile.BAND)
    scores = torch.full((sets, tiling.tiles, window.columns), torch.nan, device=device)
    scorer.score(window, torch.empty(sets * tiling.tiles * scorer.terms_width, dtype=dtype, device=device), scores)
    worst = 0.0
    for index in range(sets):
        b, g = divmod(index, case.kv_heads)
        mine = q[b, g * (case.heads // case.kv_heads) : (g + 1) * (case.heads // case.kv_heads)]
        column = 0
        for level, seen in enumerate(window.seen):
            exact = twin_scores(mine, call, level, (b, g))[:, :seen]
            node = torch.arange(seen, device=device)
            tile = torch.arange(tiling.tiles, device=device)
            found = scores[index, :, column : column + seen]
            may = tiling.complete(node[None, :], tile[:, None], pyramid.span(level) * case.block_size).expand_as(found)
            assert not found[may].isnan().any()
            worst = max(worst, float((found - exact)[may].abs().max()) if may.any() else 0.0)
            column += columns_of((seen,))
    return worst


def twin_scores(q: torch.Tensor, call: object, level: int, index: tuple[int, int]) -> torch.Tensor:
    """Scores [T, nodes] of one level by the twin, in fp64. q: [group, M, D]."""
    tiling, rules, pyramid = call.tiling, call.rules, call.pyramid
    rows = None if rules.tile_reduce == "mean" else rules.score_rows
    nodes = pyramid.nodes[index].double()[pyramid.offsets[level] : pyramid.offsets[level + 1]]
    parts = []
    for panels in panels_of(tiling, rows, pyramid.size(level), q.shape[0], q.shape[-1], q.device):
        queries, real = panels.queries(q).double() * call.scale, panels.real
        if rules.tile_reduce == "mean":
            queries, real = mean_query(queries, real), torch.ones_like(real[..., :1])
        queries = split_signs(queries) if pyramid.has_bounds else queries
        parts.append(summary_scores(queries, real, pyramid, nodes, level, pyramid.size(level)).flatten(0, 1))
    return torch.cat(parts)[: tiling.tiles]
