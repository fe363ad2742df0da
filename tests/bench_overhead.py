"""What a cell costs besides measuring it, when the worker is reused: `python tests/bench_overhead.py`.

Groups of twelve tiny cells go through a whole sweep: plan, worker process, samples and records on disk, synced. The same cells
are then judged, timed and finished in this process, with no worker and no disk: that is measuring. The rest is the overhead, in
wall time and in processor time (of this process and the worker), which other programs disturb less. Of each, what a
run of one group takes is subtracted from what a run of four takes, so that the start of the worker does not count.
"""

from __future__ import annotations

import dataclasses
import gc
import resource
import tempfile
import time
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from pyramidbench.cell import Cell
from pyramidbench.outcome import Lost, Settings
from pyramidbench.plan import PlannedCell
from pyramidbench.runner import Runner
from pyramidbench.suite import suite_from_flags
from pyramidbench.sweeping import QUALITY_ELEMENTS, make_plan, run_plan

GROUPS, SIZE, TIMING_S = 4, 12, 0.02


@dataclass(frozen=True)
class Spent:
    """Seconds that something took, by the wall and by the processor."""

    wall_s: float
    processor_s: float

    @classmethod
    def now(cls) -> Spent:
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return cls(time.perf_counter(), sum(usage.ru_utime + usage.ru_stime for usage in used))

    def __sub__(self, other: Spent) -> Spent:
        return Spent(self.wall_s - other.wall_s, self.processor_s - other.processor_s)

    def per_cell(self, cells: int) -> Spent:
        return Spent(self.wall_s / cells, self.processor_s / cells)


def cells(groups: int) -> list[Cell]:
    sizes = {"seq_len": 256, "seq_len_kv": 256, "head_dim": 16, "head_dim_v": 16, "input": "normal"}
    return [
        Cell(method="sliding_window", parameters={"top_k": top_k + 1, "block_size": 16}, seed=seed, **sizes)
        for seed in range(groups)
        for top_k in range(SIZE)
    ]


def swept(groups: int) -> Spent:
    """A whole sweep, with the start and the end of its worker."""
    every = cells(groups)
    made = make_plan(
        suite_from_flags(seq="256", method=["sliding_window"], name="overhead"), device="cpu", timing_s=TIMING_S
    )
    planned = tuple(PlannedCell(cell, "run", None, None, None) for cell in every)
    start = Spent.now()
    with tempfile.TemporaryDirectory() as folder:
        run = run_plan(dataclasses.replace(made, cells=planned), out=Path(folder) / "run")
    assert all(record.latency_s is not None for record in run.records)
    return Spent.now() - start


def measured(groups: int) -> Spent:
    """The same cells in this process."""
    runner = Runner(Settings("cpu", "overhead", Path("nowhere"), TIMING_S, QUALITY_ELEMENTS))
    start = Spent.now()
    for _, group in groupby(cells(groups), key=lambda cell: cell.group):
        members = list(group)
        judged = [runner.judge(cell) for cell in members]
        timings = runner.time(members)
        assert not isinstance(timings, Lost)
        for cell, record, timing in zip(members, judged, timings):
            assert runner.finish(cell, record, timing).latency_s is not None
    gc.unfreeze()
    return Spent.now() - start


def main() -> None:
    more = (GROUPS - 1) * SIZE
    measured(1)
    apart = (measured(GROUPS) - measured(1)).per_cell(more)
    whole = (swept(GROUPS) - swept(1)).per_cell(more)
    besides = whole - apart
    print(f"per cell, over {more} cells: {1e3 * whole.wall_s:.1f} ms in a sweep, {1e3 * apart.wall_s:.1f} ms of it measuring, "
          f"{1e3 * besides.wall_s:.1f} ms besides")  # fmt: skip
    print(f"processor time: {1e3 * whole.processor_s:.1f} ms, {1e3 * apart.processor_s:.1f} ms, "
          f"{1e3 * besides.processor_s:.1f} ms besides")  # fmt: skip


if __name__ == "__main__":
    main()
