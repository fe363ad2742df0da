"""The committed evaluations and trainings: whole rounds of a machine that no file names, and reports that are what the code
makes of them today."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pyramidbench.evaluation import figures
from pyramidbench.evaluation.journal import load_evaluation
from pyramidbench.evaluation.report import write_report
from pyramidbench.evaluation.summary import sample_key, summarise
from pyramidbench.training import drawing
from pyramidbench.training.drawing import write_training_report

ROOT = Path(__file__).parents[2]
RESULTS, REPORTS = ROOT / "results" / "reference", ROOT / "reports" / "reference"
MANIFESTS = sorted(RESULTS.glob("*/manifest.json"))
EVALUATIONS = [path.parent for path in MANIFESTS if json.loads(path.read_text()).get("kind") == "evaluation"]
REPORTED = {
    "smollm2-h200": (
        "perplexity", "recall", "single-needle-0", "single-needle-4k", "single-needle-8k", "multi-key-0", "multi-key-4k",
        "multi-key-8k", "values", "multi-value", "multi-query", "tracking", "choices-1", "choices-2", "shots-8k-1",
        "shots-8k-2", "zero-shot",
    ),
    "smollm2-needle-cpu": ("needle-cpu",),
    "smollm2-retrieval": ("retrieval",),
    "smollm2-zero-shot-cpu": ("zero-shot-cpu", "several-cpu", "tracking-cpu"),
}  # fmt: skip
"""The evaluations that a report is made of, in their order."""
TIMED = {"smollm2-h200": "timed"}
"""The evaluation that was made alone, whose times stand in a report's figures."""
LEFT_OUT = {("smollm2-choices-2", "goal_inference", "pyramid", "keep=5%")}
"""Attentions that failed in a run, whose samples the others have."""


@pytest.mark.parametrize("folder", EVALUATIONS, ids=lambda folder: folder.name)
def test_an_evaluation_is_of_whole_rounds_and_names_no_folder_of_its_machine(folder: Path) -> None:
    evaluation = load_evaluation(folder)
    frame, manifest = evaluation.frame, evaluation.manifest
    assert not any(word.startswith("/") for word in manifest.argv)
    assert set(frame["cell"]) <= set(manifest.cells)
    asked = {(one["method"], one["budget"]) for one in manifest.settings["attentions"]}
    for budget in frame["budget"].dropna().unique():
        expected = {method for method, of in asked if of in (None, budget)}
        shown = frame[frame["budget"].isna() | (frame["budget"] == budget)]
        samples = {sample_key(row) for row in shown[shown["budget"] == budget].to_dict("records")}
        rows: dict[Any, set[str]] = {}
        for row in shown.to_dict("records"):
            rows.setdefault((row["task"], sample_key(row)), set()).add(row["method"])
        for (task, sample), methods in rows.items():
            if sample in samples:
                lost = {method for one, of, method, at in LEFT_OUT if (one, of, at) == (folder.name, task, budget)}
                assert methods == expected - lost


def test_every_evaluation_of_several_attentions_is_in_a_report() -> None:
    reported = {f"smollm2-{name}" for names in REPORTED.values() for name in names}
    reported |= {f"smollm2-{name}" for name in TIMED.values()}
    assert reported == {path.name for path in EVALUATIONS} - {"smollm2-commonsense-dense"}


@pytest.mark.parametrize("name", REPORTED)
def test_a_report_is_what_its_evaluations_say(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "save", lambda _canvas, folder, name: (folder / f"{name}.png").touch())
    evaluations = [load_evaluation(RESULTS / f"smollm2-{one}") for one in REPORTED[name]]
    times = load_evaluation(RESULTS / f"smollm2-{TIMED[name]}") if name in TIMED else None
    write_report(evaluations, tmp_path, times)
    again = " ".join(f"--report results/reference/smollm2-{one}" for one in REPORTED[name])
    again += f" --times results/reference/smollm2-{TIMED[name]}" if name in TIMED else ""
    assert_same(tmp_path, REPORTS / name, f"run `pyramidbench evaluate {again} --out reports/reference/{name}`")


def test_the_report_of_the_training_is_what_its_rows_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "save", lambda _canvas, folder, name: (folder / f"{name}.png").touch())
    write_training_report(RESULTS / "trained-decoder", tmp_path)
    again = "run `python -m pyramidbench.training report RESULTS --out REPORT` for trained-decoder"
    assert_same(tmp_path, REPORTS / "trained-decoder", again)


def assert_same(made: Path, committed: Path, again: str) -> None:
    """The words and the names of the files; fonts may differ between machines, and results.csv is kept where it is small."""
    assert (made / "summary.md").read_text() == (committed / "summary.md").read_text(), again
    names = {path.name for path in committed.iterdir()}
    assert {path.name for path in made.iterdir()} - {"results.csv"} == names - {"results.csv"}, again
    if "results.csv" in names:
        assert (made / "results.csv").read_text() == (committed / "results.csv").read_text(), again


def test_the_table_of_losses_in_the_docs_is_that_of_the_rows() -> None:
    summary = summarise(load_evaluation(RESULTS / "smollm2-perplexity").frame)
    found = {
        (row["method"], row["text"], row["budget"]): row["difference"] for row in summary.to_dict("records")
    }  # fmt: skip
    text = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    start = text.index("| attention | *Emma* 5 % |")
    lines = text[start : text.index("\n\n", start)].splitlines()[2:]
    assert len(lines) == 8
    budgets = [(name, f"keep={share}%") for name in ("emma", "python-stdlib") for share in (5, 10, 20, 40)]
    for line in lines:
        method, *told = (cell.strip() for cell in line.strip("|").split("|"))
        name = method.split("`")[1]
        for (of, budget), cell in zip(budgets, told, strict=True):
            assert float(cell.replace("−", "-")) == pytest.approx(found[name, of, budget], abs=6e-4), (name, of, budget)
