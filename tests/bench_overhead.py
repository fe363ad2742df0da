"""What a cell costs besides measuring it, when the worker is reused: `python tests/bench_overhead.py`.

Four groups of twelve tiny cells go through a whole sweep: plan, worker process, samples and records on disk, synced. The same
cells are then judged, timed and finished in this process, with no worker and no disk: that is measuring. The difference is the
overhead; the first group, in which the worker starts, does not count.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from pyramidbench.cell import Cell
from pyramidbench.outcome import Lost, Settings
from pyramidbench.plan import PlannedCell
from pyramidbench.record import Record
from pyramidbench.runner import Runner
from pyramidbench.suite import suite_from_flags
from pyramidbench.sweeping import QUALITY_ELEMENTS, Silent, make_plan, run_plan

GROUPS, SIZE, TIMING_S = 4, 12, 0.02


class Stopwatch(Silent):
    """When each record was on disk."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def finished(self, record: Record) -> None:
        assert record.latency_s is not None, record
        self.times.append(time.perf_counter())


def cells() -> list[Cell]:
    sizes = {"seq_len": 1024, "seq_len_kv": 1024, "head_dim": 16, "head_dim_v": 16, "input": "normal"}
    return [
        Cell(method="sliding_window", parameters={"top_k": top_k + 1, "block_size": 64}, seed=seed, **sizes)
        for seed in range(GROUPS)
        for top_k in range(SIZE)
    ]


def swept_s(every: Sequence[Cell]) -> float:
    """Seconds a cell through a sweep, from the end of the first group on."""
    made = make_plan(
        suite_from_flags(seq="1k", method=["sliding_window"], name="overhead"), device="cpu", timing_s=TIMING_S
    )
    planned = tuple(PlannedCell(cell, "run", None, None, None) for cell in every)
    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        run_plan(dataclasses.replace(made, cells=planned), out=Path(folder) / "run", reporter=watch)
    return (watch.times[-1] - watch.times[SIZE - 1]) / (len(every) - SIZE)


def measured_s(every: Sequence[Cell]) -> float:
    """Seconds a cell in this process, the first group left out here too."""
    runner = Runner(Settings("cpu", "overhead", Path("nowhere"), TIMING_S, QUALITY_ELEMENTS))
    times: list[float] = []
    for _, group in groupby(every, key=lambda cell: cell.group):
        members = list(group)
        judged = [runner.judge(cell) for cell in members]
        timings = runner.time(members)
        assert not isinstance(timings, Lost)
        for cell, record, timing in zip(members, judged, timings):
            assert runner.finish(cell, record, timing).latency_s is not None
        times.append(time.perf_counter())
    return (times[-1] - times[0]) / (len(every) - SIZE)


def main() -> None:
    every = cells()
    swept, measured = swept_s(every), measured_s(every)
    print(f"{len(every) - SIZE} cells after the first {SIZE}: {1e3 * swept:.1f} ms a cell in a sweep, "
          f"{1e3 * measured:.1f} ms of it measuring, {1e3 * (swept - measured):.1f} ms besides")  # fmt: skip


if __name__ == "__main__":
    main()
