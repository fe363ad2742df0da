"""A group of a sweep: who is timed with whom, who pays for a fault, and what is on disk when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from pyramidbench import group_sweep
from pyramidbench.cell import Cell
from pyramidbench.device import Device
from pyramidbench.group_sweep import GroupSweep, graph_speedup
from pyramidbench.manifest import Manifest
from pyramidbench.outcome import Lost, Settings, failed
from pyramidbench.plan import Estimator, PlannedCell, Rates
from pyramidbench.record import SCHEMA_VERSION, Record
from pyramidbench.sampling import Sampled
from pyramidbench.store import RunWriter
from pyramidbench.timing import Timing

SECONDS = {"dense:flash": 4.0, "dense:math": 5.0, "pyramid": 2.0, "flat": 8.0, "sliding_window": 1.0}
DEVICE = Device(
    kind="cpu", name="Test CPU", memory_bytes=1, threads=1, system="test", python="3", torch="2", triton=None, cuda=None,
    capability=None,
)  # fmt: skip
SETTINGS = Settings("cpu", "Test CPU", Path("nowhere"), 1.0, 1)


def cell_of(method: str, seed: int = 0, *, timed: bool = True) -> Cell:
    return Cell(method=method, seq_len=64, seq_len_kv=64, seed=seed, timed=timed)


def timing_of(cell: Cell) -> Timing:
    seconds = SECONDS[cell.method]
    return Timing("fake", Sampled(9.0, (seconds, 1.1 * seconds, 0.9 * seconds), (0, 1, 2)))


@dataclass
class FakeWorker:
    """Times come from SECONDS; `faults` are what the next sessions end with."""

    faults: list[Callable[[Sequence[Cell]], Lost | None]] = field(default_factory=list)
    judged: list[str] = field(default_factory=list)
    sessions: list[tuple[list[str], bool]] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    incorrect: tuple[str, ...] = ()

    def judge(self, cell: Cell, limit_s: float) -> Record:
        assert limit_s > 0
        self.judged.append(cell.method)
        if cell.method in self.incorrect:
            return failed(cell, SETTINGS, "incorrect", "wrong")
        return failed(cell, SETTINGS, "ok", "").model_copy(update={"reason": None, "gate_error": 0.5})

    def time(self, cells: Sequence[Cell], limit_s: float, *, one_by_one: bool = False) -> list[Timing] | Lost:
        assert limit_s > 0
        self.sessions.append(([cell.method for cell in cells], one_by_one))
        lost = self.faults.pop(0)(cells) if self.faults else None
        return lost or [timing_of(cell) for cell in cells]

    def finish(self, cell: Cell, judged: Record, timing: Timing, limit_s: float) -> Record:
        assert limit_s > 0
        self.finished.append(cell.method)
        return judged.model_copy(update={"latency_s": float(np.median(timing.sampled.seconds))})


@dataclass
class Swept:
    """What a sweep of one group left behind."""

    worker: FakeWorker
    records: dict[str, Record]
    told: list[tuple[str, float]]
    folder: Path


def sweep_group(
    folder: Path, cells: list[Cell], worker: FakeWorker, todo: list[Cell] | None = None, memory_bytes: float = 1e12
) -> Swept:
    manifest = Manifest(
        schema_version=SCHEMA_VERSION, name="mine", created="now", argv=[], suite={}, settings={}, version="0",
        cells=[cell.identity for cell in cells],
    )  # fmt: skip
    writer = RunWriter(folder, manifest, DEVICE)
    told: list[tuple[str, float]] = []
    timed: list[Sequence[Cell]] = []
    estimator = Estimator(Rates(1e12, 1e12), "cpu", 1.0)

    def done(cell: Cell, record: Record, took_s: float) -> None:
        assert writer.is_done(cell) == (record.status in ("ok", "incorrect")), "told before it was on disk"
        told.append((cell.method, took_s))

    groups = GroupSweep(
        cells, worker, writer, SETTINGS, estimator, lambda _: None, lambda _: None, timed.append, done, memory_bytes
    )
    groups.run([PlannedCell(cell, "run", None, 1.0, 1.0) for cell in todo or cells])
    assert {cell.method for session in timed for cell in session} >= set(worker.finished)
    run = writer.close()
    return Swept(worker, {record.method: record for record in run.records}, told, folder)


METHODS = ["dense:flash", "dense:math", "pyramid", "flat"]


def test_all_are_judged_before_any_is_timed_and_all_are_timed_together(tmp_path: Path) -> None:
    swept = sweep_group(tmp_path / "run", [cell_of(method) for method in METHODS], FakeWorker())
    assert swept.worker.judged == METHODS
    assert swept.worker.sessions == [(METHODS, False)]
    assert [method for method, _ in swept.told] == METHODS
    assert len({record.session for record in swept.records.values()}) == 1


def test_speed_ups_are_paired_with_the_fastest_dense_method(tmp_path: Path) -> None:
    records = sweep_group(tmp_path / "run", [cell_of(method) for method in METHODS], FakeWorker()).records
    assert {record.dense_method for record in records.values()} == {"dense:flash"}
    assert {method: record.speedup for method, record in records.items()} == pytest.approx(
        {"dense:flash": 1.0, "dense:math": 0.8, "pyramid": 2.0, "flat": 0.5}
    )
    assert records["flat"].speedup_low == pytest.approx(0.5)


def timed(call_s: float, replay_s: float | None = None, gap: str | None = None) -> Timing:
    """A call of 10 samples, and its replays."""
    calls, replays = (
        None if seconds is None else Sampled(seconds, (seconds,) * 10, tuple(range(10)))
        for seconds in (call_s, replay_s)
    )
    assert calls is not None
    return Timing("fake", calls, call_s, replays, gap)


def test_a_replay_is_compared_with_the_fastest_dense_one_without_the_host() -> None:
    own = timed(8.0, 1.0)
    launched, bound, gapped = (
        ("launched", timed(5.0, 3.0)),
        ("bound", timed(4.0)),
        ("gapped", timed(2.0, gap="it waits")),
    )
    assert graph_speedup([launched, bound, gapped], own) == {
        "graph_dense_method": "launched", "graph_speedup": 3.0, "graph_speedup_low": 3.0, "graph_speedup_high": 3.0,
    }  # fmt: skip
    assert graph_speedup([bound, gapped], own) == {"graph_dense_method": "bound", "graph_speedup": 4.0}
    assert graph_speedup([gapped], own) == {}
    assert graph_speedup([launched], timed(8.0)) == {}


def test_without_a_dense_method_there_is_no_speed_up(tmp_path: Path) -> None:
    records = sweep_group(tmp_path / "run", [cell_of("pyramid"), cell_of("flat")], FakeWorker()).records
    assert [(record.speedup, record.dense_method) for record in records.values()] == [(None, None)] * 2


def test_what_is_not_timed_is_on_disk_at_once_and_joins_no_session(tmp_path: Path) -> None:
    cells = [cell_of("pyramid"), cell_of("flat"), cell_of("exact_topk", timed=False)]
    swept = sweep_group(tmp_path / "run", cells, FakeWorker(incorrect=("pyramid",)))
    assert swept.worker.sessions == [(["flat"], False)]
    assert [method for method, _ in swept.told] == ["pyramid", "exact_topk", "flat"]
    assert swept.records["pyramid"].status == "incorrect"
    assert swept.records["exact_topk"].session is None


def by(method: str, status: str = "crashed") -> Callable[[Sequence[Cell]], Lost]:
    """A fault that is known to be that method's."""

    def fault(cells: Sequence[Cell]) -> Lost:
        (guilty,) = [cell for cell in cells if cell.method == method]
        return Lost(guilty.identity, status, "it fell over")  # type: ignore[arg-type]

    return fault


