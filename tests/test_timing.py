"""From samples to columns, and which calls are timed again as graphs, on a fake clock."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from pyramidbench import timing
from pyramidbench.clock import Announce, Call, nobody
from pyramidbench.nvml import DeviceState
from pyramidbench.problem import Problem
from pyramidbench.registry import create
from pyramidbench.sampling import Sampled
from pyramidbench.stage_clock import StageTimes
from pyramidbench.timing import Timing, is_launch_bound, measure_in_turns, stage_columns, time_columns

CPU = torch.device("cpu")


def sampled(seconds: Sequence[float], **fields: Any) -> Sampled:
    return Sampled(9.0, tuple(seconds), tuple(range(len(seconds))), **fields)


class FakeClock:
    """Every call returns the seconds that the device takes; the host takes `host` of them."""

    name = "fake"

    def __init__(self, host: dict[Call, float | None]) -> None:
        self.time = 0.0
        self.host = host
        self.repeats: list[int] = []

    def turns(self, calls: Sequence[Call], announce: Announce = nobody) -> list[float]:
        taken = []
        for index, call in enumerate(calls):
            announce(index)
            taken.append(float(call()))  # type: ignore[arg-type]
        self.time += sum(taken)
        return taken

    def host_s(self, call: Call, repeats: int) -> float | None:
        self.repeats.append(repeats)
        return self.host[call]

    def cool(self) -> None: ...

    def now(self) -> float:
        return self.time


def test_columns_of_a_timing() -> None:
    seconds = [1.0, 2.0, 3.0, 4.0, 5.0]
    columns = time_columns(Timing("fake", sampled(seconds), None))
    assert (columns["latency_s"], columns["samples"], columns["first_call_s"]) == (3.0, 5, 9.0)
    assert [columns[f"latency_{name}_s"] for name in ("p5", "q1", "q3", "p95")] == pytest.approx([1.2, 2.0, 4.0, 4.8])
    assert 1.0 <= columns["latency_low_s"] <= 3.0 <= columns["latency_high_s"] <= 5.0
    for name in ("host_s", "sm_clock_hz", "power_w", "temperature_c", "throttle_reasons", "reason"):
        assert columns[name] is None, name
    assert "graph_latency_s" not in columns


def test_columns_say_what_held_the_gpu_back_and_why_there_is_no_graph() -> None:
    state = DeviceState(1.2e9, 690.0, 84.0, frozenset({"power cap", "hardware slowdown"}))
    made = Timing("fake", sampled([1.0] * 5, state=state, throttled=True), 2.0, None, "it waits", "NVML is gone")
    columns = time_columns(made)
    assert columns["throttle_reasons"] == "hardware slowdown, power cap"
    assert (columns["sm_clock_hz"], columns["power_w"], columns["temperature_c"]) == (1.2e9, 690.0, 84.0)
    assert columns["reason"] == "NVML is gone; launch-bound, and no CUDA graph: it waits"


def test_both_numbers_of_a_launch_bound_call_are_kept() -> None:
    columns = time_columns(Timing("fake", sampled([4.0] * 5), 4.0, sampled([1.0, 1.5, 2.0])))
    assert (columns["latency_s"], columns["host_s"], columns["graph_latency_s"]) == (4.0, 4.0, 1.5)
    assert (columns["graph_latency_low_s"], columns["graph_latency_high_s"]) == (1.0, 2.0)


@pytest.mark.parametrize(("host_s", "bound"), [(None, False), (0.5, False), (0.79, False), (0.9, True), (3.0, True)])
def test_a_call_is_launch_bound_where_the_host_takes_about_as_long(host_s: float | None, bound: bool) -> None:
    assert is_launch_bound(Timing("fake", sampled([1.0] * 5), host_s)) is bound


def test_a_call_beside_a_launch_bound_one_is_replayed_too_where_its_host_time_could_show(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a replay would be compared with a call that waits for the host."""
    dense, own, refusing = (lambda: 0.02), (lambda: 0.004), (lambda: 0.021)
    replayed = itertools.repeat(0.001)

    def record(call: Call, device: torch.device) -> Any:  # noqa: ARG001
        return "it waits" if call is refusing else lambda: next(replayed)

    monkeypatch.setattr(timing, "record_graph", record)
    times = {dense: 0.012, own: 0.004, refusing: 0.012}
    monkeypatch.setattr(timing, "clock_for", lambda *_: FakeClock(times))
    first, second, third = measure_in_turns([dense, own, refusing], CPU, "cold", 2.0)
    assert first.graph is not None
    assert second.graph is not None
    assert (third.graph, third.graph_gap) == (None, None), "the device bounds it more than the host does"
    first, third = measure_in_turns([dense, refusing], CPU, "cold", 2.0)
    assert (first.graph, third.graph) == (None, None), "no call of this session is launch-bound"


