"""One group of a sweep: cells of the same tensors. All are judged, and so compiled, before any is timed; then they are timed
in turns, in sessions of a bounded size; and each is on disk as soon as it is finished.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol
from uuid import uuid4

from pyramidbench.cell import Cell
from pyramidbench.decoding import held_bytes
from pyramidbench.outcome import Lost, Settings, failed
from pyramidbench.plan import Estimator, PlannedCell
from pyramidbench.record import MEASURED, Record
from pyramidbench.runner import is_ready
from pyramidbench.stats import paired_ratio
from pyramidbench.store import RunWriter
from pyramidbench.timing import Timing

LARGEST_SESSION = 12
"""Cells that are timed in turns at most: that is what a killed sweep measures again."""
SESSION_SHARE = 0.9
"""Of the memory that was free at the start, what a session may plan for: its calls have scratch, and memory has holes."""
LIMIT_FACTOR = 4.0
"""Seconds that a task may take ÷ seconds predicted for its cells."""
LATE_FAULTS = 3
"""Faults of a session that belong to no cell after which its cells are given up."""


class Measuring(Protocol):
    """What measures: a worker process, or a stand-in of it."""

    def judge(self, cell: Cell, limit_s: float) -> Record: ...

    def time(self, cells: Sequence[Cell], limit_s: float, *, one_by_one: bool = False) -> list[Timing] | Lost: ...

    def finish(self, cell: Cell, judged: Record, timing: Timing, limit_s: float) -> Record: ...


@dataclass(frozen=True)
class Judged:
    """A cell that passed the gate, with its record so far."""

    cell: Cell
    record: Record

    @property
    def is_dense(self) -> bool:
        return self.record.kind == "dense"


@dataclass
class GroupSweep:
    """Measures groups one after another. `cells` are all of the sweep; `verdict` gives the record of a cell that must not run,
    as things stand; `started` and `done` are told of every cell, `done` with the wall time that it took, and `timing` of those
    that are timed in turns, of which `memory_bytes` hold the tensors and what each method keeps between its calls."""

    cells: Sequence[Cell]
    worker: Measuring
    writer: RunWriter
    settings: Settings
    estimator: Estimator
    verdict: Callable[[PlannedCell], Record | None]
    started: Callable[[Cell], None]
    timing: Callable[[Sequence[Cell]], None]
    done: Callable[[Cell, Record, float], None]
    memory_bytes: float
    spent_s: dict[str, float] = field(default_factory=dict)

    def run(self, planned: Sequence[PlannedCell]) -> None:
        """Measure the cells of one group."""
        ready = [judged for cell in planned if (judged := self._judge(cell)) is not None]
        for cells in self._sessions(ready):
            self._session(cells)

    def _sessions(self, ready: Sequence[Judged]) -> Iterator[list[Judged]]:
        """The cells cut into sessions: at most LARGEST_SESSION, and no more than memory holds beside the group's tensors."""
        cells: list[Judged] = []
        taken = 0.0
        for judged in ready:
            problem = judged.cell.problem(self.settings.device)
            own = held_bytes(judged.cell.make_method(), problem)
            # A reference that joins them holds about as much as one of them.
            needed = problem.io_bytes + taken + 2 * own
            if cells and (len(cells) == LARGEST_SESSION or needed > SESSION_SHARE * self.memory_bytes):
                yield cells
                cells, taken = [], 0.0
            cells.append(judged)
            taken += own
        if cells:
            yield cells

    def _judge(self, planned: PlannedCell) -> Judged | None:
        """The cell, if it is to be timed; else its record goes to disk."""
        cell = planned.cell
        self.started(cell)
        start = time.perf_counter()
        record = self.verdict(planned)
        if record is None:
            record = self.writer.judged.get(cell.identity) or self.worker.judge(cell, self._limit([cell]))
        self._spend(cell, time.perf_counter() - start)
        if not is_ready(cell, record):
            self._end(cell, record)
            return None
        self.writer.keep_judged(record)
        return Judged(cell, record)

    def _session(self, cells: list[Judged]) -> None:
        """Time these cells in turns, beside the fastest dense one of the group where it is not among them."""
        measured_before = self._reference(cells)
        entrants = [*cells, *measured_before]
        self.timing([judged.cell for judged in cells])
        start = time.perf_counter()
        entrants, timings = self._timed(entrants, {judged.cell.identity for judged in measured_before})
        if not timings and entrants:
            left = [judged for judged in entrants if judged not in measured_before]
            for half in (left[: len(left) // 2], left[len(left) // 2 :]):
                self._session(half)
            return
        timed_s = time.perf_counter() - start
        session = uuid4().hex[:8]
        pairs = dict(zip((judged.cell.identity for judged in entrants), _against_dense(entrants, timings)))
        for judged, timing in zip(entrants, timings):
            again = judged in measured_before
            self.writer.add_samples(judged.cell, timing, session if again else None)
        for judged, timing in zip(entrants, timings):
            if judged in measured_before:
                continue
            start = time.perf_counter()
            record = self.worker.finish(judged.cell, judged.record, timing, self._limit([judged.cell]))
            self._spend(judged.cell, time.perf_counter() - start + timed_s / len(entrants))
            if record.status in MEASURED:
                record = record.model_copy(update={"session": session} | pairs[judged.cell.identity])
            self._end(judged.cell, record)

    def _timed(self, entrants: list[Judged], spare: set[str]) -> tuple[list[Judged], list[Timing]]:
        """The entrants that could be timed, with their times. One that ends a session is lost alone, and the others are
        timed anew; `spare` are those whose record is on disk already. Entrants without times are too many for the memory."""
        late = 0
        while entrants:
            cells = [judged.cell for judged in entrants]
            result = self.worker.time(cells, self._limit(cells), one_by_one=late > 0)
            if not isinstance(result, Lost):
                return entrants, result
            own = [judged for judged in entrants if judged.cell.identity not in spare]
            if result.status == "oom" and len(entrants) > 1:
                # Whoever was at work then, the others held the memory.
                if len(own) > 1:
                    return entrants, []
                entrants = own
                continue
            late += result.cell is None
            guilty = [j for j in entrants if result.cell == j.cell.identity or late >= LATE_FAULTS]
            entrants = [judged for judged in entrants if judged not in guilty]
            for judged in guilty:
                if judged.cell.identity not in spare:
                    self._end(judged.cell, failed(judged.cell, self.settings, result.status, result.reason))
        return [], []

    def _reference(self, cells: list[Judged]) -> list[Judged]:
        """The fastest dense cell of this group that is on disk already, where these cells have none of their own."""
        if any(judged.is_dense for judged in cells):
            return []
        group = {cell.identity: cell for cell in self.cells if cell.group == cells[0].cell.group}
        known = [self.writer.records[identity] for identity in group if identity in self.writer.records]
        dense = [record for record in known if record.kind == "dense" and record.status in MEASURED]
        timed = [record for record in dense if record.latency_s is not None]
        fastest = min(timed, key=lambda record: record.latency_s or 0.0, default=None)
        return [] if fastest is None else [Judged(group[fastest.cell], fastest)]

    def _end(self, cell: Cell, record: Record) -> None:
        self.writer.add(record)
        self.done(cell, record, self.spent_s.get(cell.identity, 0.0))

    def _limit(self, cells: Sequence[Cell]) -> float:
        return LIMIT_FACTOR * self.estimator.total(cells)

    def _spend(self, cell: Cell, seconds: float) -> None:
        self.spent_s[cell.identity] = self.spent_s.get(cell.identity, 0.0) + seconds


def _against_dense(entrants: Sequence[Judged], timings: Sequence[Timing]) -> Iterator[dict[str, object]]:
    """The columns of speed-up of each, from pairs with the fastest dense one of the session; empty without one."""
    dense = [(judged.record.method, timing) for judged, timing in zip(entrants, timings) if judged.is_dense]
    if not dense:
        yield from ({} for _ in entrants)
        return
    method, fastest = min(dense, key=lambda pair: median(pair[1].sampled.seconds))
    for timing in timings:
        ratio = paired_ratio(fastest.sampled.seconds, timing.sampled.seconds)
        yield {
            "dense_method": method,
            "speedup": ratio.median,
            "speedup_low": ratio.low,
            "speedup_high": ratio.high,
        } | graph_speedup(dense, timing)


def graph_speedup(dense: Sequence[tuple[str, Timing]], own: Timing) -> dict[str, object]:
    """The columns of a launch-bound call's speed-up without the host: its replay against the fastest dense call.

    A dense call is taken as a replay too, or as it is where the device bounds it; one that is launch-bound and has no replay is
    left out. Replays were timed in turns, so two of them are compared by pairs; else the ratio is of medians, with no interval.
    """
    timed = [(method, timing.graph or timing.sampled, timing.graph) for method, timing in dense if not timing.graph_gap]
    if own.graph is None or not timed:
        return {}
    method, fastest, replayed = min(timed, key=lambda entry: median(entry[1].seconds))
    columns: dict[str, object] = {"graph_dense_method": method}
    if replayed is None:
        return columns | {"graph_speedup": median(fastest.seconds) / median(own.graph.seconds)}
    ratio = paired_ratio(replayed.seconds, own.graph.seconds)
    return columns | {
        "graph_speedup": ratio.median, "graph_speedup_low": ratio.low, "graph_speedup_high": ratio.high,
    }  # fmt: skip
