"""Merging runs: what becomes one row, what is a conflict, what comes along, and what is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyramidbench import cli
from pyramidbench.device import Device
from pyramidbench.errors import UserError
from pyramidbench.merging import joined_device, plan_merge, write_merged
from pyramidbench.samples import load_samples
from pyramidbench.store import Run, load_run

Make = Callable[..., Run]
H200, XEON = "NVIDIA H200", "Intel(R) Xeon(R) Processor, 2 threads"


def cell(name: str, latency_s: float | None = 1e-3, status: str = "ok", **columns: Any) -> dict[str, Any]:
    kind, length = name.split("-")
    usual: dict[str, Any] = {
        "cell": name, "status": status, "method": kind, "kind": "dense" if kind == "dense" else "selection", "batch": 1,
        "heads": 1, "kv_heads": 1, "head_dim": 64, "dtype": "float32", "causal": True, "pass": "forward", "input": "topics",
        "seq_len": int(length), "seq_len_kv": int(length), "parameters": "{}", "seed": 0,
    }  # fmt: skip
    return usual | ({} if latency_s is None else {"latency_s": latency_s}) | columns


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Writes a run of these cells on a device, with a sample and a log for each; in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def write(name: str, cells: list[dict[str, Any]], device: str = XEON, **told: Any) -> Run:
        folder = tmp_path / name
        for kind in ("samples", "logs"):
            (folder / kind).mkdir(parents=True)
        facts = Device(
            kind="cpu", name=device, memory_bytes=1 << 30, threads=2, system="Linux", python="3.11", torch="2.13.0",
            triton=None, cuda=None, capability=None, peak_flops_per_s=1e11,
        )  # fmt: skip
        manifest: dict[str, Any] = {
            "schema_version": 1, "name": "mine", "created": "2026-01-01", "argv": ["pyramidbench", name],
            "suite": {"name": "mine"}, "settings": {"timing_s": 2.0, "files": {}}, "version": "0.1",
            "cells": [c["cell"] for c in cells],
        }  # fmt: skip
        (folder / "device.json").write_text(facts.model_copy(update=told.pop("facts", {})).model_dump_json())
        (folder / "manifest.json").write_text(json.dumps(manifest | told))
        (folder / "cells.jsonl").write_text("".join(json.dumps(c | {"device": device}) + "\n" for c in cells))
        for c in cells:
            np.save(folder / "samples" / f"{c['cell']}.npy", [float(len(name))])
            (folder / "logs" / f"{c['cell']}.txt").write_text(name)
        return load_run(folder)

    return write


def test_different_cells_of_one_device_are_one_run(make: Make, tmp_path: Path) -> None:
    runs = [make("short", [cell("flat-64"), cell("dense-64", 5e-4)]), make("longer", [cell("flat-128")])]
    merged = write_merged(plan_merge(runs), tmp_path / "out")
    assert [record.cell for record in merged.records] == ["flat-64", "dense-64", "flat-128"]
    assert merged.manifest.cells == ["flat-64", "dense-64", "flat-128"]
    assert merged.missing == 0
    assert [(source.name, source.cells) for source in merged.manifest.sources] == [
        ("short", ["flat-64", "dense-64"]), ("longer", ["flat-128"]),
    ]  # fmt: skip
    assert merged.manifest.suite == {"name": "mine"}
    assert merged.device == runs[0].device
    assert [float(load_samples(merged.path, record)[0]) for record in merged.records] == [5, 5, 6]  # type: ignore[index]
    assert (merged.path / "logs" / "flat-128.txt").read_text() == "longer"
    assert (merged.path / "results.csv").is_file()
    assert list(merged.frame["speedup"].dropna()) == [0.5, 1.0]


def test_one_cell_on_two_devices_is_two_rows_whose_speedups_stay_apart(make: Make, tmp_path: Path) -> None:
    runs = [
        make("cpu", [cell("dense-64", 4e-3), cell("flat-64", 2e-3)], XEON),
        make("gpus", [cell("dense-64", 4e-4), cell("flat-64", 1e-4)], H200, facts={"kind": "cuda", "threads": 8}),
    ]
    merging = plan_merge(runs)
    assert merging.conflicts == ()
    merged = write_merged(merging, tmp_path / "out")
    assert [(r.cell, r.device) for r in merged.records] == [
        ("dense-64", XEON), ("flat-64", XEON), ("dense-64", H200), ("flat-64", H200),
    ]  # fmt: skip
    assert list(merged.frame["speedup"]) == [1.0, 2.0, 1.0, 4.0]
    assert [float(load_samples(merged.path, record)[0]) for record in merged.records] == [3, 3, 4, 4]  # type: ignore[index]
    assert merged.device.name == f"{XEON}; {H200}"
    assert merged.device.kind == "cpu; cuda"
    assert merged.device.threads is None
    assert merged.device.torch == "2.13.0"
    assert [source.device.name for source in merged.manifest.sources] == [XEON, H200]


def test_a_cell_measured_twice_on_one_device_is_a_conflict_that_the_caller_decides(make: Make, tmp_path: Path) -> None:
    runs = [make("one", [cell("flat-64", 1e-3)]), make("two", [cell("flat-64", 2e-3)])]
    (conflict,) = plan_merge(runs).conflicts
    assert (conflict.first_run, conflict.last_run) == ("one", "two")
    for prefer, latency in (("first", 1e-3), ("last", 2e-3)):
        merged = write_merged(plan_merge(runs, prefer), tmp_path / prefer)  # type: ignore[arg-type]
        assert [record.latency_s for record in merged.records] == [latency]
        assert [len(source.cells) for source in merged.manifest.sources] == [
            int(prefer == "first"),
            int(prefer == "last"),
        ]


@pytest.mark.parametrize("measured_first", [True, False])
def test_a_record_with_numbers_goes_before_one_without(make: Make, measured_first: bool) -> None:
    cells = [[cell("flat-64")], [cell("flat-64", None, "oom", reason="out of memory")]]
    runs = [make(name, held) for name, held in zip(("one", "two"), cells if measured_first else cells[::-1])]
    merging = plan_merge(runs)
    assert merging.conflicts == ()
    assert [record.status for record, _ in merging.kept] == ["ok"]


def test_the_same_record_twice_is_no_conflict(make: Make) -> None:
    assert plan_merge([make("one", [cell("flat-64")]), make("two", [cell("flat-64")])]).conflicts == ()


def test_a_merged_run_can_be_merged_again(make: Make, tmp_path: Path) -> None:
    devices = [make("cpu", [cell("flat-64")], XEON), make("gpus", [cell("flat-64")], H200)]
    first = write_merged(plan_merge(devices), tmp_path / "first")
    last = write_merged(plan_merge([first, make("later", [cell("flat-128")], XEON)]), tmp_path / "last")
    assert [source.name for source in last.manifest.sources] == ["cpu", "gpus", "later"]
    assert [float(load_samples(last.path, record)[0]) for record in last.records] == [3, 4, 5]  # type: ignore[index]


def test_devices_with_names_that_begin_alike_keep_their_samples_apart(make: Make, tmp_path: Path) -> None:
    runs = [make("n1", [cell("flat-64")], XEON.replace("2 t", "1 t")), make("two", [cell("flat-64")], XEON)]
    merged = write_merged(plan_merge(runs), tmp_path / "out")
    assert [float(load_samples(merged.path, record)[0]) for record in merged.records] == [2, 3]  # type: ignore[index]


def test_what_else_differs_is_noted(make: Make) -> None:
    runs = [
        make("one", [cell("flat-64")]),
        make(
            "two", [cell("flat-128")], facts={"torch": "2.14.0"}, settings={"timing_s": 9.0, "files": {}}, version="0.2"
        ),
    ]
    notes = plan_merge(runs).notes
    assert "setting timing_s differs: one 2.0, two 9.0" in notes
    assert "torch differs: one 2.13.0, two 2.14.0" in notes
    assert "pyramidbench differs: one 0.1, two 0.2" in notes
    assert notes[-1].startswith(f"Several runs are of {XEON}: ")


def test_another_file_of_the_same_name_is_refused(make: Make) -> None:
    files = {"one": "a" * 64, "two": "b" * 64}
    runs = [make(name, [cell("flat-64")], settings={"files": {"x.safetensors": files[name]}}) for name in files]
    with pytest.raises(UserError, match=r"'x\.safetensors' is not the same file in 'one' and in 'two'"):
        plan_merge(runs)


def test_texts_that_differ_stand_side_by_side_and_numbers_are_left_out(make: Make) -> None:
    a = make("one", [cell("flat-64")]).device
    b = a.model_copy(update={"name": H200, "triton": "3.6", "memory_bytes": 7, "peak_flops_per_s": 2.0})
    both = joined_device([a, b])
    assert (both.name, both.triton, both.memory_bytes, both.peak_flops_per_s) == (f"{XEON}; {H200}", "3.6", None, None)
    assert joined_device([a, a]) == a


@pytest.fixture
def merge(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["pyramidbench", "merge", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, printed.out, printed.err

    return call


def test_the_command_shows_conflicts_and_writes_nothing_until_told(
    make: Make, merge: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    make("one", [cell("flat-64", 1e-3)]), make("two", [cell("flat-64", 2e-3), cell("flat-128")])
    code, out, err = merge("one", "two", "--out", "out")
    assert (code, out) == (2, "")
    assert " ".join(next(line for line in err.splitlines() if "flat at 64" in line).split()) == (
        "flat at 64 flat-64 1.00 (one) 2.00 (two)"
    )
    assert "--prefer first or --prefer last" in err
    assert not (tmp_path / "out").exists()
    code, out, err = merge("one", "two", "--out", "out", "--prefer", "last")
    assert (code, err) == (0, "")
    assert out.endswith("Run: out\n")
    assert load_run(tmp_path / "out").records[0].latency_s == 2e-3


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["one"], "give at least two"),
        (["one", "./one"], "given twice"),
        (["one", "gone"], "'gone' is no run"),
        (["one", "two", "--out", "one"], "'one' is there already"),
        (["one", "two", "--out", "file/x"], "cannot write to 'file/x'"),
        (["one", "two", "--prefer", "frist"], "Did you mean 'first'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_one_line(
    make: Make, merge: Callable[..., tuple[int, str, str]], tmp_path: Path, arguments: list[str], told: str
) -> None:
    make("one", [cell("flat-64")]), make("two", [cell("flat-128")])
    (tmp_path / "file").write_text("")
    code, _, err = merge(*arguments)
    assert code == 2
    assert told in err
    assert err.startswith("error: ")
    assert load_run(tmp_path / "one").records


def test_by_default_it_lies_beside_other_runs(
    make: Make, merge: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    make("one", [cell("flat-64")]), make("two", [cell("flat-128")])
    assert merge("one", "two")[0] == 0
    (folder,) = (tmp_path / "results").iterdir()
    assert folder.name.endswith("-mine-merged")