def test_only_launch_bound_calls_are_timed_again_as_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    large, small, waiting = (lambda: 0.02), (lambda: 0.004), (lambda: 0.003)
    replayed = itertools.repeat(0.001)

    def record(call: Call, device: torch.device) -> Any:  # noqa: ARG001
        return "operation not permitted when stream is capturing" if call is waiting else lambda: next(replayed)

    clock = FakeClock({large: 0.001, small: 0.004, waiting: 0.003})
    monkeypatch.setattr(timing, "clock_for", lambda *_: clock)
    monkeypatch.setattr(timing, "record_graph", record)
    said: list[int] = []
    first, second, third = measure_in_turns([large, small, waiting], CPU, "cold", 2.0, said.append)
    assert (first.graph, first.graph_gap) == (None, None)
    assert second.graph is not None
    assert set(second.graph.seconds) == {0.001}
    assert set(second.sampled.seconds) == {0.004}
    assert (third.graph, third.graph_gap) == (None, "operation not permitted when stream is capturing")
    assert said[-1] == 1, "the replays are announced as their own cell"


def test_a_long_call_is_issued_once_to_time_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    long, short = (lambda: 1.0), (lambda: 0.02)
    clock = FakeClock({long: 0.1, short: 0.001})
    monkeypatch.setattr(timing, "clock_for", lambda *_: clock)
    measure_in_turns([long, short], CPU, "cold", 2.0)
    assert clock.repeats == [1, 5]


@pytest.mark.parametrize(("waits", "reason"), [(False, None), (True, "its stages hold waits for the host")])
def test_stages_that_hold_waits_say_so(monkeypatch: pytest.MonkeyPatch, waits: bool, reason: str | None) -> None:
    monkeypatch.setattr(timing, "stage_times", lambda *_: StageTimes({"select": 0.0, "attend": 1.0}, waits))
    q = torch.zeros(1, 1, 8, 4)
    columns = stage_columns(create("dense"), (q, q, q), Problem.of(q, q, q, causal=True, scale=None), None, "cold", 1.0)
    assert (columns["attend_s"], columns["reason"]) == (1.0, reason)


@pytest.mark.parametrize(("call_s", "repeats"), [(1e-3, 15), (5e-3, 10), (0.1, 3), (0.2, 1), (3.0, 1)])
def test_short_calls_have_their_stages_timed_more_often(
    monkeypatch: pytest.MonkeyPatch, call_s: float, repeats: int
) -> None:
    asked: list[int] = []

    def noted(call: object, device: object, cache: object, repeats: int) -> StageTimes:  # noqa: ARG001
        asked.append(repeats)
        return StageTimes({"select": 0.0, "attend": 1.0})

    monkeypatch.setattr(timing, "stage_times", noted)
    q = torch.zeros(1, 1, 8, 4)
    problem = Problem.of(q, q, q, causal=True, scale=None)
    stage_columns(create("dense"), (q, q, q), problem, None, "cold", call_s)
    assert asked == [repeats]
