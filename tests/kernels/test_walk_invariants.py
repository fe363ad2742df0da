"""What holds for the sets of every walk: validity, causality, symmetry, ties, odd budgets, and memory that grows as N."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pyramidbench.kernels import panels
from pyramidbench.kernels.walk import build, route_reference
from pyramidbench.kernels.walk_rules import WalkRules
from pyramidbench.selection import BlockSelection
from pyramidbench.tiling import Tiling

MakeTensors = Callable[..., tuple[Tensor, Tensor, Tensor]]
DEFAULT = WalkRules(top_k=2, sink_blocks=1, local_blocks=2, beam=2, start_width=8)
PAPER = replace(
    DEFAULT, beam=1, levels="full", bound_weight=0, node_score="children", leaf_candidates=None, head_reduce="sum_lse"
)
WALKS = {
    "default": DEFAULT,
    "paper": PAPER,
    "fast": replace(DEFAULT, score_rows=4, leaf_candidates=2),
    "fastest": replace(DEFAULT, tile_reduce="mean", leaf_score="summary"),
    "flat-exact": replace(DEFAULT, levels=1, leaf_candidates=None),
    "flat-mean": replace(DEFAULT, levels=1, leaf_score="summary", bound_weight=0),
    "sub": replace(DEFAULT, leaf_score="sub", levels="full", branching=3),
    "mean-query": replace(DEFAULT, tile_reduce="mean"),
    "per-head": replace(DEFAULT, head_reduce="none", levels="full"),
    "lse": replace(DEFAULT, head_reduce="lse", branching=4, levels="full"),
}


@pytest.fixture(params=WALKS)
def rules(request: pytest.FixtureRequest) -> WalkRules:
    return WALKS[request.param]


def route(q: Tensor, k: Tensor, tiling: Tiling, rules: WalkRules) -> BlockSelection:
    scale = q.shape[-1] ** -0.5
    indices = route_reference(q, k, build(k, tiling, rules), tiling, rules, scale)
    selection = BlockSelection.from_indices(indices, tiling)
    selection.check()
    return selection


def tiling_of(queries: int, tile: int, *, keys: int | None = None, size: int = 8, causal: bool = True) -> Tiling:
    return Tiling(queries, queries if keys is None else keys, size, tile, causal)


@pytest.mark.parametrize("top_k", [0, 1, 7])
def test_query_0_keeps_block_0_and_nothing_else(tensors: MakeTensors, rules: WalkRules, top_k: int) -> None:
    q, k, _ = tensors(queries=100)
    selection = route(q, k, tiling_of(100, 1), replace(rules, top_k=top_k))
    assert (selection.counts[:, :, 0] == 1).all()
    assert (selection.indices[:, :, 0, 0] == 0).all()


@pytest.mark.parametrize("top_k", [1, 2, 3, 5, 7, 17])
@pytest.mark.parametrize("in_budget", [False, True])
def test_the_number_of_blocks_is_k_and_the_forced_ones(
    tensors: MakeTensors, rules: WalkRules, top_k: int, in_budget: bool
) -> None:
    q, k, _ = tensors(queries=150)
    rules = replace(rules, top_k=top_k, forced_in_budget=in_budget)
    selection = route(q, k, tiling_of(150, 1), rules)
    own = torch.arange(150) // 8
    forced = (own + 1).clamp(max=3)
    ranked = (top_k - forced).clamp(min=0) if in_budget else torch.tensor(top_k)
    # A walk arrives at min(K, rankable) blocks at least: each of its β·K nodes has a complete block below it.
    assert torch.equal(selection.counts[0, 0], (torch.minimum(ranked, own + 1 - forced) + forced).int())


@pytest.mark.parametrize("tile", [1, 12])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("changed", [1, 64, 77, 139])
def test_a_changed_key_leaves_earlier_rows_alone(
    tensors: MakeTensors, rules: WalkRules, tile: int, dtype: torch.dtype, changed: int
) -> None:
    q, k, _ = tensors(queries=140, dtype=dtype)
    poisoned = k.clone()
    poisoned[:, :, changed:] = 30 * torch.randn(poisoned[:, :, changed:].shape, generator=torch.manual_seed(5))
    tiling = tiling_of(140, tile)
    before = tiling.first_position(torch.arange(tiling.tiles)) < changed
    first, second = (route(q, keys, tiling, rules).mask() for keys in (k, poisoned))
    assert torch.equal(first[:, :, before], second[:, :, before])
    assert changed > 100 or not torch.equal(first, second)


@pytest.mark.parametrize("tile", [1, 16])
def test_permuting_the_heads_of_a_group_changes_no_set(tensors: MakeTensors, rules: WalkRules, tile: int) -> None:
    q, k, _ = tensors(queries=150, heads=8, kv_heads=2)
    order = torch.tensor([2, 0, 3, 1, 7, 6, 4, 5])
    first, second = (route(queries, k, tiling_of(150, tile), rules).mask() for queries in (q, q[:, order]))
    assert torch.equal(first[:, order] if rules.head_reduce == "none" else first, second)


def test_heads_of_a_group_share_a_set_unless_told_otherwise(tensors: MakeTensors, rules: WalkRules) -> None:
    q, k, _ = tensors(queries=40, batch=2, heads=6, kv_heads=2)
    assert route(q, k, tiling_of(40, 4), rules).indices.shape[:2] == (2, 6 if rules.head_reduce == "none" else 2)


@pytest.mark.parametrize("tile", [1, 16])
@pytest.mark.parametrize("causal", [True, False])
def test_forced_blocks_alone_are_a_selection(tensors: MakeTensors, rules: WalkRules, tile: int, causal: bool) -> None:
    q, k, _ = tensors(queries=130)
    tiling = tiling_of(130, tile, causal=causal)
    rules = replace(rules, top_k=0, sink_blocks=2, local_blocks=2 * causal)
    listed = tiling.forced(torch.arange(tiling.tiles), rules.sink_blocks, rules.local_blocks).list()
    assert torch.equal(route(q, k, tiling, rules).indices[0, 0], listed.int())


def test_a_level_of_forced_nodes_still_opens(tensors: MakeTensors, rules: WalkRules) -> None:
    """At the root every node holds a forced block; the walk goes on below it and finds the K best blocks."""
    q, k, _ = tensors(queries=128)
    selection = route(q, k, tiling_of(128, 1), replace(rules, top_k=3, levels="full", sink_blocks=0, local_blocks=1))
    assert (selection.counts[..., 64:] == 4).all()


@pytest.mark.parametrize("queries", [1, 40, 100])
@pytest.mark.parametrize("tile", [1, 16])
@pytest.mark.parametrize("causal", [True, False])
def test_a_full_budget_lists_every_visible_block(
    tensors: MakeTensors, rules: WalkRules, queries: int, tile: int, causal: bool
) -> None:
    q, k, _ = tensors(queries=queries, keys=100)
    tiling = tiling_of(queries, tile, keys=100, causal=causal)
    local = rules.local_blocks * causal
    selection = route(q, k, tiling, replace(rules, top_k=16, local_blocks=local))
    assert selection.density() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tile", [1, 16])
def test_equal_keys_tie_to_the_first_blocks(
    tensors: MakeTensors, rules: WalkRules, dtype: torch.dtype, tile: int
) -> None:
    q, k, _ = tensors(queries=160, dim=16, dtype=dtype)
    # Numbers of few bits and one scored row a tile, so that no order of summation can round two equal scores apart.
    q, k = (4 * q).round(), torch.full_like(k, 0.5)
    selection = route(q, k, tiling_of(160, tile), replace(rules, score_rows=1))
    for number, row in enumerate(selection.indices[0, 0].tolist()):
        own = number * tile // 8
        forced = {0, *range(max(0, own - 1), (min((number + 1) * tile, 160) - 1) // 8 + 1)}
        ranked = [block for block in range(own) if block not in forced][:2]
        assert [block for block in row if block >= 0] == sorted({*forced, *ranked})


def test_a_score_that_is_nan_ranks_last(tensors: MakeTensors, rules: WalkRules) -> None:
    q, k, _ = tensors(queries=120)
    k[:, :, 21] = torch.nan
    selection = route(q, k, tiling_of(120, 1), replace(rules, levels=1))
    assert not selection.mask()[0, :, 60:, 21 // 8].any()
    assert (selection.counts[..., 60:] == 5).all()


class LargestTensor(TorchDispatchMode):
    """Notes the most elements that any operation's result holds in memory of its own."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.elements = max(self.elements, leaf.untyped_storage().nbytes() // leaf.itemsize)
        return result


