"""Slopes of power laws that are known, and crossings that can be computed by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import pytest

from pyramidbench.frame import settings, summarise
from pyramidbench.record import columns
from pyramidbench.scaling import Crossover, Scaling, crossover, scalings, slope

LENGTHS = [2048, 4096, 8192, 16384]


@pytest.mark.parametrize("power", [0.0, 1.0, 1.7, 2.0])
def test_the_slope_of_a_power_law_is_its_power(power: float) -> None:
    found = slope(LENGTHS, [3e-9 * n**power for n in LENGTHS])
    assert found is not None
    assert (found.value, found.low, found.high) == pytest.approx((power, power, power), abs=1e-6)
    assert found.lengths == 4


def test_the_interval_shows_that_time_follows_no_power() -> None:
    """A fixed cost of a millisecond bends the line."""
    bent = slope(LENGTHS, [1e-3 + 1e-11 * n**2 for n in LENGTHS])
    straight = slope(LENGTHS, [1e-11 * n**2 for n in LENGTHS])
    assert bent is not None
    assert straight is not None
    assert bent.high is not None
    assert bent.low is not None
    assert bent.high - bent.low > 0.5
    assert bent.value < 2


def test_the_interval_holds_the_true_slope_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    found = [slope(LENGTHS, [n**1.3 * math.exp(rng.normal(0, 0.05)) for n in LENGTHS]) for _ in range(400)]
    held = sum(one.low <= 1.3 <= one.high for one in found if one and one.low is not None and one.high is not None)
    assert 0.92 <= held / 400 <= 0.98


def test_two_lengths_have_the_interval_that_their_times_allow() -> None:
    found = slope([1024, 4096], [1.0, 4.0], [(0.9, 1.1), (3.6, 4.4)])
    assert found is not None
    assert found.value == pytest.approx(1.0)
    assert found.low == pytest.approx(math.log(3.6 / 1.1) / math.log(4))
    assert found.high == pytest.approx(math.log(4.4 / 0.9) / math.log(4))
    bare = slope([1024, 4096], [1.0, 4.0], [(0.9, 1.1), (None, None)])
    assert bare is not None
    assert (bare.value, bare.low, bare.high) == (pytest.approx(1.0), None, None)


def test_one_length_has_no_slope() -> None:
    assert slope([1024], [1.0]) is None
    assert slope([1024, 1024], [1.0, 1.1]) is None


@pytest.mark.parametrize(
    ("speedups", "outcome", "length"),
    [
        ([0.5, 0.8, 1.25, 2.0], "faster from here on", 4096 * math.sqrt(2)),
        ([0.5, 2.0, 4.0, 8.0], "faster from here on", 2048 * math.sqrt(2)),
        ([1.2, 0.5, 2.0, 3.0], "faster from here on", 4096 * math.sqrt(2)),
        ([1.0, 2.0, 3.0, 4.0], "faster from here on", 2048.0),
        ([0.1, 0.2, 0.3, 0.9], "none in range: slower at the longest length", None),
        ([2.0, 1.5, 1.2, 0.9], "none in range: slower at the longest length", None),
        ([1.1, 1.5, 2.0, 4.0], "none in range: faster at every length", None),
    ],
    ids=["between", "early", "the last of two", "at a length", "never", "falls back", "always"],
)
def test_where_a_method_begins_to_win(speedups: Sequence[float], outcome: str, length: float | None) -> None:
    found = crossover(LENGTHS, speedups)
    assert found.outcome == outcome
    assert found.length == (None if length is None else pytest.approx(length))
    assert (found.low, found.high) == (None, None)


def test_the_interval_of_a_crossover_is_where_the_ends_cross() -> None:
    found = crossover(LENGTHS, [0.5, 0.8, 1.25, 2.0], [0.4, 0.5, 0.8, 1.25], [0.8, 1.25, 1.6, 2.5])
    assert (found.low, found.length, found.high) == pytest.approx(
        (2048 * math.sqrt(2), 4096 * math.sqrt(2), 8192 * math.sqrt(2))
    )


def test_an_end_that_crosses_outside_of_the_lengths_is_open() -> None:
    found = crossover(LENGTHS, [0.9, 0.95, 0.99, 1.05], [0.8] * 4, [1.1, 1.2, 1.3, 1.4])
    assert found.length is not None
    assert (found.low, found.high) == (None, None)


def row(method: str, length: int, latency_s: float, **values: Any) -> dict[str, Any]:
    made: dict[str, Any] = dict.fromkeys(columns())
    is_dense = method.startswith("dense")
    return made | {
        "cell": f"{method}-{length}-{values}", "status": "ok", "method": method, "kind": "dense" if is_dense else "selection",
        "device": "Test", "batch": 1, "heads": 1, "kv_heads": 1, "head_dim": 64, "dtype": "float32", "causal": True,
        "pass": "forward", "input": "topics", "seq_len": length, "seq_len_kv": length, "parameters": "{}", "seed": 0,
        "latency_s": latency_s, "latency_low_s": 0.99 * latency_s, "latency_high_s": 1.01 * latency_s, "samples": 30,
        "attend_s": latency_s / 2, **({} if is_dense else {"block_size": 64, "query_tile": 64, "top_k": 8, "levels": 1}),
        **values,
    }  # fmt: skip


def of(rows: list[dict[str, Any]]) -> list[Scaling]:
    (setting, *_) = settings(summarise(pd.DataFrame(rows, columns=columns())))
    return scalings(setting)


def test_each_method_of_a_run_has_its_slopes_and_its_crossover() -> None:
    rows = [row("dense", n, 1e-9 * n**2) for n in LENGTHS]
    rows += [
        row("pyramid", n, 5e-6 * n, route_s=2e-6 * n, build_s=1e-12 * n, budget="top_k=8",
            dense_method="dense", speedup=2e-4 * n, speedup_low=1e-4 * n, speedup_high=4e-4 * n)
        for n in LENGTHS
    ]  # fmt: skip
    dense, pyramid = of(rows)
    assert (dense.label, dense.crossover, pyramid.label) == ("dense", None, "pyramid")
    assert dense.time.value == pytest.approx(2)
    assert pyramid.time.value == pytest.approx(1)
    assert {name: found.value for name, found in pyramid.stages.items()} == pytest.approx({"route": 1, "attend": 1})
    assert pyramid.crossover == Crossover(
        "faster from here on", pytest.approx(5000), pytest.approx(2500), pytest.approx(10000)
    )
    assert (pyramid.top_k, pyramid.query_tile, pyramid.shortest, pyramid.longest) == (8, 64, 2048, 16384)


def test_a_run_without_intervals_has_a_crossover_without_one() -> None:
    rows = [row("dense", n, 1e-9 * n**2) for n in LENGTHS] + [row("pyramid", n, 5e-6 * n) for n in LENGTHS]
    (_, pyramid) = of(rows)
    assert pyramid.crossover == Crossover("faster from here on", pytest.approx(5000))


def test_budgets_and_tiles_are_curves_of_their_own_and_a_share_is_one() -> None:
    rows = [row("dense", n, 1e-9 * n**2) for n in LENGTHS[:2]]
    for n, (top_k, tile) in itertools.product(LENGTHS[:2], [(4, 64), (8, 64), (8, 1)]):
        rows.append(row("pyramid", n, 5e-6 * n * top_k, top_k=top_k, query_tile=tile, budget=f"top_k={top_k}"))
    rows += [row("flat", n, 1e-6 * n, top_k=n // 1024, budget="keep=5%") for n in LENGTHS[:2]]
    found = {(one.label, one.top_k, one.query_tile): one for one in of(rows)}
    assert set(found) - {("dense", None, None)} >= {
        ("pyramid", 4, 64),
        ("pyramid", 8, 64),
        ("pyramid", 8, 1),
        ("flat", None, 64),
    }
    assert found["flat", None, 64].time.lengths == 2


def test_a_single_length_has_no_scaling() -> None:
    assert of([row("dense", 2048, 1.0), row("pyramid", 2048, 0.5)]) == []
