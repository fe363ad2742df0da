"""`pyramidbench compare` over runs on disk: its table, Markdown, JSON, exit codes and refusals."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyramidbench import cli
from pyramidbench.comparing.comparison import compare_methods, compare_runs, open_run
from pyramidbench.errors import UserError
from pyramidbench.store import load_run

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "results" / "reference"
Make = Callable[..., Path]


def cell(method: str, seq_len: int, latency_s: float | None, **columns: Any) -> dict[str, Any]:
    record: dict[str, Any] = {
        "cell": f"{method}-{seq_len}", "status": "ok", "method": method, "kind": "dense" if method == "dense" else "selection",
        "device": "Xeon", "batch": 1, "heads": 2, "kv_heads": 1, "head_dim": 64, "dtype": "float32", "causal": True,
        "pass": "forward", "input": "topics", "seq_len": seq_len, "seq_len_kv": seq_len, "parameters": "{}", "seed": 0,
        "latency_s": latency_s, "clock": "perf_counter", "samples": 40, "peak_memory_bytes": 50 << 20, "mass_kept": 0.9,
    }  # fmt: skip
    return record | columns


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Writes a run folder of these cells, with 40 raw samples each unless told; in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def write(
        name: str, cells: list[dict[str, Any]], *, samples: bool = True, manifest: Any = None, device: Any = None
    ) -> Path:
        folder = tmp_path / name
        (folder / "samples").mkdir(parents=True)
        told = {
            "schema_version": 1, "name": name, "created": "2026-01-01", "argv": ["pyramidbench"], "suite": {}, "version": "0.1",
            "settings": {"timing_s": 2.0, "files": {}}, "cells": [c["cell"] for c in cells],
        }  # fmt: skip
        machine = {
            "kind": "cpu", "name": "Xeon", "memory_bytes": 1, "threads": 1, "system": "Linux", "python": "3.11",
            "torch": "2.13.0", "triton": None, "cuda": None, "capability": None,
        }  # fmt: skip
        (folder / "manifest.json").write_text(json.dumps(told | (manifest or {})))
        (folder / "device.json").write_text(json.dumps(machine | (device or {})))
        lines = [json.dumps({k: v for k, v in c.items() if v is not None}) for c in cells]
        (folder / "cells.jsonl").write_text("".join(f"{line}\n" for line in lines))
        rng = np.random.default_rng(len(name))
        for c in cells if samples else []:
            if c["latency_s"]:
                np.save(folder / "samples" / f"{c['cell']}.npy", c["latency_s"] * rng.normal(1, 0.01, 40))
        return folder

    return write


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["pyramidbench", "compare", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, printed.out, printed.err

    return call


BEFORE = [cell("dense", 1024, 1e-3), cell("flat", 1024, 2e-3), cell("flat", 2048, 4e-3), cell("flat", 4096, 8e-3)]
AFTER = [
    cell("dense", 1024, 1e-3), cell("flat", 1024, 2.4e-3), cell("flat", 2048, 3e-3, mass_kept=0.8),
    cell("flat", 4096, None, status="oom", reason="out of memory", peak_memory_bytes=None, mass_kept=None),
]  # fmt: skip


def test_two_runs_cell_by_cell(make: Make, run: Callable[..., tuple[int, str, str]]) -> None:
    make("before", BEFORE), make("after", AFTER)
    code, out, err = run("before", "after")
    assert (code, err) == (0, "")
    rows = {tuple(line.split()[:2]): " ".join(line.split()) for line in out.splitlines()}
    assert "] same same same bootstrap" in rows["dense", "1k"]
    assert " 1.2" in rows["flat", "1k"]
    assert "] slower same same" in rows["flat", "1k"]
    assert "] faster same worse: mass -0.100" in rows["flat", "2k"]
    assert "lost lost lost" in rows["flat", "4k"]
    assert "Time, margin 2 %: 1 faster, 1 slower, 1 same, 1 lost" in out
    assert "Interval by bootstrap" in out


def test_the_same_run_twice_is_the_same(make: Make) -> None:
    run = load_run(make("once", BEFORE))
    frame = compare_runs(run, run).frame
    assert set(frame["time_verdict"]) == {"same"}
    assert set(frame["time_ratio"]) == {1.0}
    assert set(frame["quality_verdict"]) == {"same"}


def test_two_methods_of_one_run(make: Make, run: Callable[..., tuple[int, str, str]]) -> None:
    make("before", BEFORE)
    code, out, _ = run("before", "--method", "dense,flat", "--json")
    (row,) = json.loads(out)
    assert code == 0
    assert (row["method_a"], row["method_b"], row["seq_len"]) == ("dense", "flat", 1024)
    assert row["time_ratio"] == pytest.approx(2, rel=0.02)
    assert row["time_ratio_low"] < row["time_ratio"] < row["time_ratio_high"]
    assert row["interval_by"] == "bootstrap"


def test_pairs_are_used_where_two_methods_took_turns(make: Make) -> None:
    cells = [cell(method, 1024, 1e-3, session="s1") for method in ("dense", "flat")] + [
        cell("pyramid", 1024, 1e-3, session="s2")
    ]
    folder = make("turns", cells)
    run = load_run(folder)
    assert list(compare_methods(run, "dense", "flat").frame["interval_by"]) == ["paired"]
    assert list(compare_methods(run, "dense", "pyramid").frame["interval_by"]) == ["bootstrap"]
    assert set(compare_runs(run, load_run(make("again", cells))).frame["interval_by"]) == {"bootstrap"}
    np.save(folder / "samples" / "dense-1024.s2.npy", np.full(40, 2e-3))
    (ratio,) = compare_methods(run, "dense", "pyramid").frame["time_ratio"]
    assert ratio == pytest.approx(0.5, rel=0.02), "the reference counts by its times in that session"


@pytest.mark.parametrize(
    ("flags", "code", "told"),
    [
        (["--fail-on", "slower:5%"], 5, ["slower:5%: flat at 1k takes 1.2", "flat at 4k: no number any more, oom"]),
        (["--fail-on", "slower:50%"], 5, ["flat at 4k: no number any more, oom (out of memory)"]),
        (["--fail-on", "slower:50%", "--method", "dense"], 0, []),
        (["--fail-on", "quality:0.05"], 5, ["quality:0.05: flat at 2k has mass -0.100"]),
        (["--fail-on", "quality:0.5,slower:50%", "--method", "dense"], 0, []),
        (["--fail-on", "slower:5%", "--margin", "50%"], 5, ["flat at 1k takes 1.2"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_regression_ends_with_5_and_is_named(
    make: Make, run: Callable[..., tuple[int, str, str]], flags: list[str], code: int, told: list[str]
) -> None:
    make("before", BEFORE), make("after", AFTER)
    found, _, err = run("before", "after", *flags)
    assert found == code
    for part in told:
        assert part in err
    assert bool(err) == bool(told)


def test_markdown_is_a_table_in_which_what_got_worse_is_bold(
    make: Make, run: Callable[..., tuple[int, str, str]]
) -> None:
    make("before", BEFORE), make("after_2", AFTER)
    code, out, _ = run("before", "after_2", "--markdown")
    lines = out.splitlines()
    assert code == 0
    assert lines[0] == "A: before. B: after\\_2. 4 cells compared, B against A."
    head, rule, *rows = [line for line in lines if line.startswith("|")]
    assert len({line.count("|") for line in (head, rule, *rows)}) == 1
    assert len(rows) == 4
    assert "**slower**" in rows[1]
    assert "**worse: mass -0.100**" in rows[2]
    assert "**lost**" in rows[3]


def test_what_else_differs_between_the_runs_is_said(make: Make, run: Callable[..., tuple[int, str, str]]) -> None:
    (
        make("before", BEFORE[:3]),
        make("after", [AFTER[0], cell("pyramid", 512, 1e-3)], device={"torch": "2.14.0", "threads": 8}),
    )
    _, out, _ = run("before", "after")
    assert "torch: 2.13.0 in A, 2.14.0 in B." in out
    assert "threads: 1 in A, 8 in B." in out
    assert "Only in A: 2 cells (flat at 1k, flat at 2k)." in out
    assert "Only in B: 1 cell (pyramid at 512)." in out


def test_a_capture_that_changed_is_refused(make: Make, run: Callable[..., tuple[int, str, str]]) -> None:
    for name, digest in (("before", "a" * 64), ("after", "b" * 64)):
        make(name, BEFORE, manifest={"settings": {"files": {"x.safetensors": digest, "mine.py": digest}}})
    code, out, err = run("before", "after")
    assert (code, out) == (2, "")
    assert "'x.safetensors' is not the same file" in err
    assert run("before", "after", "--allow", "input")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["before"], ["one run and no two methods", "compare A B"]),
        (["before", "--method", "dense,flat,pyramid"], ["--method with two methods"]),
        (["before", "--method", "dense,flatt"], ["'flatt'", "Did you mean 'flat'"]),
        (["before", "gone"], ["'gone' is no run"]),
        (["before", "before", "--method", "flatt"], ["'flatt'", "Did you mean 'flat'"]),
        (["before", "other"], ["device (Xeon against EPYC)", "--allow device"]),
        (["before", "before", "--allow", "devices"], ["Did you mean 'device'"]),
        (["before", "before", "--margin", "2"], ["--margin '2'", "accepted: 2%"]),
        (["before", "before", "--fail-on", "slow:5%"], ["--fail-on 'slow:5%'", "slower:5%"]),
        (["before", "torn"], ["'torn-samples' is damaged"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_one_line(
    make: Make, run: Callable[..., tuple[int, str, str]], arguments: list[str], parts: list[str]
) -> None:
    make("before", BEFORE), make("other", [cell("dense", 1024, 1e-3, device="EPYC")])
    torn = make("torn", BEFORE)
    (torn / "samples" / "dense-1024.npy").write_bytes(b"torn")
    parts = ["dense-1024.npy' is damaged" if part.startswith("'torn-samples'") else part for part in parts]
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    for part in parts:
        assert part in err


def test_a_recorded_reference_is_named_and_needs_no_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    reference = open_run("prefill-h200")
    assert reference.path == Path("results/reference/prefill-h200")
    shutil.copytree(reference.path, tmp_path / "bare", ignore=shutil.ignore_patterns("samples"))
    bare = open_run(str(tmp_path / "bare"))
    frame = compare_runs(bare, bare).frame
    assert set(frame["interval_by"].dropna()) == {"intervals"}
    assert set(frame["memory_verdict"]) <= {"same", "none"}
    with pytest.raises(UserError, match="Did you mean 'demo-cpu'"):
        open_run("demo-cp")
