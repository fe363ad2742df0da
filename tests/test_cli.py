"""The command line: what it prints, its exit codes, and one line for each of a user's mistakes."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from filelock import FileLock

from pyramidbench import cli, registry
from pyramidbench.commands.measuring import exit_code
from pyramidbench.progress import SweepProgress
from pyramidbench.record import Status, columns
from pyramidbench.store import load_run

SWEEPING = importlib.import_module("pyramidbench.sweeping")
TINY = (
    "--seq", "64,128", "--method", "dense,flat", "--heads", "1", "--head-dim", "16", "--block-size", "16",
    "--query-tile", "16", "--top-k", "1", "--timing", "50ms", "--device", "cpu",
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What a command left behind."""

    code: int
    out: str
    err: str


Command = Callable[..., Outcome]


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    no_workers: None,  # noqa: ARG001
) -> Command:
    """Runs a command in an empty folder, in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["pyramidbench", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return Outcome(ended.value.code, printed.out, printed.err)

    return run


def refused(outcome: Outcome, *parts: str) -> None:
    """Exit code 2, nothing on stdout, and one line on stderr that holds these parts."""
    assert outcome.code == 2, outcome
    assert outcome.out == ""
    assert outcome.err.startswith("error: ")
    assert outcome.err.count("\n") == 1
    assert outcome.err.endswith("\n")
    for part in parts:
        assert part in outcome.err, outcome.err


def test_as_a_module_it_helps_without_waiting_for_torch() -> None:
    code = (
        "import runpy, sys\nsys.argv = ['pyramidbench', '--help']\n"
        "try:\n    runpy.run_module('pyramidbench', run_name='__main__')\n"
        "except SystemExit as end:\n    sys.exit(end.code or 100 * ('torch' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in ("sweep", "recall", "report", "capture", "list", "doctor"):
        assert name in done.stdout


@pytest.mark.parametrize("arguments", [(), ("--help",)])
def test_without_a_command_it_helps(command: Command, arguments: Sequence[str]) -> None:
    outcome = command(*arguments)
    assert outcome.code == 0
    assert "Usage: " in outcome.out
    assert outcome.err == ""


@pytest.mark.parametrize("name", ["sweep", "recall", "report", "capture", "list", "doctor"])
def test_every_command_helps(command: Command, name: str) -> None:
    outcome = command(name, "--help")
    assert outcome.code == 0
    assert f"pyramidbench {name}" in outcome.out


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("methods", ["pyramid", "dense", "flat", "exact_topk"]),
        ("suites", ["demo", "smoke"]),
        ("inputs", ["normal", "topics", "needles"]),
    ],
)
def test_list_shows_what_there_is(command: Command, what: str, expected: list[str]) -> None:
    table, machine = command("list", what), command("list", what, "--json")
    assert table.code == machine.code == 0
    entries = json.loads(machine.out)
    for name in expected:
        assert name in table.out
        assert name in [entry["name"] for entry in entries]
    assert all(entry["text"] for entry in entries)


def test_one_method_is_shown_with_every_parameter_and_preset(command: Command) -> None:
    outcome = command("list", "methods", "pyramid")
    assert outcome.code == 0
    for name in registry.parameter_names("pyramid"):
        assert f"  {name} = " in outcome.out
    for preset in registry.preset_names("pyramid"):
        assert f"  {preset}: " in outcome.out
    assert "arXiv 2609.31093" in outcome.out


def test_one_suite_and_one_input_are_shown(command: Command) -> None:
    assert "smoke: Every method once" in command("list", "suites", "smoke").out
    assert len(command("list", "inputs", "topics").out) > 80


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["swep"], ["swep"]),
        (["sweep", "--sequence", "4k"], ["--sequence"]),
        (["sweep", "--seed", "x"], ["--seed", "integer"]),
        (["sweep", "--seed", "-1", "--seq", "64"], ["--seed", "0"]),
        (["sweep"], ["no suite and no lengths", "--seq 4k..64k"]),
        (["sweep", "smok"], ["unknown suite 'smok'", "Did you mean 'smoke'"]),
        (["sweep", "dense", "pyramid"], ["extra argument", "`pyramidbench sweep --help` says what is accepted"]),
        (["list"], ["nothing to list was named", "methods, suites, inputs"]),
        (["sweep", "gone.toml"], ["gone.toml", "cannot be read"]),
        (["sweep", "smoke", "--top-k", "4"], ["suite 'smoke' has its own axes", "--top-k"]),
        (["sweep", "methods", "--seq", "3k"], ["suite 'methods' has no length of 3k", "16k, 64k, 256k"]),
        (["sweep", "smoke", "--pass", "train"], ["suite 'smoke' has its own axes", "leave out --pass,"]),
        (["sweep", "smoke", "--input", "x.safetensors"], ["asks for no capture", "x.safetensors"]),
        (["sweep", "demo"], ["--input FILE.safetensors"]),
        (["sweep", "--seq", "64", "--method", "pyramyd"], ["unknown method 'pyramyd'", "Did you mean 'pyramid'"]),
        (["sweep", "--seq", "64", "--method", "pyramid:fats"], ["pyramid", "'fats'", "Did you mean 'fast'"]),
        (["sweep", "--seq", "64", "--method", "mine.py"], ["method file 'mine.py' does not exist"]),
        (["sweep", "--seq", "64", "--input", "topic"], ["'topic'", "Did you mean 'topics'"]),
        (["sweep", "--seq", ""], ["--seq", "empty"]),
        (["sweep", "--seq", "64k..4k"], ["--seq '64k..4k'", "reversed"]),
        (["sweep", "--seq", "4q"], ["--seq", "4q", "accepted"]),
        (["sweep", "--seq", "0"], ["--seq", "below 1"]),
        (["sweep", "--seq", "64", "--top-k", "-1"], ["--top-k", "-1 is below 0"]),
        (["sweep", "--seq", "64", "--block-size", "0"], ["--block-size", "0 is below 1"]),
        (["sweep", "--seq", "64", "--query-tile", "0"], ["--query-tile", "0 is below 1"]),
        (["sweep", "--seq", "64", "--heads", "9:4"], ["--heads '9:4'", "cannot be shared evenly"]),
        (["sweep", "--seq", "64", "--sparsity", "1.5"], ["--sparsity", "1.5"]),
        (["sweep", "--seq", "64", "--keep", "0%"], ["--keep", "0%"]),
        (["sweep", "--seq", "64", "--keep", "5%", "--top-k", "3"], ["--keep", "--top-k"]),
        (["sweep", "--seq", "64", "--levels", "most"], ["--levels", "most", "full"]),
        (["sweep", "--seq", "64", "--dtype", "float8"], ["--dtype", "float8", "bfloat16"]),
        (["sweep", "--seq", "64", "--pass", "backwards"], ["backwards", "forward"]),
        (["sweep", "--seq", "64", "--device", "tpu"], ["device 'tpu' is not known"]),
        (["sweep", "--seq", "64", "--timing", "soon"], ["--timing", "soon", "90s"]),
        (["sweep", "--seq", "64", "--cell-budget", "0"], ["--cell-budget"]),
        (["sweep", "--seq", "64", "--input", "gone.safetensors"], ["input 'gone.safetensors' is not a file"]),
        (["sweep", "--seq", "64", "--input", "bad.safetensors"], ["bad.safetensors", "damaged"]),
        (["sweep", *TINY, "--out", "file/run"], ["cannot write to 'file/run'", "--out"]),
        (["sweep", *TINY, "--out", "file"], ["cannot write to 'file'", "--out"]),
        (["sweep", "bad.toml"], ["bad.toml", "not valid TOML"]),
        (["sweep", "keys.toml"], ["keys.toml", "unknown key 'sec'", "Did you mean 'seq'"]),
        (["recall", "--seq", "64", "--input", "normal"], ["measures no quality", "topics"]),
        (["list", "method"], ["'method'", "Did you mean 'methods'"]),
        (["list", "methods", "piramid"], ["'piramid'", "Did you mean 'pyramid'"]),
        (["list", "suites", "smok"], ["Did you mean 'smoke'"]),
        (["list", "inputs", "topic"], ["Did you mean 'topics'"]),
        (["report", "nowhere"], ["'nowhere' is no run"]),
        (["report"], ["argument"]),
        (["capture", "smollm2", "--tokens", "0"], ["--tokens", "0"]),
    ],
    ids=lambda value: " ".join(value)[:60] if value and isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_that_says_what_to_do(
    command: Command, tmp_path: Path, arguments: list[str], parts: list[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "bad.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{broken}")
    (tmp_path / "bad.toml").write_text('name = "x')
    (tmp_path / "keys.toml").write_text('name = "x"\n[[grid]]\nsec = "4k"\nmethods = ["dense"]\n')
    refused(command(*arguments), *parts)
    assert not (tmp_path / "results").exists()
    assert (tmp_path / "file").read_text() == "mine"


def test_a_dry_run_plans_and_writes_nothing(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(*_: object, **__: object) -> None:
        raise AssertionError("a dry run measures nothing")

    monkeypatch.setattr(SWEEPING, "run_plan", measure)
    outcome = command("sweep", *TINY, "--dry-run", "--input", "normal,topics", "--out", "run")
    assert outcome.code == 0
    assert "8 of 8 cells run" in outcome.out
    assert "  pass  " not in outcome.out
    passes = command("sweep", *TINY, "--dry-run", "--pass", "train,backward", "--out", "run")
    assert "8 of 8 cells run" in passes.out
    assert {"train", "backward"} <= set(passes.out.split())
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_shows_its_table_and_says_where_run_and_report_lie(command: Command, tmp_path: Path) -> None:
    outcome = command("sweep", *TINY, "--out", "run")
    assert outcome.code == 0
    assert "4 cells into run" in outcome.out
    assert "[4/4] flat at 128" in outcome.out
    assert "speed-up" in outcome.out
    assert "Run: run" in outcome.out
    assert "Report: reports/run/report.html" in outcome.out
    cells = tmp_path / "run" / "cells.jsonl"
    lines = cells.read_text().splitlines(keepends=True)
    cells.write_text("".join([*lines[:2], lines[2].replace('"status":"ok"', '"status":"oom"').replace("low_n", "oom")]))
    planned = command("sweep", *TINY, "--out", "run", "--dry-run")
    assert "2 of them are done in 'run'; the same command measures the others there." in planned.out
    cells.write_text("".join(lines))
    assert (tmp_path / "reports" / "run" / "report.html").is_file()
    assert load_run(tmp_path / "run").manifest.argv[:2] == ["pyramidbench", "sweep"]
    again = command("sweep", *TINY, "--out", "run")
    assert again.code == 0
    assert "4 cells into run; 4 are there already" in again.out
    shown = command("report", "run", "--out", "elsewhere")
    assert shown.code == 0
    assert (tmp_path / "elsewhere" / "report.html").is_file()
    refused(command("sweep", *TINY, "--out", "run", "--top-k", "2"), "'run' holds another sweep", "--fresh")
    with FileLock(tmp_path / "run" / ".lock"):
        refused(command("sweep", *TINY, "--out", "run"), "another process is writing 'run'", "--out")
    (tmp_path / "file").write_text("")
    refused(command("report", "run", "--out", "file/report"), "cannot write the report to 'file/report'")
    (tmp_path / "run" / "manifest.json").write_text("{")
    refused(command("report", "run"), "'run' is damaged")
    refused(command("sweep", *TINY, "--out", "run"), "'run' is damaged")
    assert len((tmp_path / "run" / "cells.jsonl").read_text().splitlines()) == 4


def test_where_nothing_draws_a_sweep_is_kept_and_says_how_to_get_its_report(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [*sys.modules]:
        if name.startswith("pyramidbench.reporting"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    outcome = command("sweep", *TINY, "--out", "run")
    assert outcome.code == 2
    assert "Run: run" in outcome.out
    assert "`pyramidbench report run`" in outcome.err.splitlines()[-1]
    assert load_run(tmp_path / "run").missing == 0
    refused(command("report", "run"), "vl_convert is not installed here", "pip install altair vl-convert-python")


def test_a_training_pass_is_measured_beside_dense(command: Command) -> None:
    outcome = command("sweep", *TINY, "--pass", "train", "--out", "run")
    assert outcome.code == 0, outcome.err
    assert "[4/4] flat at 128 train, " in outcome.out
    assert ", causal, train, blocks of 16" in outcome.out
    frame = load_run(Path("run")).frame
    assert set(frame["pass"]) == {"train"}
    assert (frame["backward_s"] < frame["latency_s"]).any()
    assert frame["speedup"].notna().all()


def test_json_is_for_scripts_and_progress_goes_elsewhere(command: Command) -> None:
    outcome = command("sweep", *TINY, "--out", "run", "--json")
    rows = json.loads(outcome.out)
    assert outcome.code == 0
    assert [(row["method"], row["seq_len"]) for row in rows] == [
        ("dense", 64), ("flat", 64), ("dense", 128), ("flat", 128),
    ]  # fmt: skip
    assert list(rows[0]) == columns()
    assert rows[0]["selected_blocks"] is None
    assert rows[1]["speedup"] > 0
    assert "[4/4]" in outcome.err


def test_recall_measures_quality_alone(command: Command) -> None:
    axes = (
        "--seq", "64,128", "--method", "flat,exact_topk", "--block-size", "16", "--query-tile", "16", "--top-k", "1",
        "--device", "cpu",
    )  # fmt: skip
    outcome = command("recall", *axes, "--out", "run", "--json")
    assert outcome.code == 0, outcome.err
    rows = json.loads(outcome.out)
    assert {row["latency_s"] for row in rows} == {None}
    assert [row["recall"] for row in rows if row["method"] == "exact_topk" and row["seq_len"] == 128] == [1.0]
    table = command("recall", *axes, "--out", "run", "--by", "length,head")
    assert table.code == 0
    assert "exact_topk" in table.out
    refused(command("recall", *axes, "--out", "run", "--by", "lenth"), "'lenth'", "Did you mean 'length'")


def test_several_methods_may_be_given_apart_or_with_commas(command: Command) -> None:
    one = command("sweep", "--seq", "64", "--method", "dense,flat", "--dry-run", "--device", "cpu")
    two = command("sweep", "--seq", "64", "--method", "dense", "--method", "flat", "--dry-run", "--device", "cpu")
    assert one.code == two.code == 0
    assert "2 of 2 cells run" in one.out
    assert "2 of 2 cells run" in two.out


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        (["ok", "ok"], 0), (["low_n"], 0), (["ok", "skipped"], 0), (["ok", "unsupported"], 0), (["ok", "crashed"], 3),
        (["ok", "oom", "oom_predicted"], 3), (["ok", "timeout"], 3), (["ok", "cuda_error"], 3),
        (["ok", "incorrect", "oom"], 4), (["incorrect"], 4), (["skipped", "unsupported"], 6), (["oom"], 6), ([], 6),
    ],
)  # fmt: skip
def test_exit_codes_tell_how_a_sweep_ended(statuses: list[Status], code: int) -> None:
    run: Any = SimpleNamespace(records=[SimpleNamespace(status=status, method="dense") for status in statuses])
    assert exit_code(run.records) == code


def test_a_sweep_that_measures_nothing_ends_with_6(command: Command) -> None:
    outcome = command("sweep", *TINY, "--out", "run", "--cell-budget", "10ms")
    assert outcome.code == 6
    assert "exceeds the cell budget" in outcome.out


WRONG = '''
from dataclasses import dataclass
from pyramidbench.methods.dense import Dense

@dataclass(frozen=True)
class Wrong(Dense):
    """Dense attention, twice."""

    def attend(self, q, k, v, selection, problem):
        return 2 * super().attend(q, k, v, selection, problem)
'''


def test_a_method_that_computes_something_wrong_ends_with_4_and_shows_no_speed(
    command: Command, tmp_path: Path
) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    outcome = command("sweep", *TINY, "--out", "run", "--method", "wrong.py")
    assert outcome.code == 4
    assert "incorrect" in outcome.out
    by_method = {record.method: record for record in load_run(tmp_path / "run").records}
    assert by_method["wrong.py"].latency_s is None
    assert by_method["dense"].latency_s is not None


@pytest.mark.parametrize("where", ["the sweep", "the plan"])
def test_an_interruption_is_one_line_and_code_130(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    if where == "the sweep":
        monkeypatch.setattr(SweepProgress, "finished", interrupt)
    else:
        monkeypatch.setattr(SWEEPING, "make_plan", interrupt)
    outcome = command("sweep", *TINY, "--out", "run")
    assert outcome.code == 130
    assert outcome.err == "error: interrupted; what was measured is safe, and the same command goes on from there.\n"
    if where == "the sweep":
        assert len(load_run(tmp_path / "run").records) == 1


def test_a_real_command_without_a_terminal_prints_plain_text(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pyramidbench", "sweep", "--seq", "64..8"],
        capture_output=True, text=True, check=False, cwd=tmp_path, env={**os.environ, "TERM": "xterm-256color"},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: --seq '64..8': the range is reversed")
    assert done.stderr.count("\n") == 1
