"""When sampling warms up and stops, and in which order it goes, on a clock whose time only the calls move."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from pyramidbench.clock import Announce, Call, nobody
from pyramidbench.nvml import DeviceState
from pyramidbench.sampling import BLOCK_S, RETRIES, Sampled, sample_in_turns
from pyramidbench.stats import median_interval, paired_ratio

HOT = DeviceState(reasons=frozenset({"hardware thermal slowdown"}), sm_clock_hz=1e9, power_w=650.0, temperature_c=88.0)
COOL = DeviceState(sm_clock_hz=1.9e9, power_w=400.0, temperature_c=60.0)


class FakeClock:
    """A call takes what it says, times the `pace` of the moment; every turn takes `overhead_s` besides."""

    name = "fake"

    def __init__(self, overhead_s: float = 0.0, pace: Callable[[float], float] = lambda _: 1.0) -> None:
        self.time = 100.0
        self.overhead_s = overhead_s
        self.pace = pace
        self.batches: list[int] = []

    def turns(self, calls: Sequence[Call], announce: Announce = nobody) -> list[float]:
        taken = []
        self.batches.append(len(calls))
        for index, call in enumerate(calls):
            announce(index)
            seconds = call() * self.pace(self.time - 100.0)  # type: ignore[operator]
            self.time += seconds + self.overhead_s
            taken.append(seconds)
        return taken

    def host_s(self, call: Call, repeats: int) -> float | None: ...

    def cool(self) -> None: ...

    def now(self) -> float:
        return self.time


def lasting(durations: Iterable[float]) -> Call:
    """A call that takes the next of `durations`."""
    remaining = iter(durations)
    return lambda: next(remaining)


def steady(seconds: float) -> Call:
    return lambda: seconds


@dataclass
class Alone:
    """One call sampled alone: its samples, and the seconds that went before them."""

    sampled: Sampled
    before_s: float

    @property
    def seconds(self) -> tuple[float, ...]:
        return self.sampled.seconds


def alone(durations: Iterable[float], budget_s: float, overhead_s: float = 0.0) -> Alone:
    clock = FakeClock(overhead_s)
    (sampled,) = sample_in_turns([lasting(durations)], clock, budget_s)
    return Alone(sampled, clock.time - 100.0 - sum(sampled.seconds))


@pytest.mark.parametrize(
    ("call_s", "warm_up_s"),
    [(0.0005, 0.1), (0.00099, 0.1), (0.001, 1.0), (0.005, 1.0), (0.01, 3.0), (0.25, 3.0), (2.0, 6.0)],
)
def test_the_warm_up_depends_on_the_time_of_a_call(call_s: float, warm_up_s: float) -> None:
    before = alone(itertools.repeat(call_s), budget_s=60.0).before_s
    assert warm_up_s - 1e-9 <= before <= warm_up_s + 10 * call_s


def test_a_first_call_that_compiles_does_not_make_the_warm_up_long() -> None:
    one = alone(itertools.chain([5.0], itertools.repeat(0.0005)), budget_s=60.0)
    assert one.sampled.first_s == 5.0
    assert set(one.seconds) == {0.0005}
    assert one.before_s < 5.1 + 0.01


def test_the_warm_up_takes_a_third_of_the_budget_at_most() -> None:
    one = alone(itertools.repeat(0.005), budget_s=0.6)
    assert 0.2 - 1e-9 <= one.before_s <= 0.2 + 4 * 0.005
    assert len(one.seconds) >= 30


def test_steady_calls_stop_at_thirty_samples_when_these_take_long_enough() -> None:
    assert len(alone(itertools.repeat(0.02), budget_s=60.0).seconds) == 30


def test_short_calls_go_on_until_a_tenth_of_a_second_is_sampled() -> None:
    samples = alone(itertools.repeat(0.0005), budget_s=60.0).seconds
    assert sum(samples) + 1e-9 >= 0.1
    assert 200 <= len(samples) <= 230


def test_calls_that_vary_go_on_until_the_median_is_known_to_half_a_per_cent() -> None:
    rng = np.random.default_rng(0)
    one = alone(rng.normal(0.02, 0.0005, size=100_000).tolist(), budget_s=1000.0)
    interval = median_interval(one.seconds)
    assert interval.relative_half_width <= 0.005
    assert 30 < len(one.seconds) < 1000
    assert one.before_s + sum(one.seconds) < 1000.0


def test_calls_that_vary_too_much_stop_with_the_budget() -> None:
    rng = np.random.default_rng(0)
    one = alone(rng.uniform(0.004, 0.012, size=100_000).tolist(), budget_s=3.0)
    assert 3.0 <= one.before_s + sum(one.seconds) <= 3.0 + 0.06
    assert median_interval(one.seconds).relative_half_width > 0.005


def test_what_a_turn_takes_besides_is_charged_to_the_budget() -> None:
    clock = FakeClock(overhead_s=0.009)
    rng = np.random.default_rng(1)
    sampled = sample_in_turns([lasting(rng.uniform(1e-3, 2e-3, size=10_000))] * 2, clock, budget_s=2.0)
    assert clock.time - 100.0 == pytest.approx(4.0, rel=0.1)
    assert all(len(one.seconds) < 200 for one in sampled)


def test_a_long_call_is_sampled_three_times_whatever_the_budget() -> None:
    one = alone(itertools.repeat(7.0), budget_s=1.0)
    assert one.seconds == (7.0, 7.0, 7.0)
    assert one.before_s == 7.0


def test_warm_up_calls_are_no_samples() -> None:
    one = alone(itertools.chain([0.5, 0.5, 0.5], itertools.repeat(0.02)), budget_s=60.0)
    assert set(one.seconds) == {0.02}
    assert one.sampled.first_s == 0.5


def order_of(sampled: Sequence[Sampled]) -> list[int]:
    """Whose turn each timed call was, read from the places that the samples kept."""
    places = sorted((turn, index) for index, one in enumerate(sampled) for turn in one.turns)
    assert [turn for turn, _ in places] == list(range(len(places)))
    return [index for _, index in places]


def test_every_other_round_goes_back() -> None:
    sampled = sample_in_turns([steady(0.02), steady(0.03), steady(0.05)], FakeClock(), 60.0)
    order = order_of(sampled)
    assert order[:12] == [0, 1, 2, 2, 1, 0, 0, 1, 2, 2, 1, 0]
    assert {len(one.seconds) for one in sampled} == {30}


def test_rounds_that_fit_into_twenty_milliseconds_go_to_the_device_together_and_still_alternate() -> None:
    clock = FakeClock()
    sampled = sample_in_turns([steady(0.001), steady(0.003)], clock, 60.0)
    assert order_of(sampled)[:8] == [0, 1, 1, 0, 0, 1, 1, 0]
    assert clock.batches[-1] == 2 * 5


def test_a_call_has_one_sample_in_every_round_until_it_leaves() -> None:
    rng = np.random.default_rng(2)
    calls = [steady(0.02), lasting(rng.normal(0.02, 0.0005, size=10_000))]
    few, many = sample_in_turns(calls, FakeClock(), 60.0)
    assert len(few.seconds) == 30 < len(many.seconds)
    assert [turn // 2 for turn in few.turns] == [turn // 2 for turn in many.turns[:30]] == list(range(30))


def test_a_long_call_leaves_with_its_own_budget_and_the_short_one_goes_on() -> None:
    long, short = sample_in_turns([steady(1.0), steady(0.005)], FakeClock(), 5.9)
    assert len(long.seconds) == 4
    assert len(short.seconds) >= 30


def test_drift_cancels_in_pairs_of_one_session_and_not_between_two() -> None:
    """The device slows down by a fifth while the two, of which one takes 3 % longer, are measured."""
    rng = np.random.default_rng(3)

    def noisy(seconds: float) -> Call:
        return lasting(rng.normal(seconds, 0.03 * seconds, size=10_000))

    def drifting(at: float) -> float:
        return 1 + 0.2 * min(1.0, at / 10.0)

    a, b = sample_in_turns([noisy(0.0206), noisy(0.02)], FakeClock(pace=drifting), 5.0)
    ratio = paired_ratio(a.seconds, b.seconds)
    assert ratio.low <= 1.03 <= ratio.high
    assert ratio.high - ratio.low < 0.03
    clock = FakeClock(pace=drifting)
    (first,), (second,) = (sample_in_turns([noisy(s)], clock, 5.0) for s in (0.0206, 0.02))
    apart = median_interval(first.seconds).median / median_interval(second.seconds).median
    assert apart < 0.97


def test_whose_turn_it_is_is_announced_before_every_call() -> None:
    said: list[int] = []
    made: list[int] = []

    def noting(index: int) -> Call:
        def call() -> float:
            assert said[-1] == index
            made.append(index)
            return 0.02

        return call

    sample_in_turns([noting(0), noting(1)], FakeClock(), 1.0, announce=said.append)
    assert said == made


def test_one_by_one_waits_for_the_device_after_every_call() -> None:
    clock = FakeClock()
    together = sample_in_turns([steady(0.001), steady(0.002)], FakeClock(), 1.0)
    sampled = sample_in_turns([steady(0.001), steady(0.002)], clock, 1.0, one_by_one=True)
    assert set(clock.batches) == {1}
    assert order_of(sampled)[:8] == order_of(together)[:8] == [0, 1, 1, 0, 0, 1, 1, 0]


@dataclass
class FakeWatch:
    """Reads the next of `states`, then COOL."""

    states: Iterator[DeviceState]
    gap: str | None = None
    reads: int = 0
    rests: int = field(default=0)

    def read(self) -> DeviceState | None:
        self.reads += 1
        return next(self.states, COOL)

    def rest(self) -> None:
        self.rests += 1


def watched(states: Iterable[DeviceState], durations: Iterable[float]) -> tuple[Sampled, FakeWatch, FakeClock]:
    clock, watch = FakeClock(), FakeWatch(iter(states))
    (sampled,) = sample_in_turns([lasting(durations)], clock, 6.0, watch)
    return sampled, watch, clock


def test_the_state_is_read_around_blocks_and_the_worst_is_kept() -> None:
    warmer = DeviceState(1.5e9, 500.0, 70.0, frozenset({"power cap"}))
    sampled, watch, _ = watched([COOL, warmer], itertools.repeat(0.02))
    blocks = -(-30 * 0.02 // BLOCK_S)
    assert watch.reads == 2 * blocks
    assert sampled.state == DeviceState(1.5e9, 500.0, 70.0, frozenset({"power cap"}))
    assert not sampled.throttled, "the power cap alone is no throttling"


def test_a_throttled_block_is_measured_again() -> None:
    slow = int(BLOCK_S / 0.04) + 1
    warm_up = 2.0
    durations = itertools.chain([0.02] * int(warm_up / 0.02), [0.04] * slow, itertools.repeat(0.02))
    sampled, watch, _ = watched([COOL, HOT], durations)
    assert set(sampled.seconds) == {0.02}
    assert len(sampled.seconds) >= 30
    assert watch.rests == 1
    assert not sampled.throttled
    assert sampled.state == COOL


def test_a_device_that_stays_throttled_is_measured_and_marked() -> None:
    sampled, watch, clock = watched(itertools.repeat(HOT), itertools.repeat(0.02))
    assert watch.rests == RETRIES
    assert sampled.throttled
    assert len(sampled.seconds) == 30
    assert sampled.state == HOT
    assert clock.time - 100.0 < 6.0


def test_blocks_that_were_thrown_away_leave_the_pairs_in_step() -> None:
    clock, watch = FakeClock(), FakeWatch(iter([COOL, COOL, COOL, HOT]))
    a, b = sample_in_turns([steady(0.02), steady(0.03)], clock, 6.0, watch)
    assert len(a.turns) == len(b.turns) == 30
    assert all(abs(x - y) <= 1 for x, y in zip(a.turns, b.turns))
    assert max(a.turns) > 2 * 30
