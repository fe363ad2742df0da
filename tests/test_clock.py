"""What the CPU's clock times and what it leaves out, and the times of a call's stages."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pyramidbench import clock as clocks
from pyramidbench import stage_clock
from pyramidbench.clock import CpuClock, clock_for
from pyramidbench.stage_clock import stage_times, staged
from pyramidbench.stages import listening, stage

CPU = torch.device("cpu")
Pass = Callable[[float], None]


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch) -> Pass:
    """Replaces perf_counter; the returned function lets seconds pass."""
    now = [0.0]

    def wait(seconds: float) -> None:
        now[0] += seconds

    for module in (clocks, stage_clock):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return wait


def test_the_cpu_clock_times_each_call_and_nothing_else(pass_time: Pass, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = clock_for(CPU)
    assert isinstance(clock, CpuClock)
    assert (clock.name, clock.flush.numel() >= 1 << 19) == ("perf_counter, cold L2", True)
    monkeypatch.setattr(CpuClock, "cool", lambda _: pass_time(16.0))
    durations = iter([0.25, 0.5, 2.0])
    calls = [lambda: pass_time(next(durations))] * 3
    assert clock.turns(calls, lambda _: pass_time(4.0)) == [0.25, 0.5, 2.0]
    assert clock.now() == 3 * 20.0 + 2.75


def test_a_result_is_freed_after_the_time_is_taken(pass_time: Pass) -> None:
    class Result:
        def __del__(self) -> None:
            pass_time(8.0)

    clock = CpuClock("cold")
    assert clock.turns([Result, Result]) == [0.0, 0.0]
    assert clock.now() == 16.0


def test_a_warm_cache_is_made_by_a_call_of_the_same_kind(pass_time: Pass) -> None:
    made: list[str] = []

    def call(name: str) -> Callable[[], None]:
        return lambda: (made.append(name), pass_time(1.0))[0]

    a, b = call("a"), call("b")
    clock = clock_for(CPU, "warm")
    assert clock.name == "perf_counter, warm cache"
    assert clock.turns([a, b, b, a]) == [1.0] * 4
    assert made == ["a", "a", "b", "b", "b", "a", "a"], "a call that follows one of its kind finds the cache warm"


def test_no_garbage_is_collected_between_calls() -> None:
    assert CpuClock("warm").turns([gc.isenabled]) is not None
    seen: list[bool] = []
    CpuClock("warm").turns([lambda: seen.append(gc.isenabled())])
    assert set(seen) == {False}
    assert gc.isenabled()


def test_the_size_of_the_cache_is_read_from_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for index, (level, size) in enumerate([("1", "48K"), ("2", "2048K"), ("3", "266240K")]):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        (folder / "level").write_text(level + "\n")
        (folder / "size").write_text(size + "\n")
    monkeypatch.setattr(clocks, "_CACHES", tmp_path)
    assert CpuClock("cold").flush.numel() == 2 * (2 << 20) * torch.get_num_threads()
    monkeypatch.setattr(clocks, "_CACHES", tmp_path / "gone")
    assert CpuClock("cold").flush.numel() == 2 * clocks.UNKNOWN_CACHE_BYTES * torch.get_num_threads()


def test_stage_times_are_medians_of_the_stages_the_choice_and_the_attention(pass_time: Pass) -> None:
    routes: Iterator[float] = iter([1.0, 8.0, 2.0])

    def select() -> None:
        with stage("build"):
            pass_time(0.5)
        with stage("route"):
            pass_time(next(routes) - 0.5)
        with stage("route"):
            pass_time(0.5)
        pass_time(0.25)

    def attend() -> None:
        with stage("route"):
            pass_time(4.0)

    times = stage_times(staged(select, attend), CPU, "cold", 3)
    assert times.seconds == {"build": 0.5, "route": 2.0, "select": 2.75, "attend": 4.0}
    assert not times.waits_for_host


class Timed:
    """A listener that notes the seconds of each stage."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = self.now()
        yield
        self.seconds[name] = self.now() - start


def test_a_stage_costs_nothing_when_nobody_listens(pass_time: Pass) -> None:
    timer = Timed(clock_for(CPU).now)
    with listening(timer), stage("route"):
        pass_time(1.0)
    with stage("route"):
        pass_time(5.0)
    assert timer.seconds == {"route": 1.0}


def test_listening_ends_with_an_exception_too() -> None:
    timer = Timed(clock_for(CPU).now)
    with pytest.raises(RuntimeError, match="stop"), listening(timer):
        raise RuntimeError("stop")
    with stage("route"):
        pass
    assert timer.seconds == {}


def test_a_stage_is_timed_with_the_cache_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    monkeypatch.setattr(CpuClock, "cool", lambda clock: log.append(f"overwrite {clock.cache}"))
    call = staged(lambda: log.append("select"), lambda: log.append("attend"))
    stage_times(call, CPU, "cold", 2)
    assert log == ["overwrite cold", "select", "attend"] * 2
    log.clear()
    stage_times(call, CPU, "warm", 1)
    assert log == ["select", "attend", "overwrite warm", "select", "attend"], "a warm clock's overwrite is of no bytes"
