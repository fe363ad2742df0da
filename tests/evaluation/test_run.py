"""Running an evaluation: resumed by sample, one record each, a report that says what is lost; mistakes are one line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from pyramidbench import sparse_layer
from pyramidbench.cli import main
from pyramidbench.errors import UserError
from pyramidbench.evaluation.journal import SAMPLES, load_evaluation
from pyramidbench.evaluation.language_model import LanguageModel
from pyramidbench.evaluation.report import write_report
from pyramidbench.evaluation.request import Request, prepare
from pyramidbench.evaluation.running import evaluate, steps
from pyramidbench.evaluation.summary import by_position, summarise, wilson
from pyramidbench.model_files import silent
from pyramidbench.registry import method_class
from pyramidbench.texts import Passage


def request(folder: Path, story: Path, **changes: Any) -> Request:
    settings = {
        "tasks": "perplexity,single_needle", "model": str(folder), "method": ("dense,pyramid,flat",), "top_k": "1,2",
        "query_tile": 32, "length": "1k", "depths": 2, "text": str(story), "device": "cpu", **changes,
    }  # fmt: skip
    return Request(**settings)


@pytest.fixture(scope="session")
def text(story: Passage, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "story.txt"
    path.write_text(story.text)
    return path


@pytest.fixture(scope="session")
def run(tiny_folder: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("runs") / "evaluation"
    return prepare(request(tiny_folder, text, out=out)).run(silent)


def test_every_sample_has_a_row_under_every_attention(run: Any) -> None:
    frame = run.frame
    assert len(frame) == 3 * 5
    assert run.missing == 0
    assert set(frame["status"]) == {"ok"}
    sparse = frame[frame["method"] != "dense"]
    assert (sparse["sparse_calls"] > 0).all()
    assert (sparse["choice_share"] > 0.5).all()
    assert sparse["density"].between(0.1, 0.9).all()
    assert sorted(sparse["top_k"].unique()) == [1, 2]
    dense = frame[frame["method"] == "dense"]
    assert dense[["choice_share", "density", "top_k"]].isna().all(axis=None)
    assert (dense["dense_calls"] > 0).all()


def test_a_run_that_was_torn_resumes_with_the_next_sample(
    run: Any, tiny_folder: Path, text: Path, tmp_path: Path
) -> None:
    lines = (run.path / SAMPLES).read_bytes().splitlines(keepends=True)
    for name in ("manifest.json", "device.json"):
        (tmp_path / name).write_bytes((run.path / name).read_bytes())
    (tmp_path / SAMPLES).write_bytes(b"".join(lines[:9]) + lines[9][:40])
    assert load_evaluation(tmp_path).missing == 6
    said: list[str] = []
    again = prepare(request(tiny_folder, text, out=tmp_path)).run(said.append)
    assert said[0] == "6 samples to do, 9 done before"
    assert again.missing == 0
    assert again.frame["cell"].tolist() == run.frame["cell"].tolist()
    assert again.frame["score"].tolist() == run.frame["score"].tolist()
    assert (tmp_path / SAMPLES).read_bytes().splitlines(keepends=True)[:9] == lines[:9]


def test_another_evaluation_does_not_go_into_the_same_folder(run: Any, tiny_folder: Path, text: Path) -> None:
    with pytest.raises(UserError, match=r"holds another evaluation. Give another --out, or --fresh"):
        prepare(request(tiny_folder, text, out=run.path, seed=1)).run(silent)


def test_differences_are_to_dense_on_the_same_samples(run: Any) -> None:
    summary = summarise(run.frame)
    dense = summary[summary["method"] == "dense"].set_index("task")["score"]
    for row in summary.to_dict("records"):
        assert row["difference"] == pytest.approx(row["score"] - dense[row["task"]], abs=1e-9)
    positions = by_position(run.frame)
    assert len(positions) == 5
    assert positions.loc[positions["method"] == "dense", "difference"].abs().max() == 0


def test_a_full_budget_scores_as_dense_attention(tiny_folder: Path, text: Path, tmp_path: Path) -> None:
    found = prepare(request(tiny_folder, text, tasks="perplexity", keep="100%", top_k=None, out=tmp_path / "full"))
    frame = found.run(silent).frame
    assert frame["score"].max() - frame["score"].min() < 1e-5
    assert frame["choice_share"].dropna().max() == 0


def test_the_report_shows_every_figure_and_marks_what_chose_nothing(run: Any, tmp_path: Path) -> None:
    page = write_report([run], tmp_path).read_text()
    assert {path.name for path in tmp_path.iterdir()} == {
        "summary.md", "results.csv", "quality-perplexity.png", "quality-retrieval.png", "positions.png",
        "heat-single_needle-top_k-1.png", "heat-single_needle-top_k-2.png",
    }  # fmt: skip
    assert page.count("| perplexity |") == 5
    assert "dense in disguise" not in page
    run.frame.loc[run.frame["top_k"] == 2, "choice_share"] = 0.1
    try:
        assert write_report([run], tmp_path).read_text().count("dense in disguise") == 4
    finally:
        del run.frame


def test_times_stand_beside_the_quality_and_are_named(run: Any, tmp_path: Path) -> None:
    assert "times of the figures" not in write_report([run], tmp_path / "without").read_text()
    page = write_report([run], tmp_path / "with", times=run).read_text()
    assert f"- times of the figures: `pyramidbench {' '.join(run.manifest.argv)}`, alone on {run.device.name}" in page
    wide, narrow = (tmp_path / name / "quality-perplexity.png" for name in ("with", "without"))
    assert wide.read_bytes() != narrow.read_bytes()


def test_an_unfinished_evaluation_says_so(run: Any, tmp_path: Path) -> None:
    for name in ("manifest.json", "device.json"):
        (tmp_path / name).write_bytes((run.path / name).read_bytes())
    (tmp_path / SAMPLES).write_bytes(b"".join((run.path / SAMPLES).read_bytes().splitlines(keepends=True)[:3]))
    page = write_report([load_evaluation(tmp_path)], tmp_path / "report").read_text()
    assert "3 of 15 planned rows are measured." in page


def test_wilson_s_interval() -> None:
    low, high = wilson(9, 10)
    assert (round(low, 3), round(high, 3)) == (0.596, 0.982)
    assert wilson(0, 5)[0] == 0


def test_a_share_is_of_the_tokens_that_are_named(tiny_folder: Path, text: Path) -> None:
    plan = prepare(request(tiny_folder, text, top_k=None, keep="5%,10%,20%,40%", query_tile=None))
    assert [one.given["top_k"] for one in plan.attentions if one.method == "pyramid"] == [6, 13, 26, 51]
    assert plan.describe()[-1] == "budgets: keep=5% (K 6), keep=10% (K 13), keep=20% (K 26), keep=40% (K 51)"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": "perplexit"}, "unknown task 'perplexit'. Did you mean 'perplexity'"),
        ({"method": ("dens",)}, "unknown method 'dens'. Did you mean 'dense'"),
        ({"length": "8q"}, "--length"),
        ({"keep": "5%"}, "--keep and --top-k were both given"),
        ({"top_k": None, "keep": "5"}, "keep '5'"),
        ({"text": "emmma"}, "unknown text 'emmma'. Did you mean 'emma'"),
        ({"text": "absent.txt"}, "text 'absent.txt' cannot be read"),
    ],
)
def test_requests_that_cannot_be(tiny_folder: Path, text: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        prepare(request(tiny_folder, text, **changes))


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["nope"], 2, "error: unknown task 'nope'. Accepted: all, associative_recall"),
        (["perplexity", "--model", "./absent", "--dry-run"], 0, "perplexity: 1 samples × 4 attentions"),
        (["perplexity", "--model", "./absent"], 2, "error: model './absent' does not exist"),
        (["--report", "absent"], 2, "error: 'absent' is no evaluation"),
        (["--fetch", "nothing"], 2, "error: unknown package 'nothing'"),
    ],
)
def test_the_command_line_says_one_line(
    arguments: list[str], code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["pyramidbench", "evaluate", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    out, err = capsys.readouterr()
    assert end.value.code == code
    assert (out + err).startswith(said)
    assert err.count("\n") == (code == 2)


def test_the_command_line_writes_a_report_again(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["pyramidbench", "evaluate", "--report", str(run.path), "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("Report: ")
    assert (tmp_path / "summary.md").is_file()


def test_a_method_that_cannot_do_the_model_is_a_row_with_a_reason(
    tiny_folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(method_class("flat"), "unsupported", lambda *_: "a reason")
    monkeypatch.setattr(sparse_layer, "_checked", sparse_layer._checked.__wrapped__)
    plan = prepare(request(tiny_folder, text, tasks="perplexity", top_k="1", out=tmp_path / "run"))
    done = plan.run(silent)
    lost = done.frame[done.frame["status"] == "unsupported"]
    assert list(lost["method"]) == ["flat"]
    assert lost["score"].isna().all()
    assert "1 rows of flat: method 'flat' cannot do" in write_report([done], tmp_path / "report").read_text()


def test_models_and_folders_that_cannot(tiny_folder: Path, text: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="4096 tokens are more than the 2048 positions of tiny; ask for at most 2048"):
        prepare(request(tiny_folder, text, length="4k", out=tmp_path / "long")).run(silent)
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((tiny_folder / "config.json").read_bytes())
    with pytest.raises(
        UserError, match=r"bare' holds no weights \(\*.safetensors or \*.bin\); put them there, or name"
    ):
        prepare(request(bare, text, out=tmp_path / "bare-out")).run(silent)
    with pytest.raises(UserError, match=r"is no evaluation: it has no manifest.json"):
        load_evaluation(tmp_path)


def test_a_run_ends_by_the_clock_and_goes_on(tiny_folder: Path, text: Path, tmp_path: Path) -> None:
    said: list[str] = []
    stopped = prepare(request(tiny_folder, text, tasks="perplexity", minutes=0.0, out=tmp_path)).run(said.append)
    assert said[-1] == "5 samples are left: the time is up; the same command goes on with them"
    assert (stopped.missing, len(stopped.frame)) == (5, 0)
    assert "0 of 5 planned rows are measured" in write_report([stopped], tmp_path / "report").read_text()
    done = prepare(request(tiny_folder, text, tasks="perplexity", out=tmp_path)).run(silent)
    assert done.missing == 0


def test_tasks_take_turns_and_attentions_share_a_round(tiny_folder: Path, text: Path) -> None:
    plan = prepare(request(tiny_folder, text, samples=2, top_k="1", depths=1))
    order = [(step.task.name, step.sample.index) for step in steps(plan.tasks, plan.attentions, plan.asked)]
    assert list(dict.fromkeys(order)) == [
        ("perplexity", 0), ("single_needle", 0), ("perplexity", 1), ("single_needle", 1),
    ]  # fmt: skip
    assert order[:3] == [("perplexity", 0)] * 3


def test_a_row_says_what_ran_it_and_in_which_dtype(run: Any, tiny_folder: Path, text: Path, tmp_path: Path) -> None:
    rows = {row["method"]: row for row in run.frame.to_dict("records")}
    assert {row["dtype"] for row in rows.values()} == {"float32"}
    assert rows["pyramid"]["backend"] == "reference"
    assert rows["dense"]["backend"] == "sdpa-flash"
    half = prepare(request(tiny_folder, text, tasks="perplexity", dtype="bfloat16", out=tmp_path)).run(silent)
    assert set(half.frame["dtype"]) == {"bfloat16"}
    assert half.frame["score"].iloc[0] == pytest.approx(run.frame["score"].iloc[0], rel=0.01)
    with pytest.raises(UserError, match="holds another evaluation"):
        prepare(request(tiny_folder, text, tasks="perplexity", out=tmp_path)).run(silent)


def test_samples_that_are_measured_together_share_time_and_counts(
    tiny: LanguageModel, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny, "side_by_side", 8)
    plan = prepare(request(tmp_path, text, tasks="associative_recall", top_k="1", depths=3))
    found = evaluate(tiny, plan.tasks, plan.attentions, plan.asked, tmp_path / "run", silent)
    for _, rows in found.frame.groupby("method"):
        assert len(rows) == 3
        assert rows["seconds"].nunique() == 1
        assert rows["expected"].nunique() == 3


def test_one_report_of_several_evaluations(run: Any, tiny_folder: Path, text: Path, tmp_path: Path) -> None:
    other = prepare(request(tiny_folder, text, tasks="associative_recall", top_k="1", out=tmp_path / "b")).run(silent)
    page = write_report([run, other], tmp_path / "report").read_text()
    assert "| perplexity |" in page
    assert "| associative_recall |" in page
    assert page.count("- command: ") == 2
    other.manifest.__dict__["model"] = "another"
    with pytest.raises(UserError, match="one report is of one model on one device; these are of another on"):
        write_report([run, other], tmp_path / "report")


def test_an_attention_that_fails_is_left_out_and_the_others_go_on(
    tiny_folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no such kernel")

    said: list[str] = []
    plan = prepare(request(tiny_folder, text, tasks="perplexity", samples=2, top_k="1", length="512", out=tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr(method_class("flat"), "select", broken)
        with pytest.raises(UserError, match=r"flat top_k=1 failed, see '.*errors.txt'; all others are measured"):
            plan.run(said.append)
    assert "flat top_k=1 failed and is left out: RuntimeError: no such kernel" in said
    assert (tmp_path / "errors.txt").read_text().count("Traceback") == 1
    assert load_evaluation(tmp_path).missing == 2
    assert plan.run(silent).missing == 0
