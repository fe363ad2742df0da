"""The committed reference runs: they load, and their committed reports are what the code makes of them today."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyramidbench.record import MEASURED
from pyramidbench.report import write_report
from pyramidbench.store import load_run

ROOT = Path(__file__).parent.parent
RUNS = sorted(path.parent for path in (ROOT / "results" / "reference").glob("*/manifest.json"))


def test_there_are_reference_runs() -> None:
    assert {run.name for run in RUNS} >= {"demo-cpu", "prefill-h200"}


@pytest.mark.parametrize("folder", RUNS, ids=lambda folder: folder.name)
def test_a_reference_run_is_whole_and_names_no_folder_of_its_machine(folder: Path) -> None:
    run = load_run(folder)
    assert run.missing == 0
    assert {record.status for record in run.records} & set(MEASURED)
    assert not any(word.startswith("/") for word in run.manifest.argv)


@pytest.mark.parametrize("folder", RUNS, ids=lambda folder: folder.name)
def test_a_reference_report_regenerates_from_its_run(folder: Path, tmp_path: Path) -> None:
    run = load_run(folder)
    write_report(run.frame, run.manifest.model_dump(), run.device.model_dump(), tmp_path)
    committed = ROOT / "reports" / "reference" / folder.name
    for name in ("summary.md", "results.csv"):
        assert (tmp_path / name).read_text() == (committed / name).read_text(), (
            f"{name}: run `pyramidbench report` again"
        )
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in committed.iterdir()}


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
