"""The worker: a cell that raises, exits, is killed or hangs is lost alone, with its status, and the next one is fine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pyramidbench import worker as workers
from pyramidbench.cell import Cell
from pyramidbench.record import Record
from pyramidbench.runner import Settings
from pyramidbench.worker import Worker, working

FAULTY = '''
"""Dense attention that fails on demand."""
from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass

import torch

from pyramidbench.cost import Cost, StageCost
from pyramidbench.method import Method


@dataclass(frozen=True)
class Faulty(Method):
    """Attends to everything, unless its fault strikes."""

    kind = "dense"
    fault: str = "none"

    def select(self, q, k, problem):
        return None

    def attend(self, q, k, v, selection, problem):
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
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

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


def measure(worker: Worker, fault: str, limit_s: float = 60.0) -> tuple[Cell, Record]:
    path = str(worker.settings.folder / "faulty.py")
    cell = Cell(
        method=path, parameters={"fault": fault}, seq_len=64, seq_len_kv=64, head_dim=8, head_dim_v=8, timed=False
    )
    record = worker.run(cell, limit_s)
    assert record.cell == cell.identity
    return cell, record


def assert_the_next_cell_is_fine(worker: Worker) -> None:
    _, record = measure(worker, "none")
    assert (record.status, record.reason) == ("ok", None)
    assert record.output_error is not None


def test_a_cell_that_raises_is_crashed_and_its_traceback_is_kept(worker: Worker, folder: Path) -> None:
    cell, record = measure(worker, "raise")
    assert record.status == "crashed"
    assert record.reason == "ArithmeticError: the sums do not add up"
    assert record.latency_s is None
    log = (folder / "logs" / f"{cell.identity}.txt").read_text()
    assert log.startswith("Traceback")
    assert 'raise ArithmeticError("the sums do not\\nadd up")' in log
    assert_the_next_cell_is_fine(worker)


def test_a_cell_that_exits_does_not_end_the_sweep(worker: Worker) -> None:
    _, record = measure(worker, "exit")
    assert (record.status, record.reason) == ("crashed", "SystemExit: 0")
    assert_the_next_cell_is_fine(worker)


def test_a_cell_without_memory_is_oom_and_gets_a_fresh_worker(worker: Worker) -> None:
    before = worker.pool
    _, record = measure(worker, "memory")
    assert (record.status, record.reason) == ("oom", "out of memory: no room for 8 TiB")
    assert worker.pool is not before


@pytest.mark.parametrize(
    ("fault", "status", "reason"),
    [
        ("kill", "oom", "the worker was killed, most likely for memory"),
        ("abort", "crashed", "the worker died with exit code 7"),
    ],
)
def test_a_cell_that_kills_its_worker_is_lost_alone(worker: Worker, fault: str, status: str, reason: str) -> None:
    _, record = measure(worker, fault)
    assert (record.status, record.reason) == (status, reason)
    assert (record.method, record.seq_len, record.latency_s) == (str(worker.settings.folder / "faulty.py"), 64, None)
    if fault == "abort":
        assert_the_next_cell_is_fine(worker)


def test_a_cell_that_hangs_is_stopped_at_its_limit(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(workers, "GRACE_S", 1.0)
        _, record = measure(worker, "hang", limit_s=1.0)
    assert record.status == "timeout"
    assert record.reason is not None
    assert record.reason.startswith("no result after 2 s, much longer than predicted")
    assert_the_next_cell_is_fine(worker)
