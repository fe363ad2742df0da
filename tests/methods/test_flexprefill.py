"""FlexPrefill by hand: 16 tokens, blocks and tiles of 2; the probe before query 8 is the rows 6 and 7, p is taken at row 12."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

# Key j < 8 is 50 times the unit vector j, but key 3, which is the opposite of key 2: block 1 has the mean 0.
KEYS = [[[50.0 * (i == j) - 50.0 * ((i, j) == (2, 3)) for i in range(8)] for j in range(16)]]
SIZES = {"block_size": 2, "query_tile": 2, "probe_rows": 2, "probe_every": 8, "min_budget": 0}


def asking(*asked: tuple[int, int, float]) -> list[list[float]]:
    """16 queries that are 0 but for (row, dimension, value)."""
    return [[sum(value for r, i, value in asked if (r, i) == (row, dim)) for dim in range(8)] for row in range(16)]


# Rows 6 and 7 look at key 1. True and estimated shares of blocks 0 to 3 are 1, 0, 0, 0: the means are to be trusted.
# Rows 12 and 13 ask so that block 0, whose mean is 25 times unit vector 1 (and 0), has the logit ln 4, and blocks 1 to 5
# have 0: shares 4/9 and five times 1/9.
AWARE = asking((6, 1, 1.0), (7, 1, 1.0), (12, 1, math.log(4) / 25), (13, 1, math.log(4) / 25))
# Rows 6 and 7 look at keys 1 and 2: true shares 1/2, 1/2, 0, 0. Block 1's mean is 0, so the estimate is 1, 0, 0, 0. The
# divergence is (ln(2/3)/2 + ln(2)/2)/2 + ln(4/3)/2 = .216, and its root .46. Columns 1 and 2 have weight 1, slash 5 has 2.
COLUMNS = asking((6, 1, 1.0), (7, 2, 1.0))
# Rows 6 and 7 look at key 1 alone: its column has weight 2, and the distances 5 and 6 have 1 each.
SLASHES = asking((6, 1, 1.0), (7, 1, 1.0))
NO_HEAD_IS_AWARE = {"divergence": 0.0}


@pytest.mark.parametrize(("top_p", "blocks"), [(0.4, [0, 6]), (0.5, [0, 1, 6]), (0.6, [0, 1, 2, 6]), (0.0, [6])])
def test_a_query_aware_head_goes_by_the_means(
    top_p: float, blocks: list[int], kept: Callable[..., list[list[list[int]]]]
) -> None:
    (tiles,) = kept("flexprefill", [AWARE], KEYS, top_p=top_p, **SIZES)
    assert tiles[6] == blocks


@pytest.mark.parametrize(("top_p", "blocks"), [(0.4, [0, 6]), (0.9, [0, 1, 6]), (0.0, [0, 6])])
def test_another_head_keeps_a_block_column_more_than_its_keys_fill(
    top_p: float, blocks: list[int], kept: Callable[..., list[list[list[int]]]]
) -> None:
    # p = .4 needs one key, which fills no block of 2: one block column, the first. p = .9 needs both: two, with block 1.
    # The one slash that holds everything makes one block distance, the nearest.
    (tiles,) = kept("flexprefill", [COLUMNS], KEYS, top_p=top_p, **SIZES)
    assert tiles[6] == blocks


@pytest.mark.parametrize(("tile", "row", "blocks"), [(2, 6, [0, 4, 6]), (4, 3, [0, 4, 5, 6, 7])])
def test_and_a_block_distance_more_than_its_distances_fill(
    tile: int, row: int, blocks: list[int], kept: Callable[..., list[list[list[int]]]]
) -> None:
    # p = .9 needs distances 5 and 6: two block distances, 0 and, of the equal 2 (distances 4, 5) and 3 (6, 7), the lower. From
    # block 6 that leads to block 4, and from a tile over the blocks 6 and 7 to blocks 4 and 5.
    sizes = {**SIZES, "query_tile": tile}
    (tiles,) = kept("flexprefill", [SLASHES], KEYS, top_p=0.9, **NO_HEAD_IS_AWARE, **sizes)
    assert tiles[row] == blocks


@pytest.mark.parametrize(("least", "blocks"), [(2, [0, 6]), (3, [0, 1, 4, 6]), (5, [0, 1, 2, 4, 5, 6])])
def test_every_head_keeps_the_least_of_columns_and_of_distances(
    least: int, blocks: list[int], kept: Callable[..., list[list[list[int]]]]
) -> None:
    # p = 0 needs no more than the first block column and the nearest distance. 3 keys are two blocks: block 1 too, with key 2,
    # and block distance 2, which holds slash 5 and leads from block 6 to 4. 5 keys are three: of what holds nothing the lowest,
    # block 2, and distance 1, which leads to block 5.
    (tiles,) = kept("flexprefill", [COLUMNS], KEYS, top_p=0.0, **NO_HEAD_IS_AWARE, **{**SIZES, "min_budget": least})
    assert tiles[6] == blocks
    # A head that goes by its means keeps them too; with p = 0 it keeps no more.
    (tiles,) = kept("flexprefill", [COLUMNS], KEYS, top_p=0.0, divergence=1.0, **{**SIZES, "min_budget": least})
    assert tiles[6] == blocks


def test_each_head_decides_for_itself(kept: Callable[..., list[list[list[int]]]]) -> None:
    aware, lines = kept("flexprefill", [AWARE, COLUMNS], KEYS, top_p=0.6, **SIZES)
    assert (aware[6], lines[6]) == ([0, 1, 2, 6], [0, 1, 6])
    # With a tolerance above .46 the second head trusts its means too: 0 for all six blocks, of which .6 takes four.
    aware, trusting = kept("flexprefill", [AWARE, COLUMNS], KEYS, top_p=0.6, divergence=0.47, **SIZES)
    assert (aware[6], trusting[6]) == ([0, 1, 2, 6], [0, 1, 2, 3, 6])
    _, wary = kept("flexprefill", [AWARE, COLUMNS], KEYS, top_p=0.6, divergence=0.46, **SIZES)
    assert wary[6] == [0, 1, 6]


def test_before_the_first_probe_everything_is_kept(kept: Callable[..., list[list[list[int]]]]) -> None:
    sizes = {**SIZES, "probe_rows": 6}
    (tiles,) = kept("flexprefill", [COLUMNS], KEYS, top_p=0.4, **sizes)
    assert tiles[:3] == [[0], [0, 1], [0, 1, 2]]
