"""A budget's K: nearest planned density for a sparsity, whole blocks for a keep."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyramidbench.axes import parse_keep
from pyramidbench.budget import Budget, reached
from pyramidbench.cell import Cell
from pyramidbench.cost import planned_blocks
from pyramidbench.grid import Grid
from pyramidbench.method import BlockMethod
from pyramidbench.outcome import Settings
from pyramidbench.problem import Problem
from pyramidbench.registry import create
from pyramidbench.runner import Runner
from pyramidbench.suite import Suite


def sized(**parameters: object) -> tuple[BlockMethod, Problem]:
    """A flat method and a causal problem of 2048 tokens: 32 blocks of 64."""
    cell = Cell(method="flat", parameters=parameters, seq_len=2048, seq_len_kv=2048)
    method = cell.make_method()
    assert isinstance(method, BlockMethod)
    return method, cell.problem("cpu")


def density(method: BlockMethod, problem: Problem, top_k: int) -> float:
    tiling = method.tiling(problem)
    planned = planned_blocks(
        tiling, top_k, method.sinks(problem), method.locals(problem), forced_in_budget=method.forced_in_budget
    )
    return planned.pairs / tiling.visible_pairs()


@settings(deadline=None, derandomize=True, max_examples=40)
@given(st.floats(0, 1, exclude_max=True), st.sampled_from([1, 64]), st.booleans())
def test_no_other_k_is_nearer_to_the_sparsity(sparsity: float, query_tile: int, forced_in_budget: bool) -> None:
    method, problem = sized(query_tile=query_tile, forced_in_budget=forced_in_budget)
    top_k = Budget(sparsity).top_k(method, problem)
    distances = [abs(density(method, problem, other) - (1 - sparsity)) for other in range(33)]
    assert distances[top_k] == min(distances)
    assert distances.index(min(distances)) == top_k


def test_a_sparsity_beyond_the_forced_blocks_keeps_none_by_rank() -> None:
    method, problem = sized()
    assert density(method, problem, 0) > 0.01
    assert Budget(0.99).top_k(method, problem) == 0


def test_no_sparsity_keeps_every_block() -> None:
    method, problem = sized()
    top_k = Budget(0.0).top_k(method, problem)
    assert density(method, problem, top_k) == 1
    assert density(method, problem, top_k - 1) < 1


@pytest.mark.parametrize(
    ("budget", "top_k", "text"),
    [
        (Budget(8), 8, "top_k=8"),
        (Budget(parse_keep("512tok")), 8, "keep=512tok"),
        (Budget(parse_keep("12blk")), 12, "keep=12blk"),
        (Budget(parse_keep("25%")), 8, "keep=25%"),
        (Budget(parse_keep("0.5%")), 1, "keep=0.5%"),
        (Budget(0.9), 0, "sparsity=0.9"),
    ],
)
def test_a_budget_keeps_the_text_that_it_was_asked_in(budget: Budget, top_k: int, text: str) -> None:
    method, problem = sized()
    assert budget.text == text
    assert budget.top_k(method, problem) == top_k


@pytest.mark.parametrize(
    ("asked", "set_to", "reached_to"),
    [
        ("top_k=4", "top_k=4", "top_k=3.438"),
        ("sparsity=0.5", "top_k=7", "sparsity=0.4939"),
        ("keep=128tok", "top_k=2", "keep=114tok"),
        ("keep=3blk", "top_k=3", "keep=2.625blk"),
        ("keep=25%", "top_k=8", "keep=19.92%"),
    ],
)
def test_a_row_says_what_was_asked_what_was_set_and_what_came_out(
    asked: str, set_to: str, reached_to: str, tmp_path: Path
) -> None:
    """32 tiles of 64 queries see 0 to 31 blocks besides the first and the last two."""
    name, _, amount = asked.partition("=")
    grid = Grid.model_validate(
        {"seq": 2048, "methods": ["sliding_window"], "input": ["normal"], "timed": False, name: [amount]}
    )
    (cell,) = Suite(name="test", grid=(grid,)).cells()
    record = Runner(Settings("cpu", "a CPU", tmp_path, 0.01, 1)).measure(cell)
    assert (record.budget, record.budget_set, record.budget_reached) == (asked, set_to, reached_to)
    tiles = range(32)
    ranked = [min(int(set_to.partition("=")[2]), max(0, tile - 2)) for tile in tiles]
    assert record.selected_blocks == pytest.approx(sum(ranked) / 32 + sum(min(3, tile + 1) for tile in tiles) / 32)


def test_k_that_counts_the_forced_blocks_is_reached_with_them() -> None:
    for in_budget, expected in ((True, "top_k=4.688"), (False, "top_k=4.219")):
        method, problem = sized(top_k=5, forced_in_budget=in_budget)
        q, k = (torch.randn(1, 1, 2048, 64, generator=torch.Generator().manual_seed(0)) for _ in "qk")
        assert reached("top_k=5", method, problem, method.select(q, k, problem)) == expected


def reached_by(cell: Cell) -> str | None:
    problem, method = cell.problem("cpu"), cell.make_method()
    shape = (1, cell.heads, cell.seq_len, cell.head_dim)
    q, k = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) for _ in "qk")
    return reached(cell.budget, method, problem, method.select(q, k, problem))


ONE_HEAD: dict[str, object] = {"seq": 1024, "heads": ["1:1"], "head_dim": [16], "block_size": [64], "query_tile": [1]}


@pytest.mark.parametrize(("name", "value"), [("top_k", "4"), ("keep", "256tok"), ("keep", "4blk")])
@pytest.mark.parametrize("method", ["moba", "fla_moba"])
def test_a_rule_with_a_count_of_its_own_reaches_what_the_others_reach(method: str, name: str, value: str) -> None:
    grid = Grid.model_validate({**ONE_HEAD, "methods": [method, "flat"], name: [value]})
    one, other = (reached_by(cell) for cell in Suite(name="test", grid=(grid,)).cells())
    assert one == other
    assert (one or "").startswith(f"{name}=")


def test_its_own_k_is_reached_in_its_own_count() -> None:
    """The queries of each of 16 blocks see 1 to 16 of them, and K 3 counts the own one."""
    grid = Grid.model_validate({**ONE_HEAD, "methods": [{"method": "moba", "top_k": 3}]})
    (cell,) = Suite(name="test", grid=(grid,)).cells()
    assert reached_by(cell) == f"top_k={(1 + 2 + 14 * 3) / 16:.4g}"


def test_nothing_is_reached_where_nothing_was_asked_or_chosen() -> None:
    method, problem = sized()
    assert reached(None, method, problem, None) is None
    assert reached("top_k=4", create("dense"), problem, None) is None
