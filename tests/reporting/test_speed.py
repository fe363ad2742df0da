"""What a large report costs: 500 cells within 10 s on two cores, in a page below 3 MB."""

from __future__ import annotations

import resource
from pathlib import Path

import pandas as pd

from pyramidbench.reporting.write import Source, write_report

DEVICE = {"kind": "cpu", "name": "Xeon", "peak_flops_per_s": 2e11, "peak_bytes_per_s": 4e10}


def spent_s() -> float:
    """Processor time of this process and its children that have ended; a busy machine stretches it less than the wait."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def test_500_cells_take_less_than_ten_seconds_of_two_cores(large_run: pd.DataFrame, tmp_path: Path) -> None:
    assert len(large_run) == 500
    before = spent_s()
    write_report([Source(large_run, {"name": "large"}, DEVICE)], tmp_path)
    spent = spent_s() - before
    print(f"500 cells: {spent:.1f} s of processor time, {(tmp_path / 'report.html').stat().st_size / 1e6:.2f} MB")
    assert spent < 2 * 10
    assert (tmp_path / "report.html").stat().st_size < 3e6
