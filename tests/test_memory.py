"""Peak memory above the inputs, as a whole and stage by stage, on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pyramidbench import memory
from pyramidbench.memory import Peaks, is_too_much, measure_peaks
from pyramidbench.stages import stage

CPU = torch.device("cpu")
MIB = 1 << 20
TOLERANCE = 8 * MIB
pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")


def filled(mebibytes: int) -> torch.Tensor:
    """Memory that is really touched."""
    return torch.ones(mebibytes * MIB, dtype=torch.uint8)


def peaks_of(call: Callable[[], object]) -> Peaks:
    """Of a call that is all attention."""
    peaks = measure_peaks(lambda: None, lambda _: call(), CPU)
    assert peaks is not None
    assert peaks.reserved is None
    return peaks


def test_the_result_counts() -> None:
    assert abs(peaks_of(lambda: filled(96)).held - 96 * MIB) < TOLERANCE


def test_what_is_freed_during_the_call_counts_at_its_peak() -> None:
    def call() -> torch.Tensor:
        filled(128)
        return filled(16)

    assert abs(peaks_of(call).held - 128 * MIB) < TOLERANCE


def test_inputs_and_earlier_peaks_do_not_count() -> None:
    held = filled(64)
    filled(160)
    assert abs(peaks_of(lambda: filled(32)).held - 32 * MIB) < TOLERANCE
    assert held.numel() == 64 * MIB


def test_each_stage_has_its_own_peak() -> None:
    def select() -> torch.Tensor:
        with stage("build"):
            pyramid = filled(48)
        with stage("route"):
            filled(96)
        del pyramid
        return filled(64)

    def attend(lists: torch.Tensor) -> torch.Tensor:
        assert lists.numel() == 64 * MIB
        return filled(24)

    def backward(output: torch.Tensor) -> None:
        assert output.numel() == 24 * MIB
        filled(200)

    peaks = measure_peaks(select, attend, CPU, backward)
    assert peaks is not None
    expected = {"build": 48, "route": 48 + 96, "index": 64, "attend": 64 + 24, "backward": 64 + 24 + 200}
    assert list(peaks.stages) == ["index", "build", "route", "attend", "backward"]
    for name, size in expected.items():
        assert abs(peaks.stages[name] - size * MIB) < TOLERANCE, name
    assert peaks.held == peaks.stages["backward"]


def test_dense_attention_has_one_stage() -> None:
    assert list(peaks_of(lambda: filled(1)).stages) == ["attend"]


def test_it_is_unknown_where_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "_CLEAR", tmp_path / "no" / "such" / "file")
    assert measure_peaks(lambda: None, lambda _: filled(1), CPU) is None


class FakeGauge:
    """An allocator whose peaks are told, with what it took from the device."""

    def __init__(self, peaks: list[int], reserved: list[int]) -> None:
        self.peaks, self.reservations = iter(peaks), iter(reserved)

    def reset(self) -> None: ...

    def held(self) -> int:
        return 100

    def peak(self) -> int:
        return next(self.peaks)

    def reserved(self) -> int:
        return next(self.reservations)


def test_what_the_allocator_reserved_is_above_what_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "gauge_for", lambda _: FakeGauge([150, 700], [1000, 1200, 3000]))
    assert measure_peaks(lambda: "lists", lambda _: None, CPU) == Peaks(600, 2000, {"index": 50, "attend": 600})


@pytest.mark.parametrize(
    ("measured", "expected", "device", "flagged"),
    [
        (150 * MIB, 100 * MIB, "cuda", False), (151.5 * MIB, 100 * MIB, "cuda", True), (None, 100 * MIB, "cpu", None),
        (155 * MIB, 100 * MIB, "cpu", False), (159 * MIB, 100 * MIB, "cpu", True), (6 * MIB, 1000, "cpu", False),
    ],
)  # fmt: skip
def test_more_than_half_over_the_formula_is_flagged(
    measured: float | None, expected: float, device: str, flagged: bool | None
) -> None:
    assert is_too_much(measured, expected, device) is flagged
