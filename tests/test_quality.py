"""Quality columns, on small examples whose numbers can be worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pyramidbench.method import BlockMethod, Method
from pyramidbench.oracle import ExactRows, exact_rows
from pyramidbench.problem import Problem
from pyramidbench.quality import Quality, measure_quality
from pyramidbench.registry import create
from pyramidbench.selection import BlockSelection
from pyramidbench.tiling import Tiling


def problem(*, length: int, causal: bool, heads: int = 1, kv_heads: int = 1) -> Problem:
    return Problem(1, heads, kv_heads, length, length, 4, 4, "float32", causal, 0.5)


def judge(
    method: BlockMethod,
    of: Problem,
    lists: list[list[list[int]]],
    mass: list[list[list[float]]],
    tiles: tuple[int, ...],
    *,
    output: Tensor | None = None,
    exact: Tensor | None = None,
) -> Quality:
    """lists: [sets][tiles of the problem][S]; mass: [heads][judged tiles][blocks]. Outputs are 1 unless given."""
    tiling = method.tiling(of)
    selection = BlockSelection.from_indices(torch.tensor([lists]), tiling)
    exact = torch.ones(1, of.heads, len(tiles), tiling.query_tile, 4) if exact is None else exact
    output = torch.ones(1, of.heads, of.seq_len_q, 4) if output is None else output
    rows = ExactRows(torch.tensor([mass]), exact)
    return measure_quality(output, selection, method, of, tiling, rows, torch.tensor(tiles))


PLAIN = BlockMethod(top_k=2, block_size=2, query_tile=4)
"""Without causality there are no forced blocks: 8 keys are 4 blocks, 8 queries are 2 tiles."""


def test_recall_mass_and_ratio_by_hand() -> None:
    mass = [[[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]]]
    found = judge(PLAIN, problem(length=8, causal=False), [[[0, 2], [2, 3]]], mass, (0, 1))
    assert found.recall == pytest.approx((0.5 + 1) / 2)
    assert found.recall_p5 == pytest.approx(0.5)
    assert found.recall_with_forced == pytest.approx(0.75)
    assert found.mass_kept == pytest.approx((0.6 + 0.7) / 2)
    assert found.mass_kept_p5 == pytest.approx(0.6)
    assert found.mass_ratio == pytest.approx((0.6 / 0.7 + 1) / 2)
    assert found.mass_ratio_p5 == pytest.approx(0.6 / 0.7)
    assert found.mass_outside_forced == pytest.approx(0.65)
    assert found.trivial_share == 0
    assert found.sampled_tiles == 2


def test_a_tie_with_the_last_of_exact_top_k_is_no_miss() -> None:
    mass = [[[0.4, 0.2, 0.2, 0.2], [0.25, 0.25, 0.25, 0.25]]]
    found = judge(PLAIN, problem(length=8, causal=False), [[[0, 3], [1, 2]]], mass, (0, 1))
    assert found.recall == 1
    assert found.mass_ratio == pytest.approx(1)


def test_more_blocks_at_the_tie_do_not_make_recall_exceed_1() -> None:
    mass = [[[0.25, 0.25, 0.25, 0.25]]]
    found = judge(PLAIN, problem(length=8, causal=False), [[[0, 1, 2], [0, 1, -1]]], mass, (0,))
    assert found.recall == 1


FORCED = BlockMethod(top_k=2, block_size=1, query_tile=1, sink_blocks=1, local_blocks=1)
"""Query p is forced to keep blocks 0 and p, and ranks the others before p."""
LISTS = [[[0, -1, -1, -1], [0, 1, -1, -1], [0, 1, 2, -1], [0, 1, 2, 3]] + 3 * [[0, 1, 2, 4]] + [[0, 2, 4, 7]]]
LAST = [0.3, 0.05, 0.2, 0.1, 0.05, 0.05, 0.05, 0.2]
"""Query 7 ranks blocks 1 to 6, of which 2 and 3 are the best; its list has 2 and 4."""


def test_forced_blocks_are_left_out_of_recall_on_both_sides() -> None:
    found = judge(FORCED, problem(length=8, causal=True), LISTS, [[LAST]], (7,))
    assert found.recall == pytest.approx(0.5)
    assert found.recall_with_forced == pytest.approx((1 + 2) / 4)
    assert found.mass_kept == pytest.approx(0.3 + 0.2 + 0.05 + 0.2)
    assert found.mass_ratio == pytest.approx(0.75 / 0.8)
    assert found.mass_outside_forced == pytest.approx(0.25 / 0.5)


def test_a_query_with_nothing_to_choose_is_left_out_and_counted() -> None:
    trivial = [0.5, 0.3, 0.2, 0, 0, 0, 0, 0]
    found = judge(FORCED, problem(length=8, causal=True), LISTS, [[trivial, LAST]], (2, 7))
    assert found.trivial_share == 0.5
    assert found.recall == pytest.approx(0.5)
    assert found.mass_ratio == pytest.approx(0.75 / 0.8)
    assert found.mass_outside_forced == pytest.approx(0.5)
    assert found.mass_kept == pytest.approx((1 + 0.75) / 2)


class Adaptive(BlockMethod):
    """Chooses how many blocks each tile keeps."""

    adaptive = True


def test_a_method_that_chooses_its_own_budget_is_compared_with_as_many_blocks() -> None:
    """Query 5 keeps one of the blocks 1 to 4, the second best of them; query 7 keeps 2, 3 and 4 of 1 to 6, where 1 or 5 or 6
    is as good as 4. K is 2, and has no part in it."""
    fifth = [0.1, 0.2, 0.3, 0.1, 0.1, 0.2, 0.0, 0.0]
    lists = [[[0, -1, -1, -1, -1]] * 5 + [[0, 1, 5, -1, -1]] + [[0, 6, -1, -1, -1]] + [[0, 2, 3, 4, 7]]]
    method = Adaptive(top_k=2, block_size=1, query_tile=1, sink_blocks=1, local_blocks=1)
    found = judge(method, problem(length=8, causal=True), lists, [[fifth, LAST]], (5, 7))
    assert found.recall == pytest.approx((0 + 1) / 2)
    assert found.mass_ratio == pytest.approx((0.5 / 0.6 + 1) / 2)
    assert found.mass_outside_forced == pytest.approx((0.2 + 0.35) / (0.7 + 0.5))
    assert found.trivial_share == 0


def test_a_tile_that_kept_all_by_its_own_choice_is_trivial_and_one_that_kept_none_has_no_recall() -> None:
    method = Adaptive(top_k=2, block_size=1, query_tile=1, sink_blocks=1, local_blocks=1)
    lists = [[[0, -1, -1, -1]] * 3 + [[0, 1, 2, 3]] + [[0, 4, -1, -1]] * 4]
    mass = [[0.25, 0.25, 0.25, 0.25, 0.0, 0.0, 0.0, 0.0], [0.2, 0.2, 0.2, 0.2, 0.2, 0.0, 0.0, 0.0]]
    found = judge(method, problem(length=8, causal=True), lists, [mass], (3, 4))
    assert found.trivial_share == 0.5
    assert found.recall is None
    assert found.mass_kept == pytest.approx((1 + 0.4) / 2)


def test_where_every_tile_is_trivial_recall_is_unknown_and_not_1() -> None:
    found = judge(FORCED, problem(length=8, causal=True), LISTS, [[[0.5, 0.3, 0.2, 0, 0, 0, 0, 0]]], (2,))
    assert (found.recall, found.recall_p5, found.recall_worst_head, found.recall_with_forced) == (None,) * 4
    assert (found.mass_ratio, found.mass_ratio_p5, found.mass_outside_forced) == (None,) * 3
    assert found.recall_by_head == [None]
    assert found.trivial_share == 1
    assert found.mass_kept == pytest.approx(1)


def test_without_a_ranked_block_recall_is_unknown() -> None:
    method = replace(FORCED, top_k=0)
    found = judge(method, problem(length=8, causal=True), [8 * [[0, -1]]], [[LAST]], (7,))
    assert found.recall is None
    assert found.mass_kept == pytest.approx(0.3)
    assert found.trivial_share == 0


def test_forced_blocks_may_count_in_the_budget() -> None:
    method = replace(FORCED, top_k=3, forced_in_budget=True)
    found = judge(method, problem(length=8, causal=True), [8 * [[0, 3, 7]]], [[LAST]], (7,))
    assert found.recall == 0
    assert found.mass_ratio == pytest.approx(0.6 / 0.7)


TWO_HEADS = [[[0.4, 0.3, 0.2, 0.1]], [[0.1, 0.2, 0.3, 0.4]]]


def test_heads_that_share_a_set_are_judged_by_their_mean_mass() -> None:
    mass = [[[0.5, 0.3, 0.2, 0.0]], [[0.1, 0.3, 0.2, 0.4]]]
    found = judge(PLAIN, problem(length=8, causal=False, heads=2), [2 * [[0, 1]]], mass, (0,))
    assert found.mass_kept == pytest.approx(0.6)
    assert found.recall == 1
    assert found.recall_by_head == [1.0]


def test_heads_with_sets_of_their_own_are_judged_apart() -> None:
    found = judge(PLAIN, problem(length=8, causal=False, heads=2), [2 * [[0, 1]], 2 * [[0, 3]]], TWO_HEADS, (0,))
    assert found.recall_by_head == [1.0, 0.5]
    assert found.recall_worst_head == 0.5
    assert found.mass_kept_by_head == pytest.approx([0.7, 0.5])
    assert found.mass_kept_worst_head == pytest.approx(0.5)
    assert found.mass_kept == pytest.approx(0.6)


def test_output_error_is_relative_and_per_tile() -> None:
    exact = torch.ones(1, 1, 2, 4, 4)
    output = torch.ones(1, 1, 8, 4)
    output[:, :, 4:] = 1.5
    mass = [[[0.25] * 4] * 2]
    found = judge(
        PLAIN, problem(length=8, causal=False), [2 * [[0, 1]]], mass, (0, 1), output=output, exact=exact
    )  # fmt: skip
    assert found.output_error == pytest.approx(0.25)
    assert found.output_error_p95 == pytest.approx(0.5)
    assert found.output_error_worst_head == pytest.approx(0.25)


def test_rows_that_a_ragged_tile_lacks_do_not_count() -> None:
    exact = torch.ones(1, 1, 1, 4, 4)
    exact[:, :, :, 2:] = torch.nan
    output = torch.ones(1, 1, 6, 4)
    output[:, :, 4] = 2
    found = judge(
        PLAIN, problem(length=6, causal=False), [2 * [[0, 1]]], [[[0.5, 0.25, 0.25]]], (1,), output=output, exact=exact
    )  # fmt: skip
    assert found.output_error == pytest.approx((4 / 8) ** 0.5)


def test_where_exact_and_output_are_0_the_error_is_0() -> None:
    zeros = torch.zeros(1, 1, 2, 4, 4)
    output = torch.zeros(1, 1, 8, 4)
    mass = [[[0.25] * 4] * 2]
    found = judge(
        PLAIN, problem(length=8, causal=False), [2 * [[0, 1]]], mass, (0, 1), output=output, exact=zeros
    )  # fmt: skip
    assert found.output_error == 0


def run(method: Method, tensors: tuple[Tensor, Tensor, Tensor], *, dense: bool = False) -> Quality:
    """Quality of a real call on all tiles; `dense` puts the dense output in the place of the method's own."""
    q, k, v = tensors
    of = Problem.of(q, k, v, causal=True, scale=None)
    tiling = method.tiling(of) if isinstance(method, BlockMethod) else Tiling(of.seq_len_q, of.seq_len_kv, 16, 16, True)
    tiles = torch.arange(tiling.tiles)
    selection = method.select(q, k, of)
    output = (create("dense") if dense else method).attend(q, k, v, None if dense else selection, of)
    return measure_quality(output, selection, method, of, tiling, exact_rows(q, k, v, tiling, of.scale, tiles), tiles)


