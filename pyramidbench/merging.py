"""Merging runs of several machines into one run folder.

A cell keeps its identity, and a row is a cell on a device: the same cell of two devices is two rows. The same cell twice on
one device is one row: a record with numbers goes before one without; two with different numbers are a conflict, which the
caller decides, as no mean of two runs is a measurement.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import pyramidbench
from pyramidbench.device import Device, slug_of
from pyramidbench.errors import UserError
from pyramidbench.folder import write_whole
from pyramidbench.manifest import Manifest, Source
from pyramidbench.record import MEASURED, SCHEMA_VERSION, Record
from pyramidbench.store import Run, load_run

Prefer = Literal["first", "last"]
Row = tuple[str, str | None]
"""What a row is about: a cell's identity and its device."""


@dataclass(frozen=True)
class Conflict:
    """One cell that was measured twice on one device, with different numbers."""

    first: Record
    last: Record
    first_run: str
    last_run: str


@dataclass(frozen=True)
class Merging:
    """What merging some runs comes to: the record of each row with the run it is from, the conflicts, and what else to know."""

    runs: tuple[Run, ...]
    kept: tuple[tuple[Record, Run], ...]
    conflicts: tuple[Conflict, ...]
    notes: tuple[str, ...]

    @property
    def devices(self) -> list[str]:
        """Names of the devices that the rows come from."""
        return sorted({record.device or run.device.name for record, run in self.kept})


def plan_merge(runs: Sequence[Run], prefer: Prefer | None = None) -> Merging:
    """Decide which record stands for each row. Nothing is written.

    Raises:
        UserError: fewer than two runs, one given twice, or a capture or method file that is not the same in all.
    """
    if len(runs) < 2:
        raise UserError(f"{len(runs)} run to merge; give at least two.")
    paths = [run.path.resolve() for run in runs]
    if len(set(paths)) < len(paths):
        raise UserError("a run is given twice; give each once.")
    _check_files(runs)
    kept: dict[Row, tuple[Record, Run]] = {}
    conflicts: list[Conflict] = []
    for run in runs:
        for record in run.records:
            row = (record.cell, record.device)
            if row not in kept:
                kept[row] = (record, run)
                continue
            before, source = kept[row]
            if _both_measured(before, record) and before != record:
                conflicts.append(Conflict(before, record, source.path.name, run.path.name))
            if _takes_over(before, record, prefer):
                kept[row] = (record, run)
    return Merging(tuple(runs), tuple(kept.values()), tuple(conflicts), tuple(_notes(runs)))


