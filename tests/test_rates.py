"""Rates that no device reaches are refused; the counts themselves are tested with the passes and the methods."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pyramidbench import finishing
from pyramidbench.cell import Cell
from pyramidbench.gate import GateFailure
from pyramidbench.outcome import Settings
from pyramidbench.problem import Problem
from pyramidbench.rates import check_rate
from pyramidbench.runner import Runner

ON_GPU = Problem(1, 4, 2, 1024, 1024, 64, 64, "bfloat16", True, 0.125, device="cuda")
ON_CPU = replace(ON_GPU, device="cpu", dtype="float32")


@pytest.mark.parametrize("problem", [ON_GPU, ON_CPU], ids=["gpu", "cpu"])
def test_a_rate_above_the_peak_is_refused_once_the_peak_is_measured_again(problem: Problem) -> None:
    asked: list[float] = []

    def again(peak: float) -> float:
        asked.append(peak)
        return peak

    check_rate(1.05e12, problem, 1e12, lambda: again(1e12))
    assert asked == [], "a peak is a measurement too"
    check_rate(3e12, problem, 1e12, lambda: again(2.9e12))
    assert asked == [2.9e12], "the device was busy at the start"
    with pytest.raises(GateFailure, match=r"useful rate of 3\.00 TFLOP/s is above the device's measured peak of 1\.20"):
        check_rate(3e12, problem, 1e12, lambda: again(1.2e12))
    with pytest.raises(GateFailure, match=r"peak of 2\.00"):
        check_rate(3e12, problem, 2e12, lambda: again(1.2e12))


def test_what_the_peak_does_not_bound_is_left_alone() -> None:
    check_rate(1e15, ON_GPU, None, lambda: 1.0)
    check_rate(1e15, replace(ON_CPU, dtype="bfloat16"), 1e12, lambda: 1.0)


def test_a_cell_that_is_too_fast_is_incorrect_and_shows_no_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finishing, "measured_peaks", lambda _: (1.0, 1.0))
    cell = Cell(method="dense", seq_len=64, seq_len_kv=64, head_dim=8, head_dim_v=8, input="normal")
    settings = Settings("cpu", "Test CPU", tmp_path, 0.01, 1)
    assert Runner(settings).measure(cell).latency_s is not None
    record = Runner(replace(settings, peak_flops_per_s=1.0)).measure(cell)
    assert record.status == "incorrect"
    assert record.latency_s is None
    assert "above the device's measured peak" in (record.reason or "")