def largest_tensor(tensors: MakeTensors, length: int, tile: int, rules: WalkRules) -> int:
    q, k, _ = tensors(queries=length, heads=1, dim=4, dtype=torch.float32)
    tiling = Tiling(length, length, 16, tile, True)
    seen = LargestTensor()
    with seen:
        route_reference(q, k, build(k, tiling, rules), tiling, rules, 0.5)
    return seen.elements


@pytest.mark.parametrize("tile", [1, 64])
@pytest.mark.parametrize("name", ["default", "paper", "flat-mean"])
def test_memory_grows_with_n_and_not_with_n_times_blocks(
    tensors: MakeTensors, monkeypatch: pytest.MonkeyPatch, name: str, tile: int
) -> None:
    """16k tokens are 1024 blocks: a matrix of N × blocks would have 16 777 216 elements, one of N × N 16 times more.

    At token level a panel's queries share one gather; at worst they agree on no node, and a chunk grows by their number.
    """
    monkeypatch.setattr(panels, "CHUNK_ELEMENTS", 1 << 16)
    lengths = (2048, 4096) if tile == 1 and name == "flat-mean" else (8192, 16384)
    small, large = (largest_tensor(tensors, length, tile, WALKS[name]) for length in lengths)
    assert large <= 2.1 * small
    assert large <= (1 << 16) * (panels.PANEL_QUERIES if tile == 1 else 8) + 16 * lengths[1]
