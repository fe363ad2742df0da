"""MoBA by hand: blocks of 2 keys, means 2, 0, 0 and 2."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pyramidbench.cost import planned_blocks
from pyramidbench.problem import Problem
from pyramidbench.registry import create
from pyramidbench.suite import suite_from_flags

KEYS = [[[1.0], [3.0], [0.0], [0.0], [5.0], [-5.0], [2.0], [2.0]]]


def test_k_counts_the_own_block_and_each_head_goes_its_own_way(kept: Callable[..., list[list[list[int]]]]) -> None:
    # Head 0 asks 1: logits are the means 2, 0, 0. Head 1 asks -1: -2, 0, 0; of the equal blocks 1 and 2 the lower wins.
    likes, dislikes = kept("moba", [[[1.0]] * 8, [[-1.0]] * 8], KEYS, block_size=2, top_k=2)
    assert likes == [[0], [0], [0, 1], [0, 1], [0, 2], [0, 2], [0, 3], [0, 3]]
    assert dislikes == [[0], [0], [0, 1], [0, 1], [1, 2], [1, 2], [1, 3], [1, 3]]


def test_with_k_1_there_is_the_own_block_alone(kept: Callable[..., list[list[list[int]]]]) -> None:
    (rows,) = kept("moba", [[[1.0]] * 8], KEYS, block_size=2, top_k=1)
    assert rows == [[0], [0], [1], [1], [2], [2], [3], [3]]


@pytest.mark.parametrize(("tile", "forced"), [(1, 3), (64, 3), (128, 4)])
@pytest.mark.parametrize("budget", [{"top_k": "8"}, {"keep": "512tok"}], ids=["top-k", "keep"])
def test_a_sweep_gives_it_as_many_keys_as_the_others(budget: dict[str, str], tile: int, forced: int) -> None:
    """Others keep 8 blocks beside the sink and two local ones (three, where a tile overlaps two blocks)."""
    suite = suite_from_flags(seq="4k", method=["moba,flat"], block_size="64", query_tile=str(tile), **budget)
    (one, other) = (cell.make_method() for cell in suite.cells())
    problem = Problem(1, 1, 1, 4096, 4096, 64, 64, "float32", True, 0.125)
    assert (one.top_k, one.shared_top_k(problem)) == (8 + forced, 8)
    assert (other.top_k, other.shared_top_k(problem)) == (8, 8)
    assert one.planned(problem).listed == other.planned(problem).listed
    tiling = other.tiling(problem)
    assert other.planned(problem) == planned_blocks(tiling, 8, 1, 2)


def test_its_own_k_stays_where_it_is_given() -> None:
    (cell,) = suite_from_flags(seq="4k", method=["moba"], sparsity="0.9").cells()
    method = cell.make_method()
    planned = method.planned(cell.problem("cpu")).pairs / method.tiling(cell.problem("cpu")).visible_pairs()
    assert planned == pytest.approx(0.1, abs=0.01)
    assert create("moba", {"top_k": 3, "forced_in_budget": False}).own_top_k(5, cell.problem("cpu")) == 5
