"""What the clocks of a GPU measure, on a made-up device that does its work in order while a made-up host hands it over."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from pyramidbench import clock as clocks
from pyramidbench import stage_clock
from pyramidbench.clock import Cache, CudaClock
from pyramidbench.stage_clock import LONGEST_LEAD_S, Staged, queued_times
from pyramidbench.stages import Listener

OVERWRITE_S = 30e-6


@dataclass
class FakeMark:
    """Reached at a time of the device."""

    gpu: FakeQueue
    at: float

    def query(self) -> bool:
        return self.gpu.now >= self.at

    def elapsed_time(self, end: FakeMark) -> float:
        return 1e3 * (end.at - self.at)


@dataclass
class FakeQueue:
    """A device that is free from `free_at` on, and a host at `now`. Handing over takes 5 µs; `log` says what was."""

    launch_s: float = 5e-6
    now: float = 0.0
    free_at: float = 0.0
    log: list[str] = field(default_factory=list)

    def launch(self, seconds: float, name: str = "kernel") -> None:
        self.now += self.launch_s
        self.free_at = max(self.now, self.free_at) + seconds
        self.log.append(name)

    def think(self, seconds: float) -> None:
        """The host does something else."""
        self.now += seconds

    def mark(self) -> FakeMark:
        return FakeMark(self, max(self.now, self.free_at))

    def cool(self) -> None:
        self.launch(OVERWRITE_S, "overwrite")

    def hold(self, seconds: float) -> None:
        for _ in range(math.ceil(seconds / OVERWRITE_S)):
            self.cool()

    def wait(self) -> None:
        self.now = max(self.now, self.free_at)
        self.log.append("wait")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeQueue:
    """The device, whose host's time is also what perf_counter says."""
    made = FakeQueue()
    for module in (clocks, stage_clock):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: made.now))
    return made


def slow_to_launch(gpu: FakeQueue, think_s: float) -> Staged:
    """Kernels of 20 µs in build, 10 + 30 µs in route and 1 ms in attend, with a host that thinks before each."""

    def kernels(*seconds: float) -> None:
        for each in seconds:
            gpu.think(think_s)
            gpu.launch(each)

    def call(listener: Listener) -> None:
        with listener("select"):
            with listener("build"):
                kernels(20e-6)
            for part_s in (10e-6, 30e-6):
                with listener("route"):
                    kernels(part_s)
            kernels(5e-6)
        with listener("attend"):
            kernels(1e-3)

    return call


@pytest.mark.parametrize("cache", ["cold", "warm"])
@pytest.mark.parametrize("think_s", [0.0, 50e-6, 2e-3])
def test_a_stage_takes_what_its_kernels_take_however_slow_the_host_is(
    gpu: FakeQueue, think_s: float, cache: Cache
) -> None:
    times = queued_times(slow_to_launch(gpu, think_s), gpu, cache, 3)
    assert times.seconds == pytest.approx({"build": 20e-6, "route": 40e-6, "select": 65e-6, "attend": 1e-3})
    assert not times.waits_for_host


def test_stages_add_up_to_the_whole_call(gpu: FakeQueue) -> None:
    call = slow_to_launch(gpu, 100e-6)
    seconds = queued_times(call, gpu, "cold", 3).seconds

    def whole(listener: Listener) -> None:
        with listener("whole"):
            call(lambda _: nullcontext())

    assert queued_times(whole, gpu, "cold", 3).seconds["whole"] == pytest.approx(seconds["select"] + seconds["attend"])


def test_the_lead_grows_until_the_host_is_ahead(gpu: FakeQueue) -> None:
    """The host is quick when it is first asked and slow afterwards."""
    thinking = iter([1e-6] * 5)
    ahead = queued_times(lambda listener: slow_to_launch(gpu, next(thinking, 1e-3))(listener), gpu, "cold", 3)
    assert ahead.seconds["build"] == pytest.approx(20e-6)
    assert not ahead.waits_for_host