@pytest.mark.parametrize("tile", [1, 16])
def test_exact_top_k_keeps_what_exact_top_k_keeps(
    tensors: Callable[..., tuple[Tensor, Tensor, Tensor]], tile: int
) -> None:
    method = create("exact_topk", {"top_k": 3, "block_size": 16, "query_tile": tile})
    found = run(method, tensors(queries=200, heads=4, kv_heads=2, dtype=torch.float32))
    assert found.recall == 1
    assert found.mass_ratio == pytest.approx(1, abs=1e-6)
    assert found.mass_kept is not None
    assert 0.3 < found.mass_kept < 1
    assert found.recall_by_head == [1.0, 1.0]


def test_nothing_of_the_same_budget_keeps_more(tensors: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> None:
    given = tensors(queries=200, heads=4, kv_heads=2, dtype=torch.float32)
    budget = {"top_k": 3, "block_size": 16, "query_tile": 16}
    best = run(create("exact_topk", budget), given).mass_kept
    assert best is not None
    for name in ("pyramid", "flat", "sliding_window", "random_blocks"):
        found = run(create(name, budget), given)
        assert found.mass_kept is not None
        assert found.mass_ratio is not None
        assert found.mass_kept <= best
        assert 0 < found.mass_ratio < (1 if name in ("sliding_window", "random_blocks") else 1 + 1e-6)


def test_dense_attention_has_no_error_and_misses_nothing(
    tensors: Callable[..., tuple[Tensor, Tensor, Tensor]],
) -> None:
    found = run(create("dense"), tensors(queries=200, dtype=torch.float32))
    assert (found.recall, found.mass_kept, found.mass_outside_forced) == (1, 1, 1)
    assert found.mass_ratio is None
    assert found.output_error is not None
    assert found.output_error < 1e-6


def test_the_error_is_of_the_output_and_not_of_the_selection(
    tensors: Callable[..., tuple[Tensor, Tensor, Tensor]],
) -> None:
    method = create("random_blocks", {"top_k": 1, "block_size": 16, "query_tile": 16})
    given = tensors(queries=200, dtype=torch.float32)
    own, dense = run(method, given), run(method, given, dense=True)
    assert own.recall == dense.recall
    assert own.output_error is not None
    assert dense.output_error is not None
    assert dense.output_error < 1e-6 < 0.05 < own.output_error
