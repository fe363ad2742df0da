"""The tally counts what was listed, all at once and without waiting for each call."""

from __future__ import annotations

import pytest
import torch

from pyramidbench import usage
from pyramidbench.problem import Problem
from pyramidbench.registry import create
from pyramidbench.selection import BlockSelection
from pyramidbench.usage import Tally, Usage


def chosen(queries: int, keys: int, top_k: int) -> BlockSelection:
    generator = torch.Generator().manual_seed(queries + keys + top_k)
    q = torch.randn(2, 4, queries, 16, generator=generator)
    k = torch.randn(2, 2, keys, 16, generator=generator)
    method = create("flat", {"top_k": top_k, "block_size": 16, "query_tile": 16})
    selection = method.select(q, k, Problem.of(q, k, k, causal=True, scale=None))
    assert selection is not None
    return selection


def test_counts_are_those_of_the_lists() -> None:
    tally, selections = Tally(), [chosen(96, 96, 1), chosen(96, 96, 1), chosen(1, 90, 2), chosen(30, 96, 64)]
    for selection in selections:
        tally.sparse(selection, "reference")
    tally.dense("sdpa-flash")
    found = tally.read()
    assert (found.sparse_calls, found.dense_calls) == (4, 1)
    assert found.queries == 2 * (96 + 96 + 1 + 30)
    # Tiles 4 and 5 of 96 queries: sink and two local blocks, one by rank, of five or six.
    assert found.queries_with_choice == 2 * (2 * 32 + 1)
    assert found.tiles_with_choice == 2 * (2 * 2 + 1)
    assert found.pairs == pytest.approx(sum(2 * float(one.pairs().double().mean()) for one in selections))
    assert found.visible_pairs == sum(2 * one.tiling.visible_pairs() for one in selections)
    assert found.backends == ("reference", "sdpa-flash")
    assert tally.read() == found


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    selection = chosen(96, 96, 1)
    monkeypatch.setattr(usage, "MOST_HELD_ELEMENTS", 2 * selection.indices.numel())
    tally = Tally()
    for calls in range(1, 6):
        tally.sparse(selection, "triton")
        assert sum(map(len, tally.held.values())) == calls % 2
    assert tally.read().queries_with_choice == 5 * 2 * 32


def test_sums_and_differences() -> None:
    one = Usage(sparse_calls=1, queries=8, queries_with_choice=4, pairs=2.0, visible_pairs=4.0, backends=("triton",))
    assert (one + one).queries == 16
    assert (one + one - one) == one
    assert (one.choice_share, one.density) == (0.5, 0.5)
    assert (Usage().choice_share, Usage().density) == (None, None)
