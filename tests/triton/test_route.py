"""The Triton walk against its torch twin: the same sets."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from pyramidbench.kernels.walk import build, route_reference
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


CAUSAL = {"sink_blocks": 1, "local_blocks": 2, "start_width": 4}
MEAN = {**CAUSAL, "tile_reduce": "mean", "leaf_score": "summary"}
PAPER = {**CAUSAL, "beam": 1, "levels": "full", "bound_weight": 0, "node_score": "children", "leaf_candidates": None,
         "head_reduce": "sum_lse"}  # fmt: skip
SMALL = [
    Case("mean-group-2", 2, 1, 700, 700, 16, 16, 32, {**MEAN, "top_k": 4, "beam": 1}),
    Case("mean-branching-3", 4, 2, 150, 333, 16, 16, 16, {**MEAN, "top_k": 3, "beam": 1.5, "branching": 3}, batch=2),
    Case("mean-no-bounds-not-causal", 1, 1, 130, 900, 24, 16, 128, {**MEAN, "top_k": 6, "beam": 1, "bound_weight": 0,
         "local_blocks": 0}, causal=False),
    Case("one-level", 1, 1, 500, 500, 16, 16, 32, {**MEAN, "top_k": 7, "levels": 1}),
    Case("forced-in-budget-more-queries", 1, 1, 500, 300, 16, 16, 32, {**MEAN, "top_k": 7, "forced_in_budget": True,
         "levels": "full", "beam": 1}),
    Case("nothing-by-rank", 1, 1, 300, 300, 16, 16, 32, {**MEAN, "top_k": 0, "beam": 1}),
    Case("rows-exact", 2, 1, 600, 600, 16, 16, 128, {**CAUSAL, "top_k": 4, "beam": 2, "leaf_candidates": 2,
         "score_rows": 16}),
    Case("rows-exact-group-3", 3, 1, 200, 200, 16, 16, 16, {**CAUSAL, "top_k": 3, "beam": 2, "leaf_candidates": 2}),
    Case("token-level", 4, 2, 12, 200, 16, 16, 1, {**CAUSAL, "top_k": 2, "beam": 2, "leaf_candidates": 2}),
    Case("sum-lse-all-candidates", 2, 1, 300, 300, 16, 16, 32, {**CAUSAL, "top_k": 3, "beam": 1,
         "leaf_candidates": None, "head_reduce": "sum_lse", "bound_weight": 0}),
    Case("lse-ragged-not-causal", 2, 1, 100, 300, 16, 48, 20, {**CAUSAL, "top_k": 2, "beam": 1, "leaf_candidates": 2,
         "head_reduce": "lse", "sink_blocks": 0, "local_blocks": 0}, causal=False),
    Case("set-per-query-head", 2, 1, 200, 300, 16, 16, 32, {**CAUSAL, "top_k": 2, "beam": 1, "leaf_candidates": 2,
         "head_reduce": "none"}),
    Case("paper", 2, 1, 300, 300, 16, 16, 32, {**PAPER, "top_k": 2}),
    Case("children-group-3-branching-3", 3, 1, 150, 330, 16, 16, 16, {**PAPER, "top_k": 2, "branching": 3, "bound_weight": 1}),
    Case("children-not-causal-ragged", 1, 1, 60, 250, 16, 16, 20, {**PAPER, "top_k": 2, "local_blocks": 0}, causal=False),
    Case("children-mean", 2, 1, 300, 300, 16, 16, 32, {**PAPER, "top_k": 2, "tile_reduce": "mean"}),
    Case("children-mean-summary-leaf-no-bounds", 4, 2, 200, 250, 16, 16, 20, {**MEAN, "top_k": 2, "beam": 1, "levels": "full",
         "node_score": "children", "bound_weight": 0}),
    Case("one-score-row", 2, 1, 300, 300, 16, 16, 32, {**CAUSAL, "top_k": 3, "beam": 1, "score_rows": 1,
         "leaf_score": "summary"}),
    Case("flat-rows-group-2", 4, 2, 300, 900, 16, 16, 32, {**CAUSAL, "top_k": 3, "levels": 1, "leaf_score": "summary"}),
    Case("flat-filtered", 2, 1, 300, 900, 16, 16, 32, {**CAUSAL, "top_k": 3, "levels": 1, "leaf_candidates": 2}),
    Case("exact-nothing-by-rank", 1, 1, 100, 100, 16, 16, 32, {**CAUSAL, "top_k": 0}),
    Case("exact-nothing-but-forced", 2, 1, 40, 40, 16, 16, 1, {**CAUSAL, "top_k": 3, "levels": 1, "leaf_candidates": None,
         "head_reduce": "sum_lse"}),
    Case("exact-forced-in-budget", 3, 1, 300, 300, 16, 16, 64, {**CAUSAL, "top_k": 3, "beam": 2, "leaf_candidates": 2,
         "forced_in_budget": True}),
    Case("mean-exact", 2, 1, 410, 410, 16, 16, 32, {**CAUSAL, "tile_reduce": "mean", "top_k": 3, "beam": 2,
         "leaf_candidates": 2}),
    Case("mean-exact-sum-lse-not-causal", 3, 1, 70, 333, 24, 16, 20, {**CAUSAL, "tile_reduce": "mean", "top_k": 2, "beam": 2,
         "leaf_candidates": 2, "head_reduce": "sum_lse", "local_blocks": 0}, causal=False, batch=2),
    Case("sub", 2, 1, 300, 301, 16, 16, 32, {**CAUSAL, "leaf_score": "sub", "top_k": 3, "beam": 2, "leaf_candidates": 2}),
    Case("sub-parts-that-do-not-divide", 4, 2, 40, 333, 16, 16, 20, {**CAUSAL, "leaf_score": "sub", "sub_blocks": 5, "top_k": 2,
         "beam": 2, "leaf_candidates": 3, "head_reduce": "lse"}, causal=False),
    Case("sub-mean", 2, 2, 200, 300, 16, 16, 48, {**CAUSAL, "leaf_score": "sub", "tile_reduce": "mean", "top_k": 3, "beam": 2,
         "leaf_candidates": None}),
]  # fmt: skip
# βK is a power of two, so the children of the open nodes are held apart.
EDGED = [
    Case("edged", 2, 1, 700, 700, 16, 16, 32, {**MEAN, "top_k": 4, "beam": 2}),
    Case("edged-not-causal", 1, 1, 64, 1200, 16, 16, 32, {**MEAN, "top_k": 8, "beam": 2, "local_blocks": 0}, causal=False),
    Case("edged-two-sinks-three-locals", 2, 2, 300, 900, 16, 16, 48, {**MEAN, "top_k": 4, "beam": 2, "sink_blocks": 2,
         "local_blocks": 3}),
    Case("edged-all-kept-at-the-leaves", 1, 1, 400, 900, 16, 16, 64, {**MEAN, "top_k": 8, "beam": 1}),
    Case("edged-forced-in-budget-exact", 2, 1, 300, 700, 16, 16, 32, {**MEAN, "leaf_score": "exact", "top_k": 4, "beam": 2,
         "leaf_candidates": 3, "forced_in_budget": True}),
]  # fmt: skip
WIDE = {"sink_blocks": 1, "local_blocks": 2}
LARGE = [
    Case("fastest", 2, 2, 8192, 8192, 128, 64, 128, {**WIDE, "top_k": 16, "tile_reduce": "mean", "leaf_score": "summary"}),
    Case("fastest-k-20", 4, 2, 5000, 9001, 64, 32, 64, {**WIDE, "top_k": 20, "beam": 2, "tile_reduce": "mean",
         "leaf_score": "summary"}),
    Case("fast", 2, 2, 8192, 8192, 128, 64, 128, {**WIDE, "top_k": 8, "beam": 2, "leaf_candidates": 2,
         "score_rows": 16}),
    Case("default-group-2", 4, 2, 3000, 3333, 64, 32, 64, {**WIDE, "top_k": 8}),
    Case("mean-exact", 4, 2, 8192, 8192, 128, 64, 128, {**WIDE, "tile_reduce": "mean", "top_k": 8, "beam": 2,
         "leaf_candidates": 2}),
    Case("sub", 2, 2, 5000, 5001, 128, 64, 128, {**WIDE, "leaf_score": "sub", "top_k": 8, "beam": 2, "leaf_candidates": 2,
         "score_rows": 16}),
    Case("paper", 2, 2, 4000, 4000, 128, 64, 64, {**WIDE, **PAPER, "start_width": 64, "top_k": 8}),
    Case("token-level-group-16", 16, 1, 500, 4096, 128, 64, 1, {**WIDE, "top_k": 8, "beam": 2, "leaf_candidates": 2}),
    Case("flat-exact", 2, 2, 1000, 3000, 96, 16, 128, {**WIDE, "top_k": 5, "levels": 1, "head_reduce": "sum_lse",
         "bound_weight": 0, "leaf_candidates": None}),
]  # fmt: skip


def named(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


@named(SMALL + EDGED)
def test_small(case: Case, device: str) -> None:
    assert differing_rows(case, torch.float32, device) == 0


@named(EDGED)
def test_the_children_of_open_nodes_are_held_apart(case: Case, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That the cases above meet what they are for, and that it changes nothing: equal scores and NaN included."""
    from pyramidbench.kernels import route_descend

    seen = []
    init = route_descend.Descent.__init__

    def watched(self: route_descend.Descent, *arguments: object, **named: object) -> None:
        init(self, *arguments, **named)
        seen.append(self.is_edged)

    monkeypatch.setattr(route_descend.Descent, "__init__", watched)
    assert differing_rows(case, torch.float32, device, equal_keys=True) == 0
    assert differing_rows(case, torch.float32, device, poisoned_key=70) == 0
    assert seen == [True, True]


