"""A budget's K: nearest planned density for a sparsity, whole blocks for a keep."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyramidbench.axes import parse_keep
from pyramidbench.budget import Budget
from pyramidbench.cell import Cell
from pyramidbench.cost import planned_blocks
from pyramidbench.method import BlockMethod
from pyramidbench.problem import Problem


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
