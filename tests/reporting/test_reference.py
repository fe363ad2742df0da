"""The committed reference runs: they load, and their committed reports are what the code makes of them today."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pyramidbench.record import MEASURED
from pyramidbench.reporting.write import Source, write_report
from pyramidbench.store import load_run

ROOT = Path(__file__).parents[2]
MANIFESTS = sorted((ROOT / "results" / "reference").glob("*/manifest.json"))
RUNS = [path.parent for path in MANIFESTS if "kind" not in json.loads(path.read_text())]
"""Sweeps; the manifest of an evaluation says that it is one."""
UNFINISHED: dict[str, str] = {}
"""Runs whose command was stopped before its last cell, each with the reason."""


def test_there_are_reference_runs() -> None:
    assert {run.name for run in RUNS} >= {"demo-cpu", "prefill-h200"}


@pytest.mark.parametrize("folder", RUNS, ids=lambda folder: folder.name)
def test_a_reference_run_is_whole_and_names_no_folder_of_its_machine(folder: Path) -> None:
    run = load_run(folder)
    assert (run.missing > 0) == (folder.name in UNFINISHED)
    assert {record.status for record in run.records} & set(MEASURED)
    assert not any(word.startswith("/") for word in run.manifest.argv)


@pytest.mark.parametrize("folder", RUNS, ids=lambda folder: folder.name)
def test_a_reference_report_regenerates_from_its_run(folder: Path, tmp_path: Path) -> None:
    """Text files letter by letter, and the data of every chart; fonts may differ between machines, so no pictures."""
    write_report([Source.of(load_run(folder))], tmp_path)
    committed = ROOT / "reports" / "reference" / folder.name
    again = f"run `pyramidbench report results/reference/{folder.name} --out reports/reference/{folder.name}`"
    for name in ("summary.md", "results.csv"):
        assert (tmp_path / name).read_text() == (committed / name).read_text(), f"{name}: {again}"
    assert embedded_data(tmp_path) == embedded_data(committed), again
    assert kept(tmp_path) == kept(committed), again


def kept(report: Path) -> set[str]:
    """Names of the files that are committed: SVGs, half of a report's bytes, are not."""
    return {path.name for path in report.iterdir() if path.suffix != ".svg"}


def embedded_data(report: Path) -> object:
    """What a page's charts are drawn from."""
    found = re.search(r'id="data">(.*?)</script>', (report / "report.html").read_text(encoding="utf-8"))
    assert found is not None
    return json.loads(found[1])


def test_reference_reports_stay_small() -> None:
    """The repository keeps every version of them."""
    files = [path for path in (ROOT / "reports" / "reference").rglob("*") if path.is_file() and path.suffix != ".svg"]
    sizes = {path: path.stat().st_size for path in files}
    assert max(sizes.values()) < 1_000_000
    assert sum(sizes.values()) < 18_000_000


def test_the_demo_reproduces_the_order_of_the_selections() -> None:
    frame = load_run(ROOT / "results" / "reference" / "demo-cpu").frame
    variant = (frame["method"] == "pyramid") & frame["parameters"].str.contains('"beam": 1.0')
    same = frame[(frame["seq_len"] == 8192) & (frame["top_k"] == 8) & ~variant]
    for tile in (1, 64):
        recall = same[same["query_tile"] == tile].groupby("method")["recall"].mean()
        order = ["exact_topk", "pyramid", "flat:exact", "pyramid:paper", "flat", "sliding_window"]
        assert recall[order].is_monotonic_decreasing
        assert recall["pyramid"] >= 0.93
        assert 0.70 <= recall["pyramid:paper"] <= 0.80