@named([case for case in SMALL if case.name in ("mean-group-2", "rows-exact", "children-mean")])
def test_small_half(case: Case, device: str) -> None:
    # Seed 0 holds a near-tie (two blocks at 2.24679) in the first case.
    assert differing_rows(case, torch.float16, device, seed=1) == 0


@pytest.mark.gpu
@named(LARGE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_large(case: Case, dtype: torch.dtype, device: str) -> None:
    # A near-tie that the order of a sum decides may swap a block: in one list of a thousand, or of all where they are fewer.
    lists = case.batch * case.kv_heads * -(-case.queries // case.query_tile)
    assert differing_rows(case, dtype, device) <= max(1e-3, 1 / lists)


def test_levels_that_keep_all_their_nodes_are_not_built(device: str) -> None:
    """What the walk starts below, its twin may as well: the sets are those of the whole pyramid."""
    from pyramidbench.kernels import backends
    from pyramidbench.kernels.route_call import scored_levels

    torch.manual_seed(0)
    q, k = (torch.randn(1, 1, 700, 16, device=device) for _ in range(2))
    tiling, rules = Tiling(700, 700, 16, 32, True), WalkRules(**{**MEAN, "top_k": 4, "beam": 2})
    whole, built = build(k, tiling, rules), backends.build(k, tiling, rules, "triton")
    assert built.levels == scored_levels(rules, tiling) < whole.levels
    twin = route_reference(q, k, whole, tiling, rules, 0.25)
    assert torch.equal(route_reference(q, k, built, tiling, rules, 0.25), twin)
    assert torch.equal(backends.route(q, k, built, tiling, rules, 0.25, "triton").indices, twin)


@named([case for case in SMALL if case.name in ("sub", "sub-parts-that-do-not-divide", "rows-exact-group-3")])
def test_ties_of_scored_leaves_go_to_the_lower_block(case: Case, device: str) -> None:
    assert differing_rows(case, torch.float32, device, equal_keys=True) == 0


def test_ties_go_to_the_lower_block(device: str) -> None:
    case = Case("", 1, 1, 400, 400, 16, 16, 16, {**MEAN, "top_k": 3, "beam": 1})
    assert differing_rows(case, torch.float32, device, equal_keys=True) == 0


def test_nan_counts_as_the_lowest_score(device: str) -> None:
    case = Case("", 1, 1, 400, 400, 16, 16, 16, {**MEAN, "top_k": 3, "beam": 1})
    assert differing_rows(case, torch.float32, device, poisoned_key=70) == 0


def differing_rows(
    case: Case,
    dtype: torch.dtype,
    device: str,
    *,
    seed: int = 0,
    equal_keys: bool = False,
    poisoned_key: int | None = None,
) -> float:
    """Share of lists that differ from the twin's; shape, dtype and gaps must be right besides."""
    from pyramidbench.kernels.route import route, route_gap

    torch.manual_seed(seed)
    q = torch.randn(case.batch, case.queries, case.heads, case.head_dim, device=device).to(dtype).transpose(1, 2)
    k = torch.randn(case.batch, case.kv_heads, case.keys, case.head_dim, device=device).to(dtype)
    if equal_keys:
        # Equal whole numbers, whose means and products are exact in any order: otherwise a CPU's product may round equal
        # columns differently.
        q, k = (x.mul(2).round()[:, :, :1].expand_as(x).contiguous() for x in (q, k))
    if poisoned_key is not None:
        k[:, :, poisoned_key] = torch.nan
    tiling = Tiling(case.queries, case.keys, case.block_size, case.query_tile, case.causal)
    rules = WalkRules(**case.rules)
    group = 1 if rules.head_reduce == "none" else case.heads // case.kv_heads
    assert route_gap(rules, tiling, case.head_dim, str(dtype).removeprefix("torch."), group) is None
    pyramid = build(k, tiling, rules)
    twin = route_reference(q, k, pyramid, tiling, rules, case.head_dim**-0.5)
    selection = route(q, k, pyramid, tiling, rules, case.head_dim**-0.5)
    lists = selection.indices
    assert torch.equal(selection.counts, (lists >= 0).sum(-1))
    assert (lists.shape, lists.dtype) == (twin.shape, twin.dtype)
    return float((lists != twin).any(-1).double().mean())


@named([case for case in SMALL if case.name in ("rows-exact", "set-per-query-head", "token-level")])
@pytest.mark.parametrize("portion_bytes", [1, 5000, 40_000])
def test_leaves_in_portions(case: Case, portion_bytes: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyramidbench.kernels import route_portions

    monkeypatch.setattr(route_portions, "PORTION_BYTES", portion_bytes)
    monkeypatch.setattr(route_portions, "WINDOW_BYTES", portion_bytes // 8)
    assert differing_rows(case, torch.float32, device) == 0


@pytest.mark.parametrize("nodes", [0, 4, 12, 40])
@named([SMALL[0], SMALL[4], SMALL[6], SMALL[8]])
def test_levels_scored_whole_and_gathered_alike(
    case: Case, nodes: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyramidbench.kernels import route

    monkeypatch.setattr(route, "SCORED_NODES", nodes)
    assert differing_rows(case, torch.float32, device) == 0


@named([SMALL[3], SMALL[5], Case("not-causal", 2, 1, 64, 900, 16, 16, 32, {**MEAN, "top_k": 7, "levels": 1, "local_blocks": 0},
                                 causal=False)])  # fmt: skip
@pytest.mark.parametrize("places", [16, 32])
def test_flat_list_thinned_on_the_way(case: Case, places: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyramidbench.kernels import route_descend

    monkeypatch.setattr(route_descend, "FEWEST_PLACES", places)
    assert differing_rows(case, torch.float32, device) == 0


@named([SMALL[0], SMALL[1], SMALL[8]])
@pytest.mark.parametrize("window_bytes", [1, 3000, 9000])
def test_scores_in_windows(case: Case, window_bytes: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyramidbench.kernels import route_window

    monkeypatch.setattr(route_window, "LEAST_BYTES", window_bytes)
    monkeypatch.setattr(route_window, "BYTES_PER_ROW", 0)
    monkeypatch.setattr(route_window, "BYTES_PER_TILE", 0)
    monkeypatch.setattr(route_window, "EASY_BYTES", 0)
    route_window.windows.cache_clear()
    assert differing_rows(case, torch.float32, device) == 0
