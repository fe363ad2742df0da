"""A sweep: plan the cells, measure each in a worker, and put every record on disk before the next cell starts."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Protocol

import pyramidbench
from pyramidbench.cell import Cell
from pyramidbench.clock import Cache
from pyramidbench.device import Device, fingerprint, free_memory, pick_device
from pyramidbench.errors import UserError
from pyramidbench.folder import run_folder, set_aside
from pyramidbench.group_sweep import GroupSweep
from pyramidbench.manifest import Manifest
from pyramidbench.model_files import file_sha256
from pyramidbench.outcome import Settings, failed
from pyramidbench.parts import Part
from pyramidbench.plan import Estimator, PlannedCell, Rates, judge, plan
from pyramidbench.plugins import plugin_version
from pyramidbench.record import SCHEMA_VERSION, Record
from pyramidbench.store import Run, RunWriter
from pyramidbench.suite import Suite
from pyramidbench.worker import working

RESULTS = Path("results")
TIMING_S = 2.0
CELL_BUDGET_S = 120.0
QUALITY_ELEMENTS = 3 << 28
"""Logits that the oracle may compute per cell: every tile of 9 heads at 8k, a few seconds on two cores."""


class Reporter(Protocol):
    """Who wants to hear how a sweep goes."""

    def planned(self, folder: Path, cells: Sequence[PlannedCell], done: int) -> None:
        """The plan is made; `done` of its cells are on disk already."""
        ...

    def started(self, cell: Cell, left_s: float) -> None:
        """A cell starts; the sweep needs about `left_s` seconds from here."""
        ...

    def timing(self, cells: Sequence[Cell]) -> None:
        """These cells, of one group, are timed in turns now."""
        ...

    def finished(self, record: Record) -> None:
        """A record is on disk."""
        ...


class Silent:
    """A reporter that says nothing."""

    def planned(self, folder: Path, cells: Sequence[PlannedCell], done: int) -> None: ...

    def started(self, cell: Cell, left_s: float) -> None: ...

    def timing(self, cells: Sequence[Cell]) -> None: ...

    def finished(self, record: Record) -> None: ...


@dataclass(frozen=True)
class Plan:
    """What a sweep would do: its suite and device, and every cell with its verdict and estimate."""

    suite: Suite
    device: Device
    cells: tuple[PlannedCell, ...]
    estimator: Estimator
    timing_s: float
    cell_budget_s: float
    memory_bytes: float
    cache: Cache = "cold"

    def judge_again(self, planned: PlannedCell) -> PlannedCell:
        """The verdict once more, now that cells before it have corrected the estimates."""
        if planned.verdict == "unsupported":
            return planned
        try:
            return judge(planned.cell, self.estimator, self.cell_budget_s, self.memory_bytes)
        except UserError as error:
            return PlannedCell(planned.cell, "unsupported", str(error), None, None)


def make_plan(
    suite: Suite,
    *,
    capture: str | None = None,
    device: str = "auto",
    timing_s: float = TIMING_S,
    cell_budget_s: float = CELL_BUDGET_S,
    cache: Cache = "cold",
    part: Part | None = None,
) -> Plan:
    """Turn a suite, or a part of it, into cells with verdicts, from peaks measured on the device now.

    Raises:
        UserError: an input that cannot be read, a device that is not there, or more parts than there is to share.
    """
    cells = suite.cells(capture=capture)
    if part is not None:
        cells = part.of(cells)
    torch_device = pick_device(device)
    found = fingerprint(torch_device, peaks=True)
    assert found.peak_flops_per_s is not None
    assert found.peak_bytes_per_s is not None
    estimator = Estimator(Rates(found.peak_flops_per_s, found.peak_bytes_per_s), found.kind, timing_s)
    memory = free_memory(torch_device)
    planned = plan(cells, estimator, budget_s=cell_budget_s, memory_bytes=memory)
    return Plan(suite, found, tuple(planned), estimator, timing_s, cell_budget_s, memory, cache)


def run_plan(made: Plan, *, out: Path | None = None, fresh: bool = False, reporter: Reporter | None = None) -> Run:
    """Measure a plan's cells, going on where the run folder stops; returns the run.

    Raises:
        UserError: a folder that holds another sweep, is in use, or cannot be written.
    """
    if not made.cells:
        raise UserError("the sweep has no cells; give at least one length and one method.")
    reporter = reporter or Silent()
    identities = [planned.cell.identity for planned in made.cells]
    folder = out or run_folder(RESULTS, made.suite.name, made.device, identities)
    if fresh:
        set_aside(folder)
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        name=made.suite.name,
        created=RunWriter.now(),
        argv=["pyramidbench", *sys.argv[1:]],
        suite=made.suite.model_dump(mode="json", by_alias=True),
        settings={
            "timing_s": made.timing_s,
            "cache": made.cache,
            "quality_elements": QUALITY_ELEMENTS,
            "files": _file_digests(planned.cell for planned in made.cells),
        },
        version=pyramidbench.__version__,
        cells=identities,
    )
    writer = RunWriter(folder, manifest, made.device)
    try:
        todo = [planned for planned in made.cells if not writer.is_done(planned.cell)]
        reporter.planned(folder, made.cells, len(made.cells) - len(todo))
        settings = Settings(
            made.device.kind, made.device.name, folder, made.timing_s, QUALITY_ELEMENTS, made.cache,
            made.device.peak_flops_per_s,
        )  # fmt: skip
        if todo:
            _measure(made, todo, settings, writer, reporter)
    finally:
        run = writer.close()
    return run


def _file_digests(cells: Iterable[Cell]) -> dict[str, str]:
    """Checksums of the captures and method files that cells name, and versions of the packages whose methods they name: with
    another one, it is another sweep."""
    named = sorted({path for cell in cells for path in (cell.input, cell.method.partition(":")[0])})
    files = {path: file_sha256(Path(path)) for path in named if Path(path).suffix in (".safetensors", ".py")}
    return files | {name: version for name in named if (version := plugin_version(name)) is not None}


def _measure(made: Plan, todo: list[PlannedCell], settings: Settings, writer: RunWriter, reporter: Reporter) -> None:
    """Measure what is to do, group by group."""
    estimator, exhausted = made.estimator, Exhausted()
    left = {planned.cell.identity: planned.cell for planned in todo if planned.runs}

    def started(cell: Cell) -> None:
        reporter.started(cell, estimator.total(left.values()))

    def verdict(planned: PlannedCell) -> Record | None:
        return _must_not_run(made.judge_again(planned), settings, exhausted)

    def done(cell: Cell, record: Record, took_s: float) -> None:
        left.pop(cell.identity, None)
        exhausted.note(cell, record)
        estimator.observe(cell, record, took_s)
        reporter.finished(record)

    with working(settings) as worker:
        every = [planned.cell for planned in made.cells]
        groups = GroupSweep(
            every, worker, writer, settings, estimator, verdict, started, reporter.timing, done, made.memory_bytes
        )
        for _, group in groupby(todo, key=lambda planned: planned.cell.group):
            groups.run(list(group))


def _must_not_run(planned: PlannedCell, settings: Settings, exhausted: Exhausted) -> Record | None:
    """The record of a cell that the plan skips, or whose method ran out of memory at a shorter length; else None."""
    if planned.verdict != "run":
        return failed(planned.cell, settings, planned.verdict, planned.reason or "")
    shorter = exhausted.shorter(planned.cell)
    if shorter is None:
        return None
    return failed(planned.cell, settings, "oom_predicted", f"this method ran out of memory at {shorter} tokens")


class Exhausted:
    """Where methods ran out of memory: longer cells of the same method are not tried."""

    def __init__(self) -> None:
        self.lengths: dict[str, int] = {}

    def note(self, cell: Cell, record: Record) -> None:
        if record.status == "oom":
            key = self._key(cell)
            self.lengths[key] = min(cell.seq_len_kv, self.lengths.get(key, cell.seq_len_kv))

    def shorter(self, cell: Cell) -> int | None:
        """The length at which this method failed before, if this cell is longer."""
        length = self.lengths.get(self._key(cell))
        return length if length is not None and cell.seq_len_kv > length else None

    @staticmethod
    def _key(cell: Cell) -> str:
        return cell.model_copy(update={"seq_len": 0, "seq_len_kv": 0, "seed": 0, "layer": None}).identity
