"""Slopes and crossovers as people read them."""

from __future__ import annotations

import pytest

from pyramidbench.scaling import Crossover, Scaling, Slope
from pyramidbench.scaling_table import HEADERS, scaling_rows


def shown(crossover: Crossover | None, **slopes: Slope) -> dict[str, str]:
    time = slopes.pop("time", Slope(1.234, 1.1, 1.368, 4))
    one = Scaling("pyramid", "selection", 64, 8, 2048, 16384, time, slopes, crossover)
    (row,) = scaling_rows([one])
    return dict(zip(HEADERS, row, strict=True))


def test_a_slope_stands_with_its_interval() -> None:
    texts = shown(None, route=Slope(2.0, None, None, 2))
    assert (texts["time"], texts["route"], texts["build"]) == ("1.23 [1.10, 1.37]", "2.00", "")
    assert (texts["method"], texts["tile"], texts["K"], texts["lengths"]) == ("pyramid", "64", "8", "2k-16k")


@pytest.mark.parametrize(
    ("crossover", "text"),
    [
        (None, ""),
        (Crossover("faster from here on", 5793.0, 4096.0, 8192.0), "5.7k [4.0k, 8.0k]"),
        (Crossover("faster from here on", 5793.0, None, 8192.0), "5.7k [..., 8.0k]"),
        (Crossover("faster from here on", 5793.0), "5.7k"),
        (Crossover("faster from here on", 724.1), "724"),
        (Crossover("none in range: slower at the longest length"), "none in range: slower at the longest length"),
    ],
    ids=["dense", "both ends", "open", "no interval", "short", "none"],
)
def test_a_crossover_stands_with_its_interval_or_says_why_there_is_none(crossover: Crossover | None, text: str) -> None:
    assert shown(crossover)["faster than dense from"] == text
