"""The run folder: what was asked, what measured it, and every finished cell, safe on disk before the next one starts.

manifest.json, device.json, cells.jsonl (the truth: one record a line, appended, flushed, fsynced), judged.jsonl (cells that
passed the gate and wait to be timed), samples/ (raw times), logs/ (tracebacks), results.parquet and results.csv (derived
from cells.jsonl, written at the end).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import TextIO

import numpy as np
import pandas as pd

from pyramidbench.cell import Cell
from pyramidbench.device import Device
from pyramidbench.errors import UserError
from pyramidbench.folder import drop_torn_line, full, locked, unwritable, write_whole
from pyramidbench.frame import with_speedups
from pyramidbench.manifest import Manifest
from pyramidbench.record import MEASURED, SCHEMA_VERSION, Record, columns
from pyramidbench.timing import Timing


class Run:
    """A run on disk: `path`, `manifest`, `device`, `records`, and all of it as `frame`."""

    def __init__(self, path: Path, manifest: Manifest, device: Device, records: Iterable[Record]) -> None:
        self.path = path
        self.manifest = manifest
        self.device = device
        self.records = tuple(records)

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One row per measured cell, with the columns of docs/results.md; speed-ups are against this run's dense rows."""
        rows = [record.model_dump(by_alias=True) for record in self.records]
        return with_speedups(pd.DataFrame(rows, columns=columns()))

    @property
    def done(self) -> set[str]:
        """Identities of the cells that need no further attempt."""
        return {record.cell for record in self.records if _is_final(record)}

    @property
    def missing(self) -> int:
        """Planned cells that have no record yet."""
        return len(set(self.manifest.cells) - {record.cell for record in self.records})

    def export(self) -> None:
        """Write results.parquet and results.csv."""
        write_whole(self.path / "results.parquet", self.frame.to_parquet(index=False))
        write_whole(self.path / "results.csv", self.frame.to_csv(index=False))


def load_run(path: str | Path) -> Run:
    """Open a run folder, finished or not.

    Raises:
        UserError: no such folder, not a run, or written by a newer version than this one.
    """
    folder = Path(path)
    if not (folder / "manifest.json").is_file():
        raise UserError(
            f"'{folder}' is no run: it has no manifest.json. Give the folder that `pyramidbench sweep` named."
        )
    try:
        manifest = _read_manifest(folder)
        device = Device.model_validate_json((folder / "device.json").read_bytes())
        return Run(folder, manifest, device, _read_records(folder / "cells.jsonl"))
    except UserError:
        raise
    except (ValueError, OSError) as error:
        raise UserError(f"'{folder}' is damaged, and was left as it is: {' '.join(str(error).split())[:200]}") from None


