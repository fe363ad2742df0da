"""Fault drills on whole sweeps: a method kills its worker, hangs, runs out of memory or faults, and the disk fills up."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from pyramidbench import store, sweep
from pyramidbench import worker as workers
from pyramidbench.errors import UserError
from pyramidbench.record import MEASURED
from pyramidbench.store import load_run

METHOD = '''
"""Attends to everything; strikes from its Nth call in a process on, if a file allows it."""
from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from pyramidbench.cost import Cost, StageCost
from pyramidbench.method import Method

made = {}


@dataclass(frozen=True)
class Drilled(Method):
    """Dense attention with a fault."""

    kind = "selection"
    presets = {"kill": {"fault": "kill"}, "hang": {"fault": "hang"}, "memory": {"fault": "memory"}, "cuda": {"fault": "cuda"}}
    fault: str = "none"

    def select(self, q, k, problem):
        return None

    def attend(self, q, k, v, selection, problem):
        made[self.fault] = made.get(self.fault, 0) + 1
        if made[self.fault] > 4:
            self.strike()
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def strike(self):
        if self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "hang":
            time.sleep(600)
        if self.fault == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80.00 GiB")
        if self.fault == "cuda":
            raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    def backend(self, problem):
        return "test"

    def cost(self, problem):
        return Cost((StageCost("attend", 1.0, 1.0),), 1e6)
'''
AXES: dict[str, Any] = {
    "seq": "64",
    "top_k": "1",
    "block_size": "16",
    "query_tile": "16",
    "head_dim": "8",
    "device": "cpu",
}


FAULTS = {
    "kill": ({"oom", "crashed"}, "the worker was killed (SIGKILL)"),
    "hang": ({"timeout"}, "no result after "),
    "memory": ({"oom"}, "out of memory: CUDA out of memory. Tried to allocate 80.00 GiB"),
    "cuda": ({"cuda_error"}, "CUDA error: device-side assert triggered"),
}


def test_faults_under_the_clock_lose_their_cells_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cell passes the gate; four of six strike while all are timed in turns: killed, hanging, without memory, and with
    a device-side assert (the error that torch raises for one)."""
    monkeypatch.setattr(workers, "GRACE_S", 8.0)
    monkeypatch.setattr("pyramidbench.device.PEAK_SECONDS", 1e-3)
    path = tmp_path / "drilled.py"
    path.write_text(METHOD)
    methods = ["dense", *(f"{path}:{fault}" for fault in FAULTS), "sliding_window"]
    run = sweep(out=tmp_path / "run", method=methods, timing_s=0.05, **AXES)
    by_method = {record.method: record for record in run.records}
    assert set(by_method) == set(methods)
    for fault, (statuses, reason) in FAULTS.items():
        lost = by_method[f"{path}:{fault}"]
        assert lost.status in statuses, fault
        assert lost.reason is not None
        assert lost.reason.startswith(reason), fault
        assert lost.latency_s is None
        log = run.path / "logs" / f"{lost.cell}.txt"
        assert fault == "kill" or "in strike" in log.read_text(), fault
    for method in ("dense", "sliding_window"):
        assert by_method[method].status in MEASURED
        assert by_method[method].speedup_low is not None


@pytest.mark.usefixtures("no_workers")
@pytest.mark.parametrize("full_from", [1, 3, 4, 6, 9], ids="full from the {}th sync on".format)
def test_a_full_disk_is_one_clear_line_and_the_run_goes_on_when_there_is_room(
    full_from: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fills up while cells are judged, while samples are written, and while records are."""
    folder, axes = tmp_path / "run", AXES | {"seq": "64,96", "method": ["dense", "sliding_window"], "timing_s": 0.02}
    synced = os.fsync
    left = [full_from + 2]  # device.json and manifest.json come first

    def full(descriptor: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        synced(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(store.os, "fsync", full)
        with pytest.raises(UserError, match=r"cannot write .*No space left on device.*[Ff]ree some space") as error:
            sweep(out=folder, **axes)
    assert "\n" not in str(error.value)
    stopped = load_run(folder)
    assert stopped.missing > 0
    again = sweep(out=folder, **axes)
    assert (again.missing, len(again.records)) == (0, 4)
    assert again.records[: len(stopped.records)] == stopped.records
    assert {record.status for record in again.records} <= set(MEASURED)


@pytest.mark.usefixtures("no_workers")
def test_a_log_that_finds_no_room_does_not_cost_the_record(tmp_path: Path) -> None:
    path = tmp_path / "drilled.py"
    path.write_text(METHOD.replace("> 4", "> 0"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "logs").write_text("in the way")
    (record,) = sweep(out=tmp_path / "run", method=[f"{path}:cuda"], timing_s=0.02, **AXES).records
    assert (record.status, record.reason) == ("cuda_error", "CUDA error: device-side assert triggered")
