"""Block lists: their masks, counts and checks, ranking with ties, and the FlexAttention form."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from pyramidbench.kernels.attention import sparse_attention
from pyramidbench.selection import (
    BlockSelection,
    merge,
    ranked_count,
    stack_lists,
    top_blocks,
    top_indices,
    top_n_indices,
)
from pyramidbench.tiling import Tiling

MakeTensors = Callable[..., tuple[Tensor, Tensor, Tensor]]
SMALL = Tiling(12, 20, 4, 4, True)


def selection_of(lists: list[list[int]], tiling: Tiling = SMALL) -> BlockSelection:
    return BlockSelection.from_indices(torch.tensor(lists)[None, None], tiling)


def test_counts_mask_and_density_of_a_list() -> None:
    selection = selection_of([[0, 2, -1], [1, -1, -1], [0, 3, 4]])
    assert selection.indices.dtype == selection.counts.dtype == torch.int32
    assert selection.counts.tolist() == [[[2, 1, 3]]]
    assert selection.mask()[0, 0].int().tolist() == [[1, 0, 1, 0, 0], [0, 1, 0, 0, 0], [1, 0, 0, 1, 1]]
    # Rows 0 … 11 sit at 8 … 19: whole blocks hold 4 × 4 pairs, a tile's own block 1 + 2 + 3 + 4.
    assert selection.pairs().tolist() == [[16 + 10 + 16 + 16 + 16 + 10]]
    assert selection.density() == 84 / sum(range(9, 21))
    assert selection.tiling == SMALL


def test_everything_visible_has_density_one() -> None:
    assert selection_of([[0, 1, 2, -1, -1], [0, 1, 2, 3, -1], [0, 1, 2, 3, 4]]).density() == 1
    assert selection_of([[-1], [-1], [-1]]).density() == 0


def test_a_sound_selection_passes_its_check() -> None:
    selection_of([[0, 2, -1], [-1, -1, -1], [0, 3, 4]]).check()
    selection_of([[]] * 3).check()


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ([[0, 5], [0, 1], [0, 1]], "outside 0 … 4"),
        ([[-2, 0], [0, 1], [0, 1]], "outside 0 … 4"),
        ([[-1, 0], [0, 1], [0, 1]], "padding stands before"),
        ([[0, 0], [0, 1], [0, 1]], "repeated or out of order"),
        ([[2, 1], [0, 1], [0, 1]], "repeated or out of order"),
        ([[0, 3], [0, 1], [0, 1]], "starts after the tile's last query"),
    ],
    ids=["past-the-end", "negative", "padding-first", "repeated", "descending", "future"],
)
def test_a_faulty_selection_is_refused(lists: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        selection_of(lists).check()


def test_counts_that_disagree_are_refused() -> None:
    sound = selection_of([[0, 1], [0, 1], [0, 1]])
    faulty = BlockSelection(sound.indices, sound.counts + 1, 4, 4, 12, 20, True)
    with pytest.raises(ValueError, match="counts disagree"):
        faulty.check()


SCORES = st.lists(
    st.lists(st.sampled_from([0.0, 1.0, 2.5, -3.0, float("nan"), float("-inf")]), min_size=7, max_size=7),
    min_size=1,
    max_size=5,
)


def ranked_by_hand(row: list[float], count: int) -> list[int]:
    """Score descending, then lower index; NaN is worst, and -inf may not be taken."""
    allowed = [j for j, score in enumerate(row) if score != -float("inf")]
    order = sorted(allowed, key=lambda j: (row[j] != row[j], -row[j] if row[j] == row[j] else 0, j))
    return sorted(order[:count])


@settings(max_examples=50, deadline=None, derandomize=True)
@given(rows=SCORES, count=st.integers(0, 9))
def test_the_best_come_by_score_then_by_lower_index(rows: list[list[float]], count: int) -> None:
    found = top_indices(torch.tensor(rows), count)
    assert found.shape == (len(rows), min(count, 7))
    for row, listed in zip(rows, found.tolist(), strict=True):
        expected = ranked_by_hand(row, count)
        assert listed == expected + [-1] * (len(listed) - len(expected))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(rows=SCORES, data=st.data())
def test_each_row_may_have_a_count_of_its_own(rows: list[list[float]], data: st.DataObject) -> None:
    keep = data.draw(st.lists(st.integers(0, 9), min_size=len(rows), max_size=len(rows)))
    found = top_n_indices(torch.tensor([rows, rows]), torch.tensor(keep))
    for head in found.tolist():
        for row, count, listed in zip(rows, keep, head, strict=True):
            assert [j for j in listed if j >= 0] == ranked_by_hand(row, count)


def test_ties_in_a_long_row_go_to_the_first() -> None:
    scores = torch.zeros(3, 5000)
    scores[1, 4000] = 1
    assert top_indices(scores, 3).tolist() == [[0, 1, 2], [0, 1, 4000], [0, 1, 2]]


def test_merged_lists_are_ascending_and_trimmed() -> None:
    first, second = torch.tensor([[4, -1, -1], [-1, -1, -1]]), torch.tensor([[0, 7], [3, -1]])
    assert merge(first, second).tolist() == [[0, 4, 7], [3, -1, -1]]
    assert merge(first[1:]).shape == (1, 0)


def test_stacked_lists_are_padded_to_the_widest() -> None:
    assert stack_lists([torch.tensor([[1, 2]]), torch.tensor([[3]])]).tolist() == [[1, 2], [3, -1]]


def test_k_counts_the_forced_blocks_only_when_asked() -> None:
    forced = SMALL.forced(torch.arange(3), 1, 2)
    assert forced.count().tolist() == [3, 3, 3]
    assert ranked_count(4, forced, forced_in_budget=False).tolist() == [4, 4, 4]
    assert ranked_count(4, forced, forced_in_budget=True).tolist() == [1, 1, 1]
    assert ranked_count(2, forced, forced_in_budget=True).tolist() == [0, 0, 0]


def test_top_blocks_keep_the_forced_and_the_best_complete_ones() -> None:
    tiling, tile = Tiling(40, 40, 4, 4, True), torch.arange(10)
    forced = tiling.forced(tile, 1, 2)
    scores = torch.arange(10.0).expand(2, 10, 10)
    listed = top_blocks(scores, tile, tiling, forced, torch.full((10,), 2))
    assert listed[0, 9].tolist() == [0, 6, 7, 8, 9]
    assert listed[0, 0].tolist() == [0, -1, -1, -1, -1]
    assert torch.equal(listed[0], listed[1])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize(
    "tiling",
    [
        Tiling(48, 48, 16, 16, True),
        Tiling(50, 50, 16, 8, True),
        Tiling(20, 50, 16, 8, True),
        Tiling(50, 40, 16, 8, False),
        Tiling(33, 33, 8, 1, True),
    ],
    ids=["square", "ragged", "more-keys", "full", "token-level"],
)
@pytest.mark.parametrize("sets", [2, 4])
def test_flex_attention_over_the_block_mask_is_the_same(tensors: MakeTensors, tiling: Tiling, sets: int) -> None:
    q, k, v = tensors(queries=tiling.seq_len_q, keys=tiling.seq_len_kv, batch=2, heads=4, kv_heads=2, dim=16)
    scores = torch.rand(2, sets, tiling.tiles, tiling.blocks, generator=torch.Generator().manual_seed(0))
    tile = torch.arange(tiling.tiles)
    forced = tiling.forced(tile, 1, int(tiling.causal))
    listed = top_blocks(scores, tile, tiling, forced, torch.ones_like(tile))
    selection = BlockSelection.from_indices(listed, tiling)
    mask = selection.to_block_mask(heads=4)
    assert mask.shape == (2, 4, tiling.seq_len_q, tiling.seq_len_kv)
    # The compiled kernels visit exactly the listed blocks; uncompiled, only the element mask is looked at.
    for made in (mask, selection.to_block_mask(heads=4, compiled=True)):
        assert torch.equal(made.to_dense().bool(), selection.mask().repeat_interleave(4 // sets, 1))
    output = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    assert isinstance(output, Tensor)
    torch.testing.assert_close(output, sparse_attention(q, k, v, selection))


def test_blocks_seen_in_part_and_whole() -> None:
    """Tiles of 4 on blocks of 4 with two keys ahead and a ragged end: tile 0 sees keys up to 2 to 5, tile 2 up to 10 and 11."""
    tiling = Tiling(10, 12, 4, 4, True)
    lists = torch.tensor([[[[0, 1, -1, -1], [0, 1, 2, -1], [0, 2, -1, -1]]]])
    counts, partly, whole_counts, whole = BlockSelection.from_indices(lists, tiling).parted()
    assert counts[0, 0].tolist() == [2, 2, 1]
    assert partly[0, 0].tolist() == [[0, 1, 0], [1, 2, 0], [2, 0, 0]]
    assert whole_counts[0, 0].tolist() == [0, 1, 1]
    assert whole[0, 0].tolist() == [[0, 0, 0]] * 3
    # A last block that is cut off is seen in part also where nothing is masked.
    full = BlockSelection.from_indices(torch.tensor([[[[1, 2]]]]), Tiling(4, 11, 4, 4, False)).parted()
    assert [x.flatten().tolist() for x in full] == [[1], [2, 0], [1], [1, 0]]
    empty = BlockSelection.from_indices(torch.empty(1, 1, 3, 0, dtype=torch.int32), tiling).parted()
    assert [x.shape[-1] for x in empty] == [3, 0, 3, 0]