def write_merged(merging: Merging, folder: Path) -> Run:
    """Write the merged run into a new folder, its manifest last, and return it.

    Raises:
        UserError: there is something in the folder, or it cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"'{folder}' is there already; give another --out.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for record, run in merging.kept:
            _copy_files(record, run, folder, apart=len(merging.devices) > 1)
        lines = [record.model_dump_json(by_alias=True, exclude_none=True) + "\n" for record, _ in merging.kept]
        write_whole(folder / "cells.jsonl", "".join(lines))
        write_whole(
            folder / "device.json", joined_device([run.device for run in merging.runs]).model_dump_json(indent=1)
        )
        write_whole(folder / "manifest.json", _manifest(merging).model_dump_json(indent=1))
        merged = load_run(folder)
        merged.export()
    except OSError as error:
        raise UserError(f"cannot write to '{folder}': {error.strerror or error}. Give another --out.") from None
    return merged


def default_folder(parent: Path, merging: Merging) -> Path:
    """Where a merged run goes by default."""
    return parent / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{_name(merging.runs)}-merged"


def joined_device(devices: Sequence[Device]) -> Device:
    """What the devices have in common. Texts that differ stand side by side; numbers that differ are left out."""
    values: dict[str, object] = {}
    for name in Device.model_fields:
        found = list(dict.fromkeys(getattr(device, name) for device in devices))
        known = [value for value in found if value is not None]
        if len(found) == 1:
            values[name] = found[0]
        elif all(isinstance(value, str) for value in known):
            values[name] = "; ".join(str(value) for value in known)
        else:
            values[name] = None
    return Device.model_validate(values)


def _both_measured(a: Record, b: Record) -> bool:
    return a.status in MEASURED and b.status in MEASURED


def _takes_over(before: Record, record: Record, prefer: Prefer | None) -> bool:
    if _both_measured(before, record):
        return prefer == "last"
    return before.status not in MEASURED


def _check_files(runs: Sequence[Run]) -> None:
    """Raise UserError where one path means two files: cells of equal identity would be of different tensors or code."""
    seen: dict[str, tuple[str, str]] = {}
    for run in runs:
        for path, digest in run.manifest.settings.get("files", {}).items():
            known, name = seen.setdefault(path, (digest, run.path.name))
            if known != digest:
                raise UserError(
                    f"'{path}' is not the same file in '{name}' and in '{run.path.name}' (SHA-256 {known[:12]} and "
                    f"{digest[:12]}), so their cells are not the same; merge runs of one file."
                )


def _notes(runs: Sequence[Run]) -> Iterable[str]:
    """In what the runs differ besides their cells, and which rows share a dense reference across runs."""
    settings = {key for run in runs for key in run.manifest.settings if key != "files"}
    told = {f"setting {key}": [run.manifest.settings.get(key) for run in runs] for key in sorted(settings)}
    told["pyramidbench"] = [run.manifest.version for run in runs]
    told |= {name: [getattr(run.device, name) for run in runs] for name in ("torch", "triton", "cuda", "python")}
    for what, values in told.items():
        if len({str(value) for value in values}) > 1:
            yield f"{what} differs: {', '.join(f'{run.path.name} {value}' for run, value in zip(runs, values))}"
    names = [run.device.name for run in runs]
    shared = sorted({name for name in names if names.count(name) > 1})
    if shared:
        yield (
            f"Several runs are of {'; '.join(shared)}: a row without pairs of its own has its speed-up against the "
            "fastest dense row of any of them"
        )


def _copy_files(record: Record, run: Run, folder: Path, *, apart: bool) -> None:
    """The samples and the log of a record; in a folder of its device where there are several."""
    device = slug_of(record.device or run.device.name)
    for kind, pattern in (("samples", f"{record.cell}*.npy"), ("logs", f"{record.cell}*.txt")):
        own = run.path / kind / device
        found = sorted((own if own.is_dir() else run.path / kind).glob(pattern))
        target = folder / kind / device if apart else folder / kind
        for path in found:
            target.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target / path.name)


def _manifest(merging: Merging) -> Manifest:
    runs = merging.runs
    first = runs[0].manifest
    settings = {
        key: value
        for key, value in first.settings.items()
        if key != "files" and all(run.manifest.settings.get(key) == value for run in runs)
    }
    files = {path: digest for run in runs for path, digest in run.manifest.settings.get("files", {}).items()}
    return Manifest(
        schema_version=SCHEMA_VERSION,
        name=_name(runs),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        argv=["pyramidbench", *sys.argv[1:]],
        suite=first.suite if all(run.manifest.suite == first.suite for run in runs) else {},
        settings={**settings, "files": files},
        version=pyramidbench.__version__,
        cells=list(dict.fromkeys(cell for run in runs for cell in run.manifest.cells)),
        sources=[source for run in runs for source in _sources(run, merging)],
    )


def _sources(run: Run, merging: Merging) -> list[Source]:
    """Where a run's records come from: itself, or what it was merged from."""
    taken = {record.cell for record, source in merging.kept if source is run}
    if run.manifest.sources:
        return [
            source.model_copy(update={"cells": [cell for cell in source.cells if cell in taken]})
            for source in run.manifest.sources
        ]
    told = run.manifest
    return [
        Source(
            name=run.path.resolve().name, created=told.created, argv=told.argv, settings=told.settings, version=told.version,
            device=run.device, cells=[record.cell for record in run.records if record.cell in taken],
        )
    ]  # fmt: skip


def _name(runs: Sequence[Run]) -> str:
    names = list(dict.fromkeys(run.manifest.name for run in runs))
    return names[0] if len(names) == 1 else "several"
