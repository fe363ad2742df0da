"""What is left when a whole sweep is killed, and that two never share a folder: in real processes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyramidbench.record import MEASURED
from pyramidbench.store import load_run

SWEEP = [
    "sweep", "--seq", "64,96", "--method", "dense,sliding_window", "--top-k", "1", "--block-size", "16", "--query-tile", "16",
    "--head-dim", "8", "--timing", "200ms", "--device", "cpu",
]  # fmt: skip


def start(folder: Path, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pyramidbench", *SWEEP, "--out", str(folder / "run")]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for(reached: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 90
    while not reached():
        assert process.poll() is None, "the sweep ended before the drill"
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_parent_that_is_killed_at_any_moment_leaves_a_run_that_goes_on(tmp_path: Path) -> None:
    """Killed while cells are judged, while they are timed, and between two groups; no cell on disk is measured again."""
    cells, judged = tmp_path / "run" / "cells.jsonl", tmp_path / "run" / "judged.jsonl"
    moments: list[Callable[[], bool]] = [
        lambda: lines(judged) == 1, lambda: lines(cells) == 1, lambda: lines(judged) > 2,
    ]  # fmt: skip
    known: list[str] = []
    for moment in moments:
        with start(tmp_path) as process:
            if not moment():
                wait_for(moment, process)
            process.kill()
        run = load_run(tmp_path / "run")
        now = [record.model_dump_json() for record in run.records]
        assert now[: len(known)] == known
        known = now
    with start(tmp_path) as process:
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    run = load_run(tmp_path / "run")
    assert (run.missing, len(run.records)) == (0, 4)
    assert [record.model_dump_json() for record in run.records][: len(known)] == known
    assert {record.status for record in run.records} <= set(MEASURED)
    written = Counter(json.loads(line)["cell"] for line in cells.read_text().splitlines())
    assert set(written.values()) == {1}, "a cell that was on disk has been measured again"
    assert set(Counter(json.loads(line)["cell"] for line in judged.read_text().splitlines()).values()) == {1}
    assert "Run: " in out


def test_the_second_of_two_parents_is_refused(tmp_path: Path) -> None:
    with start(tmp_path) as first:
        wait_for((tmp_path / "run" / "manifest.json").exists, first)
        with start(tmp_path) as second:
            _, err = second.communicate(timeout=90)
        assert second.returncode == 2
        assert err.strip().splitlines()[-1] == (
            f"error: another process is writing '{tmp_path / 'run'}'. Wait for it, or give another --out."
        )
        first.send_signal(signal.SIGINT)
        _, err = first.communicate(timeout=90)
        assert first.returncode in (0, 130), err
    assert load_run(tmp_path / "run").manifest.name == "sweep"
