"""The walk against its definition, and against flat Top-K where the two must agree."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pyramidbench.kernels import panels
from pyramidbench.kernels.walk import build, route_reference
from pyramidbench.kernels.walk_rules import WalkRules
from pyramidbench.selection import BlockSelection
from pyramidbench.tiling import Tiling

MakeTensors = Callable[..., tuple[Tensor, Tensor, Tensor]]
SAME_SCORES = 1e-9
"""Two float64 scores closer than this (relative) may be ordered either way: a near-tie."""


def route(q: Tensor, k: Tensor, tiling: Tiling, rules: WalkRules, scale: float = 1.0) -> Tensor:
    return route_reference(q, k, build(k, tiling, rules), tiling, rules, scale)


def lists_of(indices: Tensor) -> list[list[list[list[int]]]]:
    return [[[[j for j in row if j >= 0] for row in one] for one in batch] for batch in indices.tolist()]


def one_of(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


RULES = st.builds(
    WalkRules,
    top_k=one_of(0, 1, 2, 3, 4),
    sink_blocks=one_of(0, 1, 2),
    local_blocks=one_of(1, 2, 3),
    forced_in_budget=one_of(False, False, True),
    branching=one_of(2, 3, 4),
    levels=one_of("auto", "full", "full", 1, 2, 3),
    start_width=one_of(1, 4, 8),
    beam=one_of(1, 1.5, 2),
    bound_weight=one_of("auto", 0, 0.3, 1),
    leaf_candidates=one_of(None, 1, 2, 3),
    node_score=one_of("summary", "children"),
    leaf_score=one_of("exact", "sub", "summary"),
    sub_blocks=one_of(1, 2, 4),
    head_reduce=one_of("sum_prob", "sum_lse", "lse", "none"),
    tile_reduce=one_of("lse", "lse", "mean"),
    score_rows=one_of(None, 1, 3),
)
TILINGS = st.builds(
    Tiling,
    seq_len_q=st.integers(1, 120),
    seq_len_kv=st.integers(1, 120),
    block_size=one_of(1, 4, 5),
    query_tile=one_of(1, 4, 16),
    causal=one_of(True, True, False),
)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(rules=RULES, tiling=TILINGS, square=st.booleans(), scale=one_of(0.5, 3.0), seed=st.integers(0, 99))
def test_the_walk_finds_the_sets_of_the_definition(
    tensors: MakeTensors,
    walk_by_definition: Callable[..., Any],
    rules: WalkRules,
    tiling: Tiling,
    square: bool,
    scale: float,
    seed: int,
) -> None:
    if square:
        tiling = dataclasses.replace(tiling, seq_len_q=tiling.seq_len_kv)
    if not tiling.causal:
        rules = dataclasses.replace(rules, local_blocks=0)
    q, k, _ = tensors(queries=tiling.seq_len_q, keys=tiling.seq_len_kv, heads=4, kv_heads=2, dim=4, seed=seed)
    expected = walk_by_definition(q, k, tiling, rules, scale)
    assume(expected.gap > SAME_SCORES)
    indices = route(q, k, tiling, rules, scale)
    assert lists_of(indices) == expected.lists
    BlockSelection.from_indices(indices, tiling).check()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("leaf_score", ["exact", "sub"])
def test_the_last_query_sees_the_ragged_end_of_its_own_block(
    tensors: MakeTensors, walk_by_definition: Callable[..., Any], leaf_score: Literal["exact", "sub"], seed: int
) -> None:
    """Its 7 keys in parts of 2: the last part holds one key, which is visible though the part is not full."""
    tiling = Tiling(1, 87, 8, 1, True)
    rules = WalkRules(2, 0, 1, levels=1, leaf_candidates=None, leaf_score=leaf_score)
    q, k, _ = tensors(queries=1, keys=87, heads=4, dim=4, seed=seed)
    k[:, :, 86] *= 3
    assert lists_of(route(q, k, tiling, rules, 2.0)) == walk_by_definition(q, k, tiling, rules, 2.0).lists


def scored_rows(tiling: Tiling, tile: int, count: int | None) -> list[int]:
    held = min(tiling.query_tile, tiling.seq_len_q - tile * tiling.query_tile)
    used = min(count or held, held)
    return [tile * tiling.query_tile + (2 * step + 1) * held // (2 * used) for step in range(used)]


def block_log_mass(logits: Tensor, k: Tensor, q: Tensor, tiling: Tiling, how: str, last_key: Tensor) -> Tensor:
    """Score of every block for every row, [G, R, blocks], of the keys up to `last_key`; logits: [G, R, N]."""
    size, scores = tiling.block_size, []
    for start in range(0, tiling.seq_len_kv, size):
        stop = min(start + size, tiling.seq_len_kv)
        if how == "exact":
            key = torch.arange(start, stop)
            scores.append(logits[..., start:stop].masked_fill(key > last_key, -torch.inf).logsumexp(-1))
        elif how == "summary":
            scores.append(q @ k[start:stop].mean(0) + torch.tensor(stop - start).log())
        else:
            runs = [(x, min(x + size // 4, stop)) for x in range(start, stop, size // 4)]
            seen = [(x, y) for x, y in runs if y - 1 <= last_key] or [(0, 0)]
            terms = [q @ k[x:y].mean(0) + torch.tensor(float(y - x)).log() for x, y in seen]
            scores.append(torch.stack(terms).nan_to_num(-torch.inf).logsumexp(0))
    return torch.stack(scores, dim=-1)


def flat_top_k(q: Tensor, k: Tensor, tiling: Tiling, rules: WalkRules, tile: int) -> list[int]:
    """Flat Top-K of one tile by brute force: every block is scored. q: [G, M, D], k: [N, D]."""
    own = range(tile * tiling.query_tile, min((tile + 1) * tiling.query_tile, tiling.seq_len_q))
    first, last = own[0] + tiling.offset, own[-1] + tiling.offset
    near = range(max(0, first // tiling.block_size - rules.local_blocks + 1), last // tiling.block_size + 1)
    forced = {*range(min(rules.sink_blocks, last // tiling.block_size + 1)), *near} if tiling.causal else set()
    eligible = [b for b in range(tiling.blocks) if b not in forced]
    if tiling.causal:
        eligible = [b for b in eligible if min((b + 1) * tiling.block_size, tiling.seq_len_kv) <= first + 1]
    if rules.tile_reduce == "mean":
        rows = q[:, list(own)].mean(1, keepdim=True)
    else:
        rows = q[:, scored_rows(tiling, tile, rules.score_rows)]
    everything = torch.tensor(tiling.seq_len_kv)
    mass = block_log_mass(rows @ k.T, k, rows, tiling, rules.leaf_score, everything)
    if rules.leaf_score != "summary" and rules.head_reduce == "sum_prob":
        seen = block_log_mass(
            rows @ k.T, k, rows, tiling, rules.leaf_score, torch.tensor(first) if tiling.causal else everything
        )
        whole = torch.cat([mass[..., eligible], seen[..., sorted(forced)]], -1).logsumexp(-1, keepdim=True)
        score = (mass - whole).exp().sum((0, 1))
    elif rules.leaf_score != "summary" and rules.head_reduce in ("lse", "none"):
        score = mass.logsumexp((0, 1))
    else:
        score = mass.logsumexp(1).sum(0)
    best = sorted(eligible, key=lambda b: (-float(score[b]), b))[: rules.top_k]
    return sorted({*best, *forced})


@pytest.mark.parametrize("shape", ["tile16-causal", "tile1-causal", "tile16-full", "tile16-longer-keys", "ragged-tile"])
@pytest.mark.parametrize("head_reduce", ["sum_prob", "sum_lse", "lse", "none"])
@pytest.mark.parametrize(
    ("leaf_score", "tile_reduce", "score_rows"),
    [("exact", "lse", None), ("exact", "lse", 3), ("exact", "mean", None), ("sub", "lse", None), ("summary", "lse", 5)],
)
def test_one_level_without_prefilter_is_flat_top_k(
    tensors: MakeTensors,
    shape: str,
    leaf_score: Literal["exact", "sub", "summary"],
    head_reduce: Literal["sum_prob", "sum_lse", "lse", "none"],
    tile_reduce: Literal["lse", "mean"],
    score_rows: int | None,
) -> None:
    tiling = {
        "tile16-causal": Tiling(125, 125, 8, 16, True),
        "tile1-causal": Tiling(70, 70, 8, 1, True),
        "tile16-full": Tiling(125, 125, 8, 16, False),
        "tile16-longer-keys": Tiling(40, 150, 8, 16, True),
        "ragged-tile": Tiling(101, 101, 8, 12, True),
    }[shape]
    rules = WalkRules(
        top_k=3,
        sink_blocks=int(tiling.causal),
        local_blocks=2 * int(tiling.causal),
        levels=1,
        bound_weight=0,
        leaf_candidates=None,
        leaf_score=leaf_score,
        head_reduce=head_reduce,
        tile_reduce=tile_reduce,
        score_rows=score_rows,
    )
    q, k, _ = tensors(queries=tiling.seq_len_q, keys=tiling.seq_len_kv, heads=3, kv_heads=1, seed=3)
    found = lists_of(route(q, k, tiling, rules))[0]
    groups = [q[0, h : h + 1] for h in range(3)] if head_reduce == "none" else [q[0]]
    assert len(found) == len(groups)
    for lists, group in zip(found, groups, strict=True):
        assert lists == [flat_top_k(group, k[0, 0], tiling, rules, tile) for tile in range(tiling.tiles)]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(rules=RULES, tiling=TILINGS, seed=st.integers(0, 99))
def test_a_beam_that_drops_nothing_equals_flat(
    tensors: MakeTensors, rules: WalkRules, tiling: Tiling, seed: int
) -> None:
    local = rules.local_blocks if tiling.causal else 0
    wide = dataclasses.replace(rules, top_k=max(1, rules.top_k), beam=200, leaf_candidates=None, local_blocks=local)
    q, k, _ = tensors(queries=tiling.seq_len_q, keys=tiling.seq_len_kv, heads=2, dim=4, seed=seed)
    flat = dataclasses.replace(wide, levels=1)
    assert lists_of(route(q, k, tiling, wide)) == lists_of(route(q, k, tiling, flat))


@pytest.mark.parametrize("levels", [1, "full"])
def test_chunks_do_not_change_the_sets(
    tensors: MakeTensors, monkeypatch: pytest.MonkeyPatch, levels: Literal["full"] | int
) -> None:
    tiling, rules = Tiling(300, 300, 4, 1, True), WalkRules(3, 1, 2, levels=levels)
    q, k, _ = tensors(queries=300)
    at_once = route(q, k, tiling, rules)
    monkeypatch.setattr(panels, "CHUNK_ELEMENTS", 1000)
    assert torch.equal(route(q, k, tiling, rules), at_once)
