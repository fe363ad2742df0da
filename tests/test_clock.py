"""When the clock warms up and stops, on a clock whose time only the calls move; and the times of a call's stages."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pyramidbench import clock as clocks
from pyramidbench.clock import CpuClock, StageTimer, clock_for, sample, stage_times
from pyramidbench.stages import listening, stage
from pyramidbench.stats import median_interval

CPU = torch.device("cpu")
Pass = Callable[[float], None]


class FakeClock:
    """Each call takes the next of `durations`, and nothing else takes any time."""

    name = "fake"

    def __init__(self, durations: Iterable[float]) -> None:
        self.durations = iter(durations)
        self.time = 100.0

    def times(self, call: Callable[[], object], count: int) -> list[float]:
        taken = []
        for _ in range(count):
            call()
            taken.append(next(self.durations))
        self.time += sum(taken)
        return taken

    def now(self) -> float:
        return self.time


def sampled(durations: Iterable[float], budget_s: float) -> tuple[list[float], float]:
    """The samples, and the seconds that went before them."""
    clock = FakeClock(durations)
    samples = sample(lambda: None, clock, budget_s)
    return samples, clock.time - 100.0 - sum(samples)


@pytest.mark.parametrize(
    ("call_s", "warm_up_s"),
    [(0.0005, 0.1), (0.00099, 0.1), (0.001, 1.0), (0.005, 1.0), (0.01, 3.0), (0.25, 3.0)],
)
def test_the_warm_up_depends_on_the_time_of_a_call(call_s: float, warm_up_s: float) -> None:
    _, before = sampled(itertools.repeat(call_s), budget_s=60.0)
    assert warm_up_s - 1e-9 <= before <= warm_up_s + 10 * call_s


def test_the_warm_up_takes_a_third_of_the_budget_at_most() -> None:
    samples, before = sampled(itertools.repeat(0.005), budget_s=0.6)
    assert 0.2 - 1e-9 <= before <= 0.2 + 4 * 0.005
    assert len(samples) >= 30


def test_steady_calls_stop_at_thirty_samples_when_these_take_long_enough() -> None:
    samples, _ = sampled(itertools.repeat(0.02), budget_s=60.0)
    assert len(samples) == 30


def test_short_calls_go_on_until_a_tenth_of_a_second_is_sampled() -> None:
    samples, _ = sampled(itertools.repeat(0.0005), budget_s=60.0)
    assert 0.1 <= sum(samples) <= 0.1 + 10 * 0.0005
    assert len(samples) >= 200


def test_calls_that_vary_go_on_until_the_median_is_known_to_half_a_per_cent() -> None:
    rng = np.random.default_rng(0)
    samples, before = sampled(rng.normal(0.02, 0.0005, size=100_000).tolist(), budget_s=1000.0)
    interval = median_interval(samples)
    assert interval.relative_half_width <= 0.005
    assert 30 < len(samples) < 1000
    assert before + sum(samples) < 1000.0


def test_calls_that_vary_too_much_stop_with_the_budget() -> None:
    rng = np.random.default_rng(0)
    samples, before = sampled(rng.uniform(0.004, 0.012, size=100_000).tolist(), budget_s=3.0)
    assert 3.0 <= before + sum(samples) <= 3.0 + 0.06
    assert median_interval(samples).relative_half_width > 0.005


def test_a_long_call_is_sampled_three_times_whatever_the_budget() -> None:
    samples, before = sampled(itertools.repeat(7.0), budget_s=1.0)
    assert samples == [7.0, 7.0, 7.0]
    assert before == 7.0


def test_warm_up_calls_are_no_samples() -> None:
    cold = [0.5, 0.5, 0.5]
    samples, _ = sampled(itertools.chain(cold, itertools.repeat(0.02)), budget_s=60.0)
    assert set(samples) == {0.02}


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch) -> Pass:
    """Replaces perf_counter; the returned function lets seconds pass."""
    now = [0.0]

    def wait(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(clocks, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return wait


def test_the_cpu_clock_times_each_call(pass_time: Pass) -> None:
    durations = iter([0.25, 0.5, 2.0])
    clock = clock_for(CPU)
    assert isinstance(clock, CpuClock)
    assert clock.times(lambda: pass_time(next(durations)), 3) == [0.25, 0.5, 2.0]
    assert clock.now() == 2.75


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

    times = stage_times(select, attend, CPU, 3)
    assert times == {"build": 0.5, "route": 2.0, "select": 2.75, "attend": 4.0}


def test_a_stage_costs_nothing_when_nobody_listens(pass_time: Pass) -> None:
    timer = StageTimer(CPU)
    with listening(timer), stage("route"):
        pass_time(1.0)
    with stage("route"):
        pass_time(5.0)
    assert timer.seconds == {"route": 1.0}


def test_listening_ends_with_an_exception_too() -> None:
    timer = StageTimer(CPU)
    with pytest.raises(RuntimeError, match="stop"), listening(timer):
        raise RuntimeError("stop")
    with stage("route"):
        pass
    assert timer.seconds == {}