class RunWriter:
    """The one writer of a run folder; holds its lock until closed."""

    def __init__(self, folder: Path, manifest: Manifest, device: Device) -> None:
        self.folder = folder
        self.lock = locked(folder)
        try:
            self._open(manifest, device)
        except OSError as error:
            self.lock.release()
            raise unwritable(folder, error) from None
        except BaseException:
            self.lock.release()
            raise

    def _open(self, manifest: Manifest, device: Device) -> None:
        cells, judged = self.folder / "cells.jsonl", self.folder / "judged.jsonl"
        if (self.folder / "manifest.json").exists():
            self._check_same(load_run(self.folder), manifest, device)
            drop_torn_line(cells)
            drop_torn_line(judged)
        elif cells.exists():
            raise UserError(
                f"'{self.folder}' holds measured cells and no manifest.json that says what they are. "
                "Give another --out, or --fresh to set the old one aside and start over."
            )
        else:
            write_whole(self.folder / "device.json", device.model_dump_json(indent=1))
            write_whole(self.folder / "manifest.json", manifest.model_dump_json(indent=1))
        self.records = {record.cell: record for record in _read_records(cells)}
        self.judged = {record.cell: record for record in _read_records(judged)}
        self.stream = cells.open("a", encoding="utf-8")
        self.judged_stream = judged.open("a", encoding="utf-8")

    def _check_same(self, before: Run, manifest: Manifest, device: Device) -> None:
        if before.manifest.cells != manifest.cells or before.manifest.settings != manifest.settings:
            raise UserError(
                f"'{self.folder}' holds another sweep ({before.manifest.name}, {len(before.records)} cells measured). "
                "Give another --out, or --fresh to set the old one aside and start over."
            )
        if before.device.name != device.name:
            raise UserError(
                f"'{self.folder}' was measured on {before.device.name}, and this is {device.name}; give another --out."
            )

    def add(self, record: Record) -> None:
        """Put a record on disk; it is there when this returns.

        Raises:
            UserError: the disk is full or gone; everything added before stays readable.
        """
        self._append(self.stream, record)
        self.records[record.cell] = record

    def keep_judged(self, record: Record) -> None:
        """Put on disk what the gate and the oracle said of a cell that waits to be timed, so that a resumed sweep knows it.

        Raises:
            UserError: the disk is full or gone.
        """
        if self.judged.get(record.cell) != record:
            self._append(self.judged_stream, record)
            self.judged[record.cell] = record

    def add_samples(self, cell: Cell, timing: Timing, session: str | None = None) -> None:
        """Put the raw times of a cell on disk; with `session`, those of a cell that was measured before and stood beside
        others as their reference.

        Raises:
            UserError: the disk is full or gone.
        """
        name = cell.identity if session is None else f"{cell.identity}.{session}"
        arrays = {name: timing.sampled.seconds, f"{name}.turns": timing.sampled.turns}
        if timing.graph is not None:
            arrays[f"{name}.graph"] = timing.graph.seconds
        try:
            (self.folder / "samples").mkdir(exist_ok=True)
            for stem, values in arrays.items():
                content = BytesIO()
                np.save(content, np.asarray(values))
                write_whole(self.folder / "samples" / f"{stem}.npy", content.getvalue())
        except OSError as error:
            raise full(self.folder, error) from None

    def _append(self, stream: TextIO, record: Record) -> None:
        try:
            stream.write(record.model_dump_json(by_alias=True, exclude_none=True) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        except OSError as error:
            raise full(self.folder, error) from None

    def is_done(self, cell: Cell) -> bool:
        """Whether a cell needs no further attempt: it was measured, or found wrong. Everything else is tried again."""
        record = self.records.get(cell.identity)
        return record is not None and _is_final(record)

    @staticmethod
    def now() -> str:
        """The time in UTC, to the second."""
        return datetime.now(UTC).isoformat(timespec="seconds")

    def close(self) -> Run:
        """Export the tables, release the folder, and return the run.

        Raises:
            UserError: the tables cannot be written; every cell stays readable.
        """
        # Closing flushes what a full disk refused before; whatever was added in full is on disk already.
        for stream in (self.stream, self.judged_stream):
            with suppress(OSError):
                stream.close()
        try:
            run = load_run(self.folder)
            run.export()
        except OSError as error:
            raise UserError(
                f"cannot write the tables in '{self.folder}': {error.strerror or error}. The measured cells are safe; "
                "free some space, then repeat the command."
            ) from None
        finally:
            self.lock.release()
        return run


def _is_final(record: Record) -> bool:
    return record.status in (*MEASURED, "incorrect")


def _read_manifest(folder: Path) -> Manifest:
    """The manifest. Raises UserError where a newer version or an evaluation wrote it, ValueError where it is damaged."""
    content = json.loads((folder / "manifest.json").read_bytes())
    content = content if isinstance(content, dict) else {}
    if content.get("kind") == "evaluation":
        raise UserError(
            f"'{folder}' is an evaluation of a model, not a sweep; "
            f"`pyramidbench evaluate --report '{folder}'` writes its report."
        )
    version = content.get("schema_version")
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise UserError(
            f"'{folder}' was written with result schema {version}; this pyramidbench reads up to {SCHEMA_VERSION}. "
            "Upgrade pyramidbench to read it."
        )
    return Manifest.model_validate(content)


def _read_records(path: Path) -> list[Record]:
    """All whole records; a last line that a crash tore is left out."""
    if not path.exists():
        return []
    # Bytes: the torn line may end inside a character, and only a newline ends a record.
    lines = path.read_bytes().split(b"\n")[:-1]
    records = {(record.cell, record.device): record for record in map(Record.model_validate_json, lines)}
    return list(records.values())
