"""The result schema: JSON Schema that real files meet, a version that follows the columns, older and newer runs."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pandas as pd
import pytest

from pyramidbench import cli
from pyramidbench.device import Device
from pyramidbench.errors import UserError
from pyramidbench.manifest import Manifest
from pyramidbench.record import SCHEMA_VERSION, columns
from pyramidbench.schema import ADDED, MODELS, json_schema, schemas
from pyramidbench.store import load_run

REFERENCE = Path(__file__).parent.parent / "results" / "reference"
OLDEST = Path(__file__).parent / "run_of_schema_1"
"""A run of the demo that was recorded under the first version."""


@pytest.mark.parametrize("part", MODELS)
def test_each_schema_is_one_and_says_its_version(part: str) -> None:
    made = json_schema(part)
    jsonschema.Draft202012Validator.check_schema(made)
    assert made["$id"] == f"urn:pyramidbench:run:{SCHEMA_VERSION}:{part}"
    assert all("description" in field for field in made["properties"].values())


@pytest.mark.parametrize(
    "folder", sorted(path.parent for path in REFERENCE.glob("*/cells.jsonl")), ids=lambda path: path.name
)
def test_recorded_runs_meet_the_schema(folder: Path) -> None:
    record = jsonschema.Draft202012Validator(json_schema("record"))
    lines = (folder / "cells.jsonl").read_text().splitlines()
    assert lines
    for line in lines:
        record.validate(json.loads(line))
    jsonschema.validate(json.loads((folder / "manifest.json").read_text()), json_schema("manifest"))
    jsonschema.validate(json.loads((folder / "device.json").read_text()), json_schema("device"))


@pytest.mark.parametrize(
    "change",
    [{"latency_s": "fast"}, {"status": "fine"}, {"unknown": 1}, {"method": None}],
    ids=lambda change: next(iter(change)),
)
def test_what_is_no_record_does_not_meet_it(change: dict[str, Any]) -> None:
    line = json.loads((OLDEST / "cells.jsonl").read_text().splitlines()[0])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(line | change, json_schema("record"))


def test_the_schema_lists_the_columns_of_the_files() -> None:
    assert list(json_schema("record")["properties"]) == columns()


def test_a_new_column_comes_with_a_new_version() -> None:
    """Whoever adds a column or a key adds it to ADDED under a new version: readers of the old one must be told."""
    assert max(ADDED) == SCHEMA_VERSION
    # backward_s came within version 1, before this was watched.
    first = {*pd.read_csv(OLDEST / "results.csv", nrows=0).columns, "backward_s"}
    added = {name for parts in ADDED.values() for name in parts.get("record", ())}
    assert set(columns()) == first | added
    assert not first & added
    told = {name for parts in ADDED.values() for name in parts.get("manifest", ())}
    assert set(Manifest.model_fields) == set(json.loads((OLDEST / "manifest.json").read_text())) | told
    assert set(Device.model_fields) == set(json.loads((OLDEST / "device.json").read_text()))


def test_an_older_run_loads_and_what_it_lacks_is_empty() -> None:
    run = load_run(OLDEST)
    assert run.manifest.schema_version == 1
    assert run.manifest.sources == []
    assert list(run.frame.columns) == columns()
    assert run.frame["latency_s"].notna().any()
    assert run.frame[list(ADDED[2]["record"])].isna().all(axis=None)


def test_a_newer_run_is_refused_with_what_to_do(tmp_path: Path) -> None:
    folder = tmp_path / "newer"
    shutil.copytree(OLDEST, folder)
    told = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(told | {"schema_version": SCHEMA_VERSION + 1}))
    with pytest.raises(UserError, match=f"result schema {SCHEMA_VERSION + 1}; .*reads up to {SCHEMA_VERSION}. Upgrade"):
        load_run(folder)


@pytest.mark.parametrize("part", [None, *MODELS])
def test_the_command_prints_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], part: str | None
) -> None:
    monkeypatch.setattr(sys, "argv", ["pyramidbench", "schema", *([part] if part else [])])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out) == (json_schema(part) if part else schemas())


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(UserError, match="Did you mean 'record'"):
        json_schema("records")
