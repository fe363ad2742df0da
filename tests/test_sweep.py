"""A sweep from plan to frame: what is measured, what is left out and why, and that nothing is measured twice."""

from __future__ import annotations

import importlib
import json
import math
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pyramidbench import sweep
from pyramidbench.capture_file import CaptureMetadata, CaptureWriter
from pyramidbench.cell import Cell
from pyramidbench.errors import UserError
from pyramidbench.outcome import Settings, failed
from pyramidbench.record import Record, columns
from pyramidbench.sampling import Sampled
from pyramidbench.store import Run, load_run
from pyramidbench.suite import Suite
from pyramidbench.sweeping import Exhausted, Silent, make_plan, run_plan
from pyramidbench.timing import Timing

METHODS = ("dense", "pyramid", "flat")
AXES: dict[str, Any] = {
    "seq": "128,256", "method": METHODS, "top_k": "2", "block_size": "16", "query_tile": "16", "heads": "2:1",
    "head_dim": "16", "timing_s": 0.05, "device": "cpu",
}  # fmt: skip


class Listener(Silent):
    """Remembers which cells were started."""

    def __init__(self) -> None:
        self.cells: list[Cell] = []
        self.left: list[float] = []
        self.done = 0

    def planned(self, folder: Path, cells: object, done: int) -> None:  # noqa: ARG002
        self.done = done

    def started(self, cell: Cell, left_s: float) -> None:
        self.cells.append(cell)
        self.left.append(left_s)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Six cells, measured in a real worker process."""
    return sweep(out=tmp_path_factory.mktemp("sweep") / "run", **AXES)


def test_every_cell_is_measured_and_has_all_columns(run: Run) -> None:
    frame = run.frame
    assert list(frame.columns) == columns()
    assert run.missing == 0
    assert sorted(zip(frame["method"], frame["seq_len"])) == sorted((m, n) for m in METHODS for n in (128, 256))
    assert set(frame["status"]) <= {"ok", "low_n"}
    assert ((frame["status"] == "low_n") == (frame["samples"] < 20)).all()
    for name in ("latency_s", "attend_s", "peak_memory_bytes", "density", "recall", "mass_kept", "output_error"):
        assert frame[name].notna().all(), name


def test_the_numbers_of_a_row_agree_with_one_another(run: Run) -> None:
    frame = run.frame
    assert (frame["latency_low_s"] <= frame["latency_s"]).all()
    assert (frame["latency_s"] <= frame["latency_high_s"]).all()
    assert frame["tokens_per_s"].tolist() == pytest.approx((frame["seq_len"] / frame["latency_s"]).tolist())
    assert (frame["gate_error"] <= 1).all()
    dense, sparse = frame[frame["kind"] == "dense"], frame[frame["kind"] == "selection"]
    assert (dense["density"] == 1).all()
    assert (sparse["density"] < 1).all()
    assert dense["selected_blocks"].isna().all()
    assert sparse["selected_blocks"].between(2, 5).all()
    assert dense["output_error"].max() < 1e-5 < sparse["output_error"].min()
    assert set(sparse["top_k"]) == {2}
    assert set(frame["device"]) == {run.device.name}
    assert set(frame["quality_source"]) == {"structured (topics)"}


def test_speed_up_is_against_the_dense_row_of_the_same_length(run: Run) -> None:
    for row in run.frame.to_dict("records"):
        (dense,) = [r for r in run.records if r.method == "dense" and r.seq_len == row["seq_len"]]
        assert dense.latency_s is not None
        assert row["dense_method"] == "dense"
        assert row["speedup_low"] <= row["speedup"] <= row["speedup_high"]
        own, reference = (np.load(run.path / "samples" / f"{cell}.npy") for cell in (row["cell"], dense.cell))
        count = min(len(own), len(reference))
        assert row["speedup"] == float(np.median(reference[:count] / own[:count]))


def test_methods_of_a_length_are_timed_in_turns(run: Run) -> None:
    for length in (128, 256):
        records = [record for record in run.records if record.seq_len == length]
        assert len({record.session for record in records}) == 1
        turns = [np.load(run.path / "samples" / f"{record.cell}.turns.npy") for record in records]
        assert sorted(np.concatenate(turns)) == list(range(sum(record.samples or 0 for record in records)))
        first, second, third, *_ = zip(*turns)
        assert (first, second, third) == ((0, 1, 2), (5, 4, 3), (6, 7, 8))
    assert run.records[0].session != run.records[-1].session


def test_raw_samples_and_tables_are_kept(run: Run) -> None:
    for record in run.records:
        samples = np.load(run.path / "samples" / f"{record.cell}.npy")
        assert len(samples) == record.samples
        assert float(np.median(samples)) == record.latency_s
    assert (run.path / "results.parquet").is_file()
    assert (run.path / "results.csv").is_file()
    assert not (run.path / "logs").exists()


@pytest.mark.usefixtures("no_workers")
def test_a_resumed_sweep_measures_only_what_is_missing(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run.path, folder)
    lines = (folder / "cells.jsonl").read_text().splitlines(keepends=True)
    (folder / "cells.jsonl").write_text("".join(lines[:4]) + lines[4][:50])
    listener = Listener()
    again = run_plan(_plan_of_axes(), out=folder, reporter=listener)
    assert listener.done == 4
    assert [cell.identity for cell in listener.cells] == [json.loads(line)["cell"] for line in lines[4:]]
    assert again.records[:4] == run.records[:4]
    dense, *others = again.records[3:]
    assert dense.method == "dense"
    assert {record.dense_method for record in others} == {"dense"}
    for record in others:
        assert record.speedup_low is not None, "a cell that is timed later has no pairs with the dense one"
        assert (folder / "samples" / f"{dense.cell}.{record.session}.npy").is_file()
    assert again.missing == 0
    assert set(again.frame["status"]) <= {"ok", "low_n"}


@pytest.mark.usefixtures("no_workers")
def test_a_finished_sweep_measures_nothing(run: Run) -> None:
    before = (run.path / "cells.jsonl").read_bytes()
    listener = Listener()
    assert run_plan(_plan_of_axes(), out=run.path, reporter=listener).records == run.records
    assert listener.cells == []
    assert (run.path / "cells.jsonl").read_bytes() == before


@pytest.mark.usefixtures("no_workers")
def test_an_interrupted_sweep_keeps_what_it_has(tmp_path: Path) -> None:
    class Impatient(Listener):
        finishes = 0

        def finished(self, record: Record) -> None:  # noqa: ARG002
            self.finishes += 1
            if self.finishes == 4:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_plan(_plan_of_axes(), out=tmp_path / "run", reporter=Impatient())
    stopped = load_run(tmp_path / "run")
    assert (len(stopped.records), stopped.missing) == (4, 2)
    assert (tmp_path / "run" / "results.csv").is_file()
    listener = Listener()
    assert run_plan(_plan_of_axes(), out=tmp_path / "run", reporter=listener).missing == 0
    assert len(listener.cells) == 2


@pytest.mark.usefixtures("no_workers")
def test_what_was_judged_is_not_judged_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweep ends while a group is timed; gate and quality of its cells are on disk, and only the timing is repeated."""
    runner = importlib.import_module("pyramidbench.runner")
    judged: list[str] = []
    judge, measure = runner.judge, runner.measure_in_turns

    def noting(cell: Cell, *others: Any) -> Any:
        judged.append(cell.identity)
        return judge(cell, *others)

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "judge", noting)
    monkeypatch.setattr(runner, "measure_in_turns", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_plan(_plan_of_axes(), out=tmp_path / "run")
    stopped = load_run(tmp_path / "run")
    assert (len(judged), len(stopped.records), stopped.missing) == (3, 0, 6)
    monkeypatch.setattr(runner, "measure_in_turns", measure)
    again = run_plan(_plan_of_axes(), out=tmp_path / "run")
    assert (again.missing, len(judged), len(set(judged))) == (0, 6, 6)
    assert again.frame["output_error"].notna().all()
    assert again.frame["latency_s"].notna().all()


def _plan_of_axes() -> Any:
    from pyramidbench.suite import suite_from_flags

    axes = {key: value for key, value in AXES.items() if key not in ("timing_s", "device")}
    return make_plan(suite_from_flags(**axes, input=["topics"]), device="cpu", timing_s=0.05)


@pytest.mark.usefixtures("no_workers")
def test_fresh_starts_over_and_keeps_the_old_run(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run.path, folder)
    again = sweep(out=folder, fresh=True, **AXES)
    assert again.path == folder
    (old,) = tmp_path.glob("run.before-*")
    assert load_run(old).records == run.records


@pytest.mark.usefixtures("no_workers")
def test_cells_over_the_budget_are_skipped_with_their_estimate_and_measured_under_a_larger_one(tmp_path: Path) -> None:
    axes = AXES | {"seq": "128", "method": ["dense"]}
    (skipped,) = sweep(out=tmp_path / "run", cell_budget_s=0.01, **axes).records
    assert skipped.status == "skipped"
    assert skipped.reason is not None
    assert "exceeds the cell budget of 0.010 s" in skipped.reason
    assert "raise --cell-budget" in skipped.reason
    assert skipped.latency_s is None
    (measured,) = sweep(out=tmp_path / "run", **axes).records
    assert measured.status in ("ok", "low_n")
    assert "budget" not in (measured.reason or "")


@pytest.mark.usefixtures("no_workers")
def test_random_tensors_have_a_speed_and_no_quality(tmp_path: Path) -> None:
    frame = sweep(out=tmp_path / "run", **AXES | {"seq": "128", "input": "normal"}).frame
    assert set(frame["status"]) <= {"ok", "low_n"}
    assert frame["latency_s"].notna().all()
    for name in ("recall", "mass_kept", "mass_ratio", "output_error", "sampled_tiles", "recall_by_head"):
        assert frame[name].isna().all(), name
    assert set(frame["quality_source"]) == {"random tensors: no measure of quality"}


@pytest.mark.usefixtures("no_workers")
def test_a_sweep_of_quality_alone_has_no_time(tmp_path: Path) -> None:
    run = sweep(out=tmp_path / "run", timed=False, **AXES | {"seq": "128"})
    assert set(run.frame["status"]) == {"ok"}
    assert run.frame["latency_s"].isna().all()
    assert run.frame["speedup"].isna().all()
    assert run.frame["recall"].notna().all()
    assert not (run.path / "samples").exists()


@pytest.mark.usefixtures("no_workers")
def test_what_a_method_cannot_do_is_a_row_with_its_reason(tmp_path: Path) -> None:
    run = sweep(out=tmp_path / "run", causal=False, **AXES | {"seq": "128", "method": ["dense", "sliding_window"]})
    by_method = {record.method: record for record in run.records}
    assert by_method["sliding_window"].status == "unsupported"
    assert by_method["sliding_window"].reason == "a window that ends at the query needs causal attention"
    assert by_method["dense"].status in ("ok", "low_n")


def write_capture(path: Path, *, spoil: float) -> None:
    """Two layers of 64 tokens; one key of layer 5 is `spoil`."""
    generator = torch.Generator().manual_seed(0)
    metadata = CaptureMetadata(
        model="tiny", model_sha256=None, text="words", text_sha256="0", tokens=64, layers=(2, 5), heads=2, kv_heads=1,
        head_dim=16, head_dim_v=16, rope_theta=None, scale=0.25, created_by="test",
    )  # fmt: skip
    with CaptureWriter(path, 2) as writer:
        for layer in metadata.layers:
            q, k, v = (torch.randn(1, heads, 64, 16, generator=generator) for heads in (2, 1, 1))
            if layer == 5:
                k[0, 0, 7, 3] = spoil
            writer.add(layer, q, k, v)
        writer.finish(metadata)


@pytest.mark.usefixtures("no_workers")
@pytest.mark.parametrize(("spoil", "name"), [(math.nan, "NaN"), (math.inf, "inf")])
def test_a_capture_with_a_broken_layer_gives_one_sentence_and_the_other_layers(
    tmp_path: Path, spoil: float, name: str
) -> None:
    path = tmp_path / "tiny.safetensors"
    write_capture(path, spoil=spoil)
    axes = {key: AXES[key] for key in ("method", "top_k", "block_size", "query_tile", "timing_s", "device")}
    run = sweep(seq="64", input=str(path), out=tmp_path / "run", **axes)
    good, bad = run.frame[run.frame["layer"] == 2], run.frame[run.frame["layer"] == 5]
    assert set(good["status"]) <= {"ok", "low_n"}
    assert set(good["quality_source"]) == {"captured"}
    assert set(good["input"]) == {"tiny:words"}
    assert len(good) == len(bad) == 3
    assert set(bad["status"]) == {"unsupported"}
    (reason,) = set(bad["reason"])
    assert reason.startswith(f"input '{path}': layer 5, k holds {name} in 1 of 1024 entries as float32; ")
    assert "\n" not in reason
    assert bad["latency_s"].isna().all()


class Scarce:
    """A worker in the place of the real one: `pyramid` runs out of memory from 128 tokens on, the others measure 1 s."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.asked: list[tuple[str, int]] = []

    def judge(self, cell: Cell, limit_s: float) -> Record:  # noqa: ARG002
        self.asked.append((cell.method, cell.seq_len))
        if cell.method == "pyramid" and cell.seq_len >= 128:
            return failed(cell, self.settings, "oom", "out of memory")
        return failed(cell, self.settings, "ok", "")

    def time(self, cells: Sequence[Cell], limit_s: float, *, one_by_one: bool = False) -> list[Timing]:  # noqa: ARG002
        return [Timing("fake", Sampled(1.0, (1.0,), (index,))) for index, _ in enumerate(cells)]

    def finish(self, cell: Cell, judged: Record, timing: Timing, limit_s: float) -> Record:  # noqa: ARG002
        return judged.model_copy(update={"latency_s": 1.0, "reason": None})


def test_longer_cells_of_a_method_that_ran_out_of_memory_are_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Scarce] = []

    def working(settings: Settings) -> Any:
        made.append(Scarce(settings))
        return nullcontext(made[-1])

    monkeypatch.setattr(importlib.import_module("pyramidbench.sweeping"), "working", working)
    run = sweep(out=tmp_path / "run", **AXES | {"seq": "64..512"})
    found = {(r.method, r.seq_len): (r.status, r.reason) for r in run.records}
    assert found["pyramid", 128] == ("oom", "out of memory")
    for length in (256, 512):
        assert found["pyramid", length] == ("oom_predicted", "this method ran out of memory at 128 tokens")
        assert found["flat", length] == found["dense", length] == ("ok", None)
    assert ("pyramid", 256) not in made[0].asked
    again = sweep(out=tmp_path / "run", **AXES | {"seq": "64..512"})
    assert made[1].asked == [("pyramid", 128)]
    assert set(again.records) == set(run.records)


def test_exhausted_goes_by_method_parameters_and_sizes_but_not_by_seed_and_layer() -> None:
    def cell(length: int, **fields: Any) -> Cell:
        return Cell(**{"method": "pyramid", "seq_len": length, "seq_len_kv": length, **fields})

    exhausted = Exhausted()
    settings = Settings("cpu", "Test CPU", Path("run"), 1.0, 1)
    exhausted.note(cell(256), failed(cell(256), settings, "oom", "no room"))
    exhausted.note(cell(128), failed(cell(128), settings, "timeout", "too slow"))
    assert exhausted.shorter(cell(512)) == 256
    assert exhausted.shorter(cell(512, seed=3, layer=2)) == 256
    assert exhausted.shorter(cell(256)) is None
    assert exhausted.shorter(cell(128)) is None
    assert exhausted.shorter(cell(512, method="flat")) is None
    assert exhausted.shorter(cell(512, heads=2)) is None
    assert exhausted.shorter(cell(512, parameters={"beam": 1})) is None
    exhausted.note(cell(64), failed(cell(64), settings, "oom", "no room"))
    exhausted.note(cell(512), failed(cell(512), settings, "oom", "no room"))
    assert exhausted.shorter(cell(128)) == 64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": ["pyramyd"]}, "unknown method 'pyramyd'. Did you mean 'pyramid'"),
        ({"seq": "4k..1k"}, "--seq '4k..1k': the range is reversed"),
        ({"seq": ""}, "--seq '': empty"),
        ({"input": "topic"}, "unknown --input 'topic'. Did you mean 'topics'"),
        ({"input": "gone.safetensors", "heads": None, "head_dim": None}, "input 'gone.safetensors' is not a file"),
        ({"device": "tpu"}, "device 'tpu' is not known; accepted: auto, cpu, cuda"),
        ({"suite": "smok"}, "unknown suite 'smok'. Did you mean 'smoke'"),
    ],
)
def test_a_wrong_argument_is_named_before_anything_is_written(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        sweep(out=tmp_path / "run", **AXES | change)
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("no_workers")
def test_a_suite_object_is_swept_into_a_folder_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    grid = {"seq": "64", "methods": ["dense"], "head_dim": 8, "timed": False}
    suite = Suite.model_validate({"name": "mine", "grid": [grid]})
    first = sweep(suite, device="cpu")
    assert (first.manifest.name, len(first.records)) == ("mine", 1)
    assert first.path.parent == Path("results")
    assert f"-mine-{first.device.slug}-" in first.path.name
    assert sweep(suite, device="cpu").path == first.path