def test_a_cell_that_ends_its_session_is_lost_alone(tmp_path: Path) -> None:
    worker = FakeWorker(faults=[by("pyramid", "timeout"), by("dense:flash")])
    swept = sweep_group(tmp_path / "run", [cell_of(method) for method in METHODS], worker)
    without = ["dense:math", "flat"]
    assert [methods for methods, _ in worker.sessions] == [METHODS, ["dense:flash", "dense:math", "flat"], without]
    assert {method: record.status for method, record in swept.records.items()} == {
        "dense:flash": "crashed", "dense:math": "ok", "pyramid": "timeout", "flat": "ok",
    }  # fmt: skip
    assert swept.records["pyramid"].reason == "it fell over"
    assert swept.records["flat"].dense_method == "dense:math"
    assert worker.judged == METHODS, "nobody is judged twice"


def late(_: Sequence[Cell]) -> Lost:
    return Lost(None, "cuda_error", "CUDA error: an illegal memory access was encountered")


def test_after_a_fault_of_nobody_calls_go_one_by_one(tmp_path: Path) -> None:
    worker = FakeWorker(faults=[late, by("flat", "cuda_error")])
    swept = sweep_group(tmp_path / "run", [cell_of(method) for method in METHODS], worker)
    assert [alone for _, alone in worker.sessions] == [False, True, True]
    assert {m for m, record in swept.records.items() if record.status == "cuda_error"} == {"flat"}


def test_faults_that_stay_nobodys_end_the_session_with_their_reason(tmp_path: Path) -> None:
    worker = FakeWorker(faults=[late] * group_sweep.LATE_FAULTS)
    swept = sweep_group(tmp_path / "run", [cell_of(method) for method in METHODS], worker)
    assert len(worker.sessions) == group_sweep.LATE_FAULTS
    assert {record.status for record in swept.records.values()} == {"cuda_error"}
    assert worker.finished == []


