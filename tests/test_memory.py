"""Peak memory above the inputs, on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pyramidbench import memory
from pyramidbench.memory import peak_above_inputs

CPU = torch.device("cpu")
MIB = 1 << 20
TOLERANCE = 8 * MIB
pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")


def filled(mebibytes: int) -> torch.Tensor:
    """Memory that is really touched."""
    return torch.ones(mebibytes * MIB, dtype=torch.uint8)


def test_the_result_counts() -> None:
    peak = peak_above_inputs(lambda: filled(96), CPU)
    assert peak is not None
    assert abs(peak - 96 * MIB) < TOLERANCE


def test_what_is_freed_during_the_call_counts_at_its_peak() -> None:
    def call() -> torch.Tensor:
        filled(128)
        return filled(16)

    peak = peak_above_inputs(call, CPU)
    assert peak is not None
    assert abs(peak - 128 * MIB) < TOLERANCE


def test_inputs_and_earlier_peaks_do_not_count() -> None:
    held = filled(64)
    filled(160)
    peak = peak_above_inputs(lambda: filled(32), CPU)
    assert peak is not None
    assert abs(peak - 32 * MIB) < TOLERANCE
    assert held.numel() == 64 * MIB


def test_it_is_unknown_where_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "_CLEAR", tmp_path / "no" / "such" / "file")
    assert peak_above_inputs(lambda: filled(1), CPU) is None