def test_a_call_that_waits_for_the_device_says_so_and_is_not_tried_for_ever(gpu: FakeQueue) -> None:
    calls = 0

    def call(listener: Listener) -> None:
        nonlocal calls
        calls += 1
        with listener("select"):
            gpu.launch(20e-6)
            gpu.wait()
        with listener("attend"):
            gpu.think(40e-6)
            gpu.launch(1e-3)

    times = queued_times(call, gpu, "cold", 3)
    assert times.waits_for_host
    assert times.seconds["select"] == pytest.approx(20e-6)
    assert times.seconds["attend"] == pytest.approx(1e-3 + 45e-6), "between the events the device had nothing to do"
    assert calls <= 1 + 3 + math.log2(LONGEST_LEAD_S / 1e-4)
    assert gpu.now < 4 * LONGEST_LEAD_S


def test_a_run_in_which_the_host_fell_behind_is_left_out(gpu: FakeQueue) -> None:
    made = 0

    def call(listener: Listener) -> None:
        nonlocal made
        made += 1
        slow_to_launch(gpu, 20e-3 if made in (4, 5, 6) else 10e-6)(listener)

    times = queued_times(call, gpu, "cold", 5)
    assert times.seconds["route"] == pytest.approx(40e-6)
    assert not times.waits_for_host


def test_a_cold_call_comes_right_after_an_overwrite_and_a_warm_one_after_its_own_kind(gpu: FakeQueue) -> None:
    def call(listener: Listener) -> None:
        with listener("attend"):
            gpu.launch(1e-3)

    queued_times(call, gpu, "cold", 1)
    assert gpu.log[-3:] == ["overwrite", "kernel", "wait"]
    queued_times(call, gpu, "warm", 1)
    assert gpu.log[-4:] == ["overwrite", "kernel", "kernel", "wait"]


def delayed(gpu: FakeQueue, think_s: float, seconds: float) -> Callable[[], None]:
    """A short kernel, a host that thinks, and a long kernel."""

    def call() -> None:
        gpu.launch(10e-6)
        gpu.think(think_s)
        gpu.launch(seconds)

    return call


def test_the_first_call_of_a_batch_is_timed_like_the_others(gpu: FakeQueue) -> None:
    """Before the second batch the device was waited for, and yet its first call finds it at work, as the second one does."""
    clock = CudaClock(gpu, "cold")
    call = delayed(gpu, 0.4e-3, 2e-3)
    first, *others = clock.turns([call] * 3)
    assert others == pytest.approx([2.01e-3] * 2)
    assert first > 2.3e-3, "the very first batch has no call before it"
    assert clock.turns([call] * 3) == pytest.approx([2.01e-3] * 3)
    assert clock.turns([call]) == pytest.approx([2.01e-3])


def test_the_lead_of_a_batch_is_no_longer_than_it_need_be(gpu: FakeQueue) -> None:
    clock = CudaClock(gpu, "cold")
    clock.turns([delayed(gpu, 1e-3, 0.5)])
    assert clock.lead_s == pytest.approx(2 * 1.01e-3), "twice the host's time"
    clock.turns([delayed(gpu, 0.6e-3, 1e-3)])
    assert clock.lead_s == pytest.approx(1.01e-3), "the call's own time, as if it were still running"


def test_a_call_that_the_host_bounds_has_no_lead(gpu: FakeQueue) -> None:
    """What is before it leaves the device nothing to do, so it is timed with its waits, whichever place it has."""
    clock = CudaClock(gpu, "cold")
    call = delayed(gpu, 1e-3, 20e-6)
    times = clock.turns([call] * 3) + clock.turns([call] * 3)
    assert times == pytest.approx([times[0]] * 6, rel=0.05)
    assert times[0] > 0.9e-3
    assert clock.lead_s == 0.0


def test_events_enclose_the_call_and_not_the_overwrite(gpu: FakeQueue) -> None:
    clock = CudaClock(gpu, "cold")
    assert clock.turns([lambda: gpu.launch(1e-3)] * 2) == pytest.approx([1e-3] * 2)
    assert gpu.log == ["overwrite", "kernel"] * 2 + ["wait"]
    gpu.log.clear()
    CudaClock(gpu, "warm").turns([lambda: gpu.launch(1e-3)] * 2)
    assert gpu.log == ["kernel"] * 3 + ["wait"]


def test_the_hosts_time_is_that_of_handing_over(gpu: FakeQueue) -> None:
    assert CudaClock(gpu, "cold").host_s(delayed(gpu, 0.4e-3, 2e-3), 3) == pytest.approx(0.41e-3)
