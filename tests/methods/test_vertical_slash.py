"""Vertical-slash by hand: 16 tokens, blocks and tiles of 2; the probe before query 8 is the rows 6 and 7."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pyramidbench.kernels.lines import probe_lines, probe_starts

# Key j < 8 is 50 times the unit vector j, so that a query that is a unit vector looks at one key alone. Row 6 looks at key 1
# and row 7 at key 2: columns 1 and 2 have weight 1, and both look back by 5, so slash 5 has weight 2.
KEYS = [[[50.0 * (i == j) for i in range(8)] for j in range(16)]]
QUERIES = [[[float((row, i) in ((6, 1), (7, 2))) for i in range(8)] for row in range(16)]]
SIZES = {"block_size": 2, "query_tile": 2, "probe_rows": 2, "probe_every": 8}


def test_probes_end_where_lengths_double_and_then_evenly() -> None:
    assert probe_starts(16, 2, 8) == [2, 4, 8]
    assert probe_starts(40, 2, 8) == [2, 4, 8, 16, 24, 32]
    assert probe_starts(40, 5, 16) == [5, 10, 16, 32]


def test_lines_are_sums_over_the_rows_of_each_probe() -> None:
    q, k = (torch.tensor(x, dtype=torch.float64)[None, 0] for x in (QUERIES, KEYS))
    lines = probe_lines(q, k[0], [2, 8], 2, 1.0)
    # Rows 0 and 1 ask 0: row 0 looks at key 0, and row 1 at both.
    vertical = [[1.5, 0.5, 0, 0, 0, 0, 0, 0], [0, 1, 1, 0, 0, 0, 0, 0]]
    slash = [[1.5, 0.5, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 2, 0, 0]]
    for found, expected in ((lines.vertical, vertical), (lines.slash, slash)):
        torch.testing.assert_close(found[0], torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize(
    ("vertical", "top_k", "blocks"),
    [
        # The tile of the rows 12 and 13 has the own block 6. Columns 1 and 2 lie in blocks 0 and 1, which are equal.
        (1.0, 1, [0, 6]),
        (1.0, 2, [0, 1, 6]),
        # By slash 5 the rows see the keys 7 and 8, in blocks 3 and 4.
        (0.0, 1, [3, 6]),
        (0.0, 2, [3, 4, 6]),
        # Half and half: the first column's block, and the first of the slash's.
        (0.5, 2, [0, 3, 6]),
        (0.5, 4, [0, 1, 3, 4, 6]),
    ],
)
def test_blocks_on_the_strongest_lines(
    vertical: float, top_k: int, blocks: list[int], kept: Callable[..., list[list[list[int]]]]
) -> None:
    (tiles,) = kept("vertical_slash", QUERIES, KEYS, vertical=vertical, top_k=top_k, **SIZES)
    assert tiles[6] == blocks
