"""The flat selection's scores by hand: blocks of 4 keys, all queries ask 1."""

from __future__ import annotations

from collections.abc import Callable

import pytest

KEYS = [[[x] for x in (4.0, 4.0, -4.0, -4.0, 2.0, 2.0, 2.0, 2.0, 7.0, -9.0, -9.0, -9.0, 0.0, 0.0, 0.0, 0.0)]]


@pytest.mark.parametrize(
    ("spec", "order"),
    [
        # Means: 0, 2, -5.
        ("flat", [1, 0, 2]),
        # Bounds, which for one dimension are the largest keys: 4, 2, 7.
        ("flat:bounds", [2, 0, 1]),
        # SubBlock: halves with the means 4 and -4, 2 and 2, -1 and -9, each with + ln 2: LogSumExp 4.69, 3.39, -0.31.
        ("flat:sub", [0, 1, 2]),
        # LogSumExp of the keys: 4 + ln 2 = 4.69, 2 + ln 4 = 3.39, 7.00.
        ("flat:exact", [2, 0, 1]),
    ],
)
def test_scores(spec: str, order: list[int], kept: Callable[..., list[list[list[int]]]]) -> None:
    for top_k in (1, 2):
        parameters: dict[str, object] = {"block_size": 4, "query_tile": 1, "top_k": top_k}
        if spec == "flat:sub":
            parameters["sub_blocks"] = 2
        if spec == "flat:bounds":
            parameters["bound_weight"] = 1.0
        (rows,) = kept(spec, [[[1.0]] * 16], KEYS, **parameters)
        assert rows[-1] == [*sorted(order[:top_k]), 3]
