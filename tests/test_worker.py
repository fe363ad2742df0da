"""The worker: a cell that raises, exits, is killed or hangs is lost alone, with its status, and the next one is fine."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyramidbench import worker as workers
from pyramidbench.cell import Cell
from pyramidbench.outcome import Lost, Settings
from pyramidbench.record import Record
from pyramidbench.worker import Worker, working

FAULTY = '''
"""Dense attention that fails on demand."""
from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from dataclasses import dataclass

import torch

from pyramidbench.cost import Cost, StageCost
from pyramidbench.method import Method

calls = {}


@dataclass(frozen=True)
class Faulty(Method):
    """Attends to everything, unless its fault strikes."""

    kind = "dense"
    fault: str = "none"
    after: int = 0

    def select(self, q, k, problem):
        return None

    def attend(self, q, k, v, selection, problem):
        calls[self.fault] = calls.get(self.fault, 0) + 1
        if calls[self.fault] > self.after:
            self.strike()
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def strike(self):
        if self.fault == "raise":
            raise ArithmeticError("the sums do not\\nadd up")
        if self.fault == "exit":
            sys.exit(0)
        if self.fault == "memory":
            raise MemoryError("no room for 8 TiB")
        if self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "abort":
            os._exit(7)
        if self.fault == "hang":
            time.sleep(600)
        if self.fault == "segfault":
            ctypes.string_at(0)
        if self.fault == "cuda":
            print("indexing: block [0,0,0], thread [3,0,0] Assertion `index < size` failed.", file=sys.stderr, flush=True)
            raise RuntimeError("CUDA error: device-side assert triggered")

    def backend(self, problem):
        return "test"

    def cost(self, problem):
        return Cost((StageCost("attend", 1.0, 1.0),), 0.0)
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def worker(folder: Path) -> Iterator[Worker]:
    (folder / "faulty.py").write_text(FAULTY)
    with working(Settings("cpu", "Test CPU", folder, timing_s=0.02, quality_elements=1 << 20)) as made:
        yield made


def cell_of(worker: Worker, fault: str, *, after: int = 0, timed: bool = False) -> Cell:
    path = str(worker.settings.folder / "faulty.py")
    sizes = {"seq_len": 64, "seq_len_kv": 64, "head_dim": 8, "head_dim_v": 8}
    return Cell(method=path, parameters={"fault": fault, "after": after}, timed=timed, **sizes)


def judge(worker: Worker, fault: str, limit_s: float = 60.0) -> tuple[Cell, Record]:
    cell = cell_of(worker, fault)
    record = worker.judge(cell, limit_s)
    assert record.cell == cell.identity
    return cell, record


def log_of(worker: Worker, cell: Cell) -> str:
    return (worker.settings.folder / "logs" / f"{cell.identity}.txt").read_text()


def assert_the_next_cell_is_fine(worker: Worker) -> None:
    _, record = judge(worker, "none")
    assert (record.status, record.reason) == ("ok", None)
    assert record.output_error is not None


def test_a_cell_that_raises_is_crashed_and_its_traceback_is_kept(worker: Worker) -> None:
    cell, record = judge(worker, "raise")
    assert record.status == "crashed"
    assert record.reason == "ArithmeticError: the sums do not add up"
    assert record.latency_s is None
    assert log_of(worker, cell).startswith("Traceback")
    assert 'raise ArithmeticError("the sums do not\\nadd up")' in log_of(worker, cell)
    assert_the_next_cell_is_fine(worker)


def test_a_cell_that_exits_does_not_end_the_sweep(worker: Worker) -> None:
    _, record = judge(worker, "exit")
    assert (record.status, record.reason) == ("crashed", "SystemExit: 0")
    assert_the_next_cell_is_fine(worker)


@pytest.mark.parametrize(
    ("fault", "status", "reason"),
    [
        ("memory", "oom", "out of memory: no room for 8 TiB"),
        ("cuda", "cuda_error", "CUDA error: device-side assert triggered"),
    ],
)
def test_a_cell_that_spoils_its_process_gets_a_fresh_one(worker: Worker, fault: str, status: str, reason: str) -> None:
    before = worker.pool
    cell, record = judge(worker, fault)
    assert (record.status, record.reason) == (status, reason)
    assert worker.pool is not before
    assert "Traceback" in log_of(worker, cell)
    if fault == "cuda":
        assert "Assertion `index < size` failed" in log_of(worker, cell), "what the process wrote is lost"
    assert_the_next_cell_is_fine(worker)


@pytest.mark.parametrize(
    ("fault", "killed_for_memory", "status", "reason"),
    [
        ("kill", [3, 4], "oom", "the worker was killed (SIGKILL) by the system, for want of memory"),
        ("kill", [3, 3], "crashed", "the worker was killed (SIGKILL), and not for want of memory"),
        ("kill", [None, None], "oom", "the worker was killed (SIGKILL), most likely for memory"),
        ("abort", [3, 3], "crashed", "the worker died with exit code 7"),
        ("segfault", [3, 3], "crashed", "the worker died of SIGSEGV; its log says where"),
    ],
    ids=["memory", "somebody", "unknown", "exit code", "segfault"],
)
def test_a_cell_that_kills_its_worker_is_lost_alone(
    worker: Worker,
    fault: str,
    killed_for_memory: list[int | None],
    status: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts = iter(killed_for_memory)
    with monkeypatch.context() as patch:
        patch.setattr(workers, "_killed_for_memory", lambda: next(counts))
        cell, record = judge(worker, fault)
    assert (record.status, record.reason) == (status, reason)
    assert (record.method, record.seq_len, record.latency_s) == (cell.method, 64, None)
    if fault == "segfault":
        assert "Segmentation fault" in log_of(worker, cell)
        assert "in strike" in log_of(worker, cell)
        assert_the_next_cell_is_fine(worker)


def test_a_cell_that_hangs_is_stopped_at_its_limit(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(workers, "GRACE_S", 1.0)
        cell, record = judge(worker, "hang", limit_s=2.0)
    assert record.status == "timeout"
    assert record.reason is not None
    assert record.reason.startswith("no result after 3 s, much longer than predicted")
    assert "in strike" in log_of(worker, cell), "where it hung is not in the log"
    assert_the_next_cell_is_fine(worker)


@pytest.mark.parametrize(("fault", "status"), [("kill", "crashed"), ("raise", "crashed"), ("memory", "oom")])
def test_the_call_that_ends_a_session_is_known_by_its_cell(worker: Worker, fault: str, status: str) -> None:
    """It passes the gate in two calls, and strikes under the clock, between two that are fine."""
    cells = [cell_of(worker, name, after=after, timed=True) for name, after in (("none", 0), (fault, 6), ("none", 1))]
    assert [worker.judge(cell, 60.0).status for cell in cells] == ["ok"] * 3
    lost = worker.time(cells, 60.0)
    assert isinstance(lost, Lost)
    assert (lost.cell, lost.status) == (cells[1].identity, status)
    kept = worker.time([cells[0], cells[2]], 60.0)
    assert not isinstance(kept, Lost)
    assert [len(timing.sampled.seconds) >= 3 for timing in kept] == [True, True]


def test_a_late_fault_belongs_to_no_cell_until_calls_go_one_by_one(worker: Worker) -> None:
    """A GPU reports a fault at the next synchronise, when others have been announced."""
    cells = [cell_of(worker, name, after=2, timed=True) for name in ("cuda", "none")]
    lost = worker.time(cells, 60.0)
    assert isinstance(lost, Lost)
    assert (lost.cell, lost.status) == (None, "cuda_error")
    lost = worker.time(cells, 60.0, one_by_one=True)
    assert isinstance(lost, Lost)
    assert lost.cell == cells[0].identity


def test_a_worker_dies_with_its_parent(tmp_path: Path) -> None:
    """A killed sweep leaves no process that goes on computing beside the next one."""
    (tmp_path / "faulty.py").write_text(FAULTY)
    script = tmp_path / "parent.py"
    script.write_text(
        "import sys\n"
        "from pathlib import Path\n"
        "from pyramidbench.cell import Cell\n"
        "from pyramidbench.outcome import Settings\n"
        "from pyramidbench.worker import Worker\n"
        "if __name__ == '__main__':\n"
        "    folder = Path(sys.argv[1])\n"
        "    worker = Worker(Settings('cpu', 'Test CPU', folder, timing_s=0.02, quality_elements=1 << 20))\n"
        "    sizes = {'seq_len': 64, 'seq_len_kv': 64, 'head_dim': 8, 'head_dim_v': 8}\n"
        "    method = str(folder / 'faulty.py')\n"
        "    cell = Cell(method=method, parameters={'fault': 'none'}, timed=False, **sizes)\n"
        "    worker.judge(cell, 60.0)\n"
        "    print('ready', flush=True)\n"
        "    worker.judge(cell.model_copy(update={'parameters': {'fault': 'hang'}}), 600.0)\n"
    )
    with subprocess.Popen([sys.executable, str(script), str(tmp_path)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        tasks = Path(f"/proc/{parent.pid}/task").iterdir()
        children = [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
        parent.kill()
    assert children
    deadline = time.monotonic() + 10
    while any(_runs(pid) for pid in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_runs(pid) for pid in children)


def _runs(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