def test_a_large_group_is_cut_into_sessions_with_the_fastest_dense_in_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_sweep, "LARGEST_SESSION", 3)
    methods = ["dense:math", "dense:flash", "pyramid", "flat", "sliding_window"]
    swept = sweep_group(tmp_path / "run", [cell_of(method) for method in methods], FakeWorker())
    assert [methods for methods, _ in swept.worker.sessions] == [
        ["dense:math", "dense:flash", "pyramid"], ["flat", "sliding_window", "dense:flash"],
    ]  # fmt: skip
    assert swept.worker.finished == methods, "the reference is finished once"
    assert swept.records["sliding_window"].speedup == pytest.approx(4.0)
    dense, late_one = swept.records["dense:flash"], swept.records["flat"]
    assert dense.session != late_one.session
    names = {path.name for path in (swept.folder / "samples").iterdir()}
    assert f"{dense.cell}.{late_one.session}.npy" in names
    assert f"{dense.cell}.npy" in names
    assert not any(name.startswith(f"{late_one.cell}.{late_one.session}") for name in names)


def test_a_reference_that_ends_a_session_keeps_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_sweep, "LARGEST_SESSION", 1)
    worker = FakeWorker(faults=[lambda _: None, by("dense:flash")])
    swept = sweep_group(tmp_path / "run", [cell_of("dense:flash"), cell_of("flat")], worker)
    assert [methods for methods, _ in worker.sessions] == [["dense:flash"], ["flat", "dense:flash"], ["flat"]]
    assert {record.status for record in swept.records.values()} == {"ok"}
    assert swept.records["dense:flash"].latency_s == 4.0
    assert swept.records["flat"].speedup is None


def test_a_resumed_group_is_timed_beside_the_dense_cell_on_disk(tmp_path: Path) -> None:
    cells = [cell_of("dense:flash"), cell_of("dense:flash", seed=1), cell_of("flat")]
    folder = tmp_path / "run"
    sweep_group(folder, cells, FakeWorker(), todo=cells[:2])
    again = sweep_group(folder, cells, FakeWorker(), todo=cells[2:])
    assert again.worker.sessions == [(["flat", "dense:flash"], False)]
    assert again.worker.judged == ["flat"]
    assert again.records["flat"].speedup == pytest.approx(0.5)


def test_a_cell_is_charged_its_part_of_the_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    worker = FakeWorker()

    def timed(cells: Sequence[Cell], limit_s: float, *, one_by_one: bool = False) -> list[Timing]:  # noqa: ARG001
        now[0] += 8.0
        return [timing_of(cell) for cell in cells]

    monkeypatch.setattr(worker, "time", timed)
    monkeypatch.setattr(group_sweep.time, "perf_counter", lambda: now[0])
    swept = sweep_group(tmp_path / "run", [cell_of(method) for method in METHODS], worker)
    assert swept.told == [(method, 2.0) for method in METHODS]


def out_of_memory(cells: Sequence[Cell]) -> Lost:
    """Memory runs out while the last one is at work."""
    return Lost(cells[-1].identity, "oom", "out of memory")


def test_a_session_that_memory_does_not_hold_is_cut_in_halves(tmp_path: Path) -> None:
    worker = FakeWorker(faults=[out_of_memory])
    swept = sweep_group(tmp_path / "run", [cell_of(method) for method in METHODS], worker)
    assert [methods for methods, _ in worker.sessions] == [
        METHODS, ["dense:flash", "dense:math"], ["pyramid", "flat", "dense:flash"],
    ]  # fmt: skip
    assert {record.status for record in swept.records.values()} == {"ok"}
    assert swept.records["flat"].speedup == pytest.approx(0.5), "the second half has its reference"


def test_who_runs_out_of_memory_alone_is_lost_alone(tmp_path: Path) -> None:
    worker = FakeWorker(faults=[by("flat"), out_of_memory, lambda _: None, out_of_memory, out_of_memory])
    methods = ["dense:flash", "pyramid", "flat"]
    swept = sweep_group(tmp_path / "run", [cell_of(method) for method in methods], worker)
    assert [methods for methods, _ in worker.sessions] == [
        methods, ["dense:flash", "pyramid"], ["dense:flash"], ["pyramid", "dense:flash"], ["pyramid"],
    ]  # fmt: skip
    assert {method: record.status for method, record in swept.records.items()} == {
        "dense:flash": "ok", "pyramid": "oom", "flat": "crashed",
    }  # fmt: skip


@pytest.mark.parametrize(("memory_bytes", "largest"), [(0, 1), (4.3e9, 1), (6.5e9, 3), (1e12, 4)])
def test_a_session_holds_as_many_caches_as_memory(memory_bytes: float, largest: int, tmp_path: Path) -> None:
    """Tensors of 1.07 GB, a cache of 1.07 to 1.2 GB for each method, and one more for the reference of a later session."""
    cells = [
        Cell(method=method, seq_len=1, seq_len_kv=1 << 20, heads=8, kv_heads=2, head_dim=128, head_dim_v=128, dtype="bfloat16",
             direction="decode", parameters={} if method.startswith("dense") else {"query_tile": 1})
        for method in METHODS
    ]  # fmt: skip
    worker = FakeWorker()
    swept = sweep_group(tmp_path / "run", cells, worker, memory_bytes=memory_bytes)
    assert {record.status for record in swept.records.values()} == {"ok"}
    assert len(worker.sessions[0][0]) == largest
    assert all(any(name.startswith("dense") for name in methods) for methods, _ in worker.sessions)
