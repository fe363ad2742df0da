"""A sweep: plan the cells, measure each in a worker, and put every record on disk before the next cell starts."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pyramidbench
from pyramidbench.cell import Cell
from pyramidbench.device import Device, fingerprint, free_memory, pick_device
from pyramidbench.errors import UserError
from pyramidbench.plan import Estimator, PlannedCell, Rates, plan
from pyramidbench.record import SCHEMA_VERSION, Record
from pyramidbench.runner import Settings, failed
from pyramidbench.store import Manifest, Run, RunWriter, run_folder, set_aside
from pyramidbench.suite import Suite, load_suite, suite_from_flags
from pyramidbench.worker import Worker, working

RESULTS = Path("results")
TIMING_S = 2.0
CELL_BUDGET_S = 60.0
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

    def finished(self, record: Record) -> None:
        """A record is on disk."""
        ...


class Silent:
    """A reporter that says nothing."""

    def planned(self, folder: Path, cells: Sequence[PlannedCell], done: int) -> None: ...

    def started(self, cell: Cell, left_s: float) -> None: ...

    def finished(self, record: Record) -> None: ...


@dataclass(frozen=True)
class Plan:
    """What a sweep would do: its suite and device, and every cell with its verdict and estimate."""

    suite: Suite
    device: Device
    cells: tuple[PlannedCell, ...]
    estimator: Estimator
    timing_s: float


def make_plan(
    suite: Suite,
    *,
    capture: str | None = None,
    device: str = "auto",
    timing_s: float = TIMING_S,
    cell_budget_s: float = CELL_BUDGET_S,
) -> Plan:
    """Turn a suite into cells with verdicts, from peaks measured on the device now.

    Raises:
        UserError: an input that cannot be read, or a device that is not there.
    """
    cells = suite.cells(capture=capture)
    torch_device = pick_device(device)
    found = fingerprint(torch_device, peaks=True)
    assert found.peak_flops_per_s is not None
    assert found.peak_bytes_per_s is not None
    estimator = Estimator(Rates(found.peak_flops_per_s, found.peak_bytes_per_s), found.kind, timing_s)
    planned = plan(cells, estimator, budget_s=cell_budget_s, memory_bytes=free_memory(torch_device))
    return Plan(suite, found, tuple(planned), estimator, timing_s)


def run_plan(made: Plan, *, out: Path | None = None, fresh: bool = False, reporter: Reporter | None = None) -> Run:
    """Measure a plan's cells, going on where the run folder stops; returns the run.

    Raises:
        UserError: a folder that holds another sweep, is in use, or cannot be written.
    """
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
        settings={"timing_s": made.timing_s, "quality_elements": QUALITY_ELEMENTS},
        version=pyramidbench.__version__,
        cells=identities,
    )
    writer = RunWriter(folder, manifest, made.device)
    try:
        todo = [planned for planned in made.cells if not writer.is_done(planned.cell)]
        reporter.planned(folder, made.cells, len(made.cells) - len(todo))
        settings = Settings(made.device.kind, made.device.name, folder, made.timing_s, QUALITY_ELEMENTS)
        if todo:
            _measure(made, todo, settings, writer, reporter)
    finally:
        run = writer.close()
    return run


def _measure(made: Plan, todo: list[PlannedCell], settings: Settings, writer: RunWriter, reporter: Reporter) -> None:
    estimator, exhausted = made.estimator, Exhausted()
    for planned in made.cells:
        if planned.cell.identity in writer.records:
            exhausted.note(planned.cell, writer.records[planned.cell.identity])
    with working(settings) as worker:
        for index, planned in enumerate(todo):
            reporter.started(planned.cell, estimator.total(later.cell for later in todo[index:] if later.runs))
            record = _one(planned, estimator, settings, worker, exhausted)
            writer.add(record)
            reporter.finished(record)


def _one(
    planned: PlannedCell, estimator: Estimator, settings: Settings, worker: Worker, exhausted: Exhausted
) -> Record:
    if planned.verdict != "run":
        return failed(planned.cell, settings, planned.verdict, planned.reason or "")
    shorter = exhausted.shorter(planned.cell)
    if shorter is not None:
        return failed(planned.cell, settings, "oom_predicted", f"this method ran out of memory at {shorter} tokens")
    start = time.perf_counter()
    record = worker.run(planned.cell, 4 * estimator.predict(planned.cell))
    exhausted.note(planned.cell, record)
    estimator.observe(planned.cell, record, time.perf_counter() - start)
    return record


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


def sweep(
    suite: str | Suite | None = None,
    *,
    seq: str = "4k..16k",
    method: Sequence[str] = ("dense", "pyramid", "flat"),
    input: str = "topics",
    top_k: str | None = None,
    sparsity: str | None = None,
    keep: str | None = None,
    levels: str | None = None,
    block_size: str | None = None,
    query_tile: str | None = None,
    heads: str | None = None,
    head_dim: str | None = None,
    batch: str | None = None,
    dtype: str | None = None,
    layers: str | None = None,
    causal: bool = True,
    seed: int = 0,
    timed: bool = True,
    device: str = "auto",
    out: str | Path | None = None,
    fresh: bool = False,
    timing_s: float = TIMING_S,
    cell_budget_s: float = CELL_BUDGET_S,
) -> Run:
    """Measure methods against each other and return the run, whose `.frame` is one row per cell.

    Give a suite (a name, the path of a TOML file, or a Suite; `input` may then be the capture that it asks for), or axes
    as on the command line: `seq="4k..64k"`, `top_k="8,16"`, `keep="5%"`. A call with the same arguments goes on where an
    interrupted one stopped. Cells run in a child process: call this under `if __name__ == "__main__":` in a script.

    Raises:
        UserError: an argument that is not accepted, or a folder that cannot be used; nothing measured is lost.
    """
    capture = input if input.endswith(".safetensors") else None
    if suite is None:
        suite = suite_from_flags(
            seq=seq, method=method, input=input, top_k=top_k, sparsity=sparsity, keep=keep, levels=levels,
            block_size=block_size, query_tile=query_tile, heads=heads, head_dim=head_dim, batch=batch, dtype=dtype,
            layers=layers, causal=causal, seed=seed, timed=timed,
        )  # fmt: skip
    elif isinstance(suite, str):
        suite = load_suite(suite)
    made = make_plan(suite, capture=capture, device=device, timing_s=timing_s, cell_budget_s=cell_budget_s)
    if not made.cells:
        raise UserError("the sweep has no cells; give at least one length and one method.")
    return run_plan(made, out=None if out is None else Path(out), fresh=fresh)
