"""The folder of an evaluation: manifest.json, device.json, and samples.jsonl, one finished sample a line.

A sample is safe on disk before the next one starts.
results.parquet and results.csv are made from samples.jsonl when a run ends, and whenever it is loaded and exported.
"""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import BaseModel, ConfigDict, ValidationError

from pyramidbench.device import Device
from pyramidbench.errors import UserError
from pyramidbench.evaluation.record import SCHEMA_VERSION, EvaluationRecord, columns
from pyramidbench.folder import drop_torn_line, full, locked, write_whole

SAMPLES = "samples.jsonl"


class EvaluationManifest(BaseModel):
    """What an evaluation was asked to do. `cells`: identities of the planned rows, in order."""

    model_config = ConfigDict(frozen=True)

    schema_version: int = SCHEMA_VERSION
    kind: str = "evaluation"
    created: str
    argv: list[str]
    model: str
    model_sha256: str | None
    texts: dict[str, str]
    settings: dict[str, Any]
    version: str
    cells: list[str]


class Evaluation:
    """An evaluation on disk: `path`, `manifest`, `device`, `records`, and all of it as `frame`."""

    def __init__(
        self, path: Path, manifest: EvaluationManifest, device: Device, records: list[EvaluationRecord]
    ) -> None:
        self.path, self.manifest, self.device, self.records = path, manifest, device, tuple(records)

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One row per sample and attention."""
        return pd.DataFrame([record.model_dump() for record in self.records], columns=columns())

    @property
    def missing(self) -> int:
        """Planned rows that have no record yet."""
        return len(set(self.manifest.cells) - {record.cell for record in self.records})

    def export(self) -> None:
        """Write results.parquet and results.csv."""
        self.frame.to_parquet(self.path / "results.parquet", index=False)
        self.frame.to_csv(self.path / "results.csv", index=False)


def load_evaluation(path: str | Path) -> Evaluation:
    """Open the folder of an evaluation, finished or not.

    Raises:
        UserError: no such folder, or no evaluation of this version.
    """
    folder = Path(path)
    if not (folder / "manifest.json").is_file():
        raise UserError(
            f"'{folder}' is no evaluation: it has no manifest.json. Give the folder that was named at its end."
        )
    try:
        manifest = EvaluationManifest.model_validate_json((folder / "manifest.json").read_bytes())
        device = Device.model_validate_json((folder / "device.json").read_bytes())
        records = _read(folder / SAMPLES)
    except (ValidationError, OSError) as error:
        raise UserError(f"'{folder}' is no evaluation, or is damaged: {' '.join(str(error).split())[:200]}") from None
    if manifest.schema_version > SCHEMA_VERSION or manifest.kind != "evaluation":
        raise UserError(f"'{folder}' was written by another version of pyramidbench; upgrade it to read this.")
    return Evaluation(folder, manifest, device, records)


class Journal:
    """The one writer of an evaluation's folder; holds its lock until closed."""

    def __init__(self, folder: Path, manifest: EvaluationManifest, device: Device) -> None:
        self.folder = folder
        self.lock = locked(folder)
        try:
            self._open(manifest, device)
        except BaseException:
            self.lock.release()
            raise

    def _open(self, manifest: EvaluationManifest, device: Device) -> None:
        path = self.folder / SAMPLES
        if (self.folder / "manifest.json").exists():
            found = load_evaluation(self.folder)
            before = found.manifest
            if found.device.name != device.name:
                raise UserError(
                    f"'{self.folder}' was measured on {found.device.name}, and this is {device.name}; give another --out."
                )
            if (before.model, before.settings, before.texts) != (manifest.model, manifest.settings, manifest.texts):
                raise UserError(
                    f"'{self.folder}' holds another evaluation. Give another --out, or --fresh to start over."
                )
            drop_torn_line(path)
        else:
            write_whole(self.folder / "device.json", device.model_dump_json(indent=1))
            write_whole(self.folder / "manifest.json", manifest.model_dump_json(indent=1))
        self.done = {record.cell for record in _read(path)}
        self.stream = path.open("a", encoding="utf-8")

    def add(self, record: EvaluationRecord) -> None:
        """Put a record on disk; it is there when this returns."""
        try:
            self.stream.write(record.model_dump_json(exclude_none=True) + "\n")
            self.stream.flush()
            os.fsync(self.stream.fileno())
        except OSError as error:
            raise full(self.folder, error) from None
        self.done.add(record.cell)

    def close(self) -> Evaluation:
        """Export the tables, release the folder, and return what it holds."""
        try:
            self.stream.close()
            evaluation = load_evaluation(self.folder)
            evaluation.export()
        finally:
            self.lock.release()
        return evaluation


def _read(path: Path) -> list[EvaluationRecord]:
    """All whole records; a last line that a crash tore is left out."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    return list({record.cell: record for record in map(EvaluationRecord.model_validate_json, lines)}.values())
