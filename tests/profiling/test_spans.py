"""Spans: their paths and times, marks for profilers, and that a sweep hears no parts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pyramidbench.profiling import spans as module
from pyramidbench.profiling.spans import Spans, call_between_marks, marks, run_with, span_times
from pyramidbench.stages import listening, part, stage

CPU = torch.device("cpu")


def walk(spans: Spans) -> None:
    """A call with two stages and parts inside one of them."""
    with spans("select"):
        with stage("build"):
            pass
        with stage("route"):
            for level in (1, 0):
                with part(f"level {level}"):
                    pass
    with spans("attend"), part("transpose"):
        pass


PATHS = [
    "select",
    "select/build",
    "select/route",
    "select/route/level 1",
    "select/route/level 0",
    "attend",
    "attend/transpose",
]


def test_paths_follow_the_nesting() -> None:
    heard: list[str] = []

    @contextmanager
    def around(path: str) -> Iterator[None]:
        heard.append(path)
        yield

    run_with(walk, around)
    assert heard == PATHS


def test_a_sweep_hears_stages_and_no_parts() -> None:
    heard: list[str] = []

    def listener(name: str) -> Any:
        heard.append(name)
        return nullcontext()

    with listening(listener):
        walk(Spans(lambda _: nullcontext()))
    assert heard == ["build", "route"]
    with part("level 0"):
        pass
    assert heard == ["build", "route"]


def test_parts_are_heard_from_autograds_threads_too() -> None:
    heard: list[str] = []

    def listener(name: str) -> Any:
        heard.append(name)
        return nullcontext()

    def backward() -> None:
        with part("transpose"):
            pass

    with listening(listener, parts=True):
        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
    assert heard == ["transpose"]


def test_an_error_inside_leaves_nobody_listening() -> None:
    def fails(spans: Spans) -> None:
        with spans("select"):
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        run_with(fails, lambda _: nullcontext())
    assert isinstance(part("x"), nullcontext)
    assert isinstance(stage("x"), nullcontext)


def test_the_index_is_what_choosing_takes_besides_its_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on by one at each look: a span with n looks inside takes n + 1."""
    ticks = iter(range(10_000))
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    times = span_times(walk, CPU, 3, "wall")
    assert list(times) == [*PATHS, "index"]
    assert times["select/route/level 1"] == 1
    assert times["select/route"] == 5
    assert times["select"] == 9
    assert times["index"] == 9 - 5 - 1


def test_without_stages_inside_there_is_no_index() -> None:
    def dense(spans: Spans) -> None:
        with spans("select"):
            pass
        with spans("attend"):
            pass

    assert list(span_times(dense, CPU, 1, "wall")) == ["select", "attend"]


class FakeQueue:
    """A device's queue that goes on by a millisecond at each mark, and never catches up with its host."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks = 0
        self.held = self.waits = 0

    def mark(self) -> Any:
        self.marks += 1
        at = self.marks
        return SimpleNamespace(at=at, query=lambda: False, elapsed_time=lambda end: float(end.at - at))

    def hold(self, seconds: float) -> None:
        assert seconds > 0
        self.held += 1

    def wait(self) -> None:
        self.waits += 1


def test_device_times_are_of_calls_handed_over_while_the_device_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[FakeQueue] = []
    monkeypatch.setattr(module, "CudaQueue", lambda device: made.append(FakeQueue(device)) or made[0])
    times = span_times(walk, CPU, 2, "device")
    assert list(times) == [*PATHS, "index"]
    assert times["select"] == pytest.approx(9e-3)
    assert times["select/route/level 0"] == pytest.approx(1e-3)
    assert times["index"] == pytest.approx((9 - 5 - 1) * 1e-3)
    assert (made[0].held, made[0].waits) == (2, 2 + 2), (
        "once a call, and around the one that tells how slow the host is"
    )


def test_marks_are_nvtx_ranges_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    @contextmanager
    def named(name: str) -> Iterator[None]:
        opened.append(name)
        yield

    monkeypatch.setattr(torch.cuda.nvtx, "range", named)
    with marks("route"):
        pass
    assert opened == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    run_with(walk, marks)
    assert opened == [f"pyramidbench/{path}" for path in PATHS]


def test_nsight_sees_one_warm_call(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    runtime = SimpleNamespace(
        cudaProfilerStart=lambda: log.append("start"), cudaProfilerStop=lambda: log.append("stop")
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(module, "synchronize", lambda _: None)
    call_between_marks(lambda _: log.append("call"), torch.device("cuda"), warm_calls=2)
    assert log == ["call", "call", "start", "call", "stop"]
