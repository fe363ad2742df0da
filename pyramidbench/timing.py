"""The time of cells: their passes under the clock in turns, and the columns that are made of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyramidbench.clock import HOST_REPEATS, LAUNCH_BOUND, LONG_CALL_S, Announce, Cache, Call, Clock, clock_for, nobody
from pyramidbench.decoding import append_newest
from pyramidbench.graphs import record_graph
from pyramidbench.method import Method
from pyramidbench.nvml import DeviceState, Watch, watch_for
from pyramidbench.passes import Training
from pyramidbench.problem import Problem
from pyramidbench.sampling import Sampled, sample_in_turns
from pyramidbench.selection import BlockSelection
from pyramidbench.stage_clock import stage_times, staged
from pyramidbench.stats import median_interval, spread

HOST_SHARE = 0.1
"""Host time ÷ measured time from which on a call is replayed too where another of its session is: one decoding step of
FlashAttention-3 on 128k keys takes 281 µs launched, its host 214 of them, and 150 replayed."""
STAGE_REPEATS, MOST_STAGE_REPEATS, STAGES_S = 3, 15, 0.05
"""Calls whose stages are timed: three, and up to fifteen within so many seconds; one of long calls."""


@dataclass(frozen=True)
class Timing:
    """Times of one cell's pass. host_s: the host's time to issue a call, None on a CPU. graph: the same call as a CUDA graph,
    of launch-bound calls; graph_gap says why one has none. watch_gap says why a GPU's state was not read."""

    clock: str
    sampled: Sampled
    host_s: float | None = None
    graph: Sampled | None = None
    graph_gap: str | None = None
    watch_gap: str | None = None

    @property
    def throttled(self) -> bool:
        return self.sampled.throttled


def measure_in_turns(
    calls: Sequence[Call],
    device: torch.device,
    cache: Cache,
    timing_s: float,
    announce: Announce = nobody,
    *,
    one_by_one: bool = False,
) -> list[Timing]:
    """The times of these calls, which have all been compiled; `pyramidbench.sampling` says how they are sampled."""
    clock, watch = clock_for(device, cache), watch_for(device)
    sampled = sample_in_turns(calls, clock, timing_s, watch, announce, one_by_one=one_by_one)
    timings = []
    for index, (call, own) in enumerate(zip(calls, sampled)):
        announce(index)
        median_s = median_interval(own.seconds).median
        host_s = clock.host_s(call, HOST_REPEATS if median_s < LONG_CALL_S else 1)
        timings.append(Timing(clock.name, own, host_s, watch_gap=watch.gap))
    return _with_graphs(calls, timings, device, clock, watch, timing_s, announce)


def _with_graphs(
    calls: Sequence[Call],
    timings: list[Timing],
    device: torch.device,
    clock: Clock,
    watch: Watch,
    timing_s: float,
    announce: Announce,
) -> list[Timing]:
    """Launch-bound calls once more as graphs, in turns too, and with them all whose host time could show beside a replay."""
    if not any(is_launch_bound(timing) for timing in timings):
        return timings
    replays: dict[int, Call] = {}
    gaps: dict[int, str] = {}
    for index, timing in enumerate(timings):
        if not _holds_host_time(timing):
            continue
        announce(index)
        recorded = record_graph(calls[index], device)
        if not isinstance(recorded, str):
            replays[index] = recorded
        elif is_launch_bound(timing):
            gaps[index] = recorded
    places = list(replays)
    sampled = sample_in_turns(list(replays.values()), clock, timing_s, watch, lambda i: announce(places[i]))
    graphs = dict(zip(places, sampled))
    return [
        Timing(t.clock, t.sampled, t.host_s, graphs.get(i), gaps.get(i), t.watch_gap) for i, t in enumerate(timings)
    ]


def is_launch_bound(timing: Timing) -> bool:
    """Whether the host takes about as long to issue the call as the call takes."""
    return _host_share(timing) > LAUNCH_BOUND


def _holds_host_time(timing: Timing) -> bool:
    """Whether the call takes so little longer than its host that a replay may be faster."""
    return _host_share(timing) > HOST_SHARE


def _host_share(timing: Timing) -> float:
    if timing.host_s is None:
        return 0.0
    return timing.host_s / median_interval(timing.sampled.seconds).median


def time_columns(timing: Timing) -> dict[str, Any]:
    """The columns of a timing."""
    sampled, state = timing.sampled, timing.sampled.state or DeviceState()
    interval = median_interval(sampled.seconds)
    graph = None if timing.graph is None else median_interval(timing.graph.seconds)
    columns: dict[str, Any] = {
        "latency_s": interval.median,
        "latency_low_s": interval.low,
        "latency_high_s": interval.high,
        "samples": len(sampled.seconds),
        "clock": timing.clock,
        "first_call_s": sampled.first_s,
        "host_s": timing.host_s,
        "sm_clock_hz": state.sm_clock_hz,
        "power_w": state.power_w,
        "temperature_c": state.temperature_c,
        "throttle_reasons": ", ".join(sorted(state.reasons)) or None,
    }
    columns |= {f"latency_{name}_s": value for name, value in spread(sampled.seconds).items()}
    if graph is not None:
        columns |= {
            "graph_latency_s": graph.median, "graph_latency_low_s": graph.low, "graph_latency_high_s": graph.high,
        }  # fmt: skip
    gaps = [timing.watch_gap, timing.graph_gap and f"launch-bound, and no CUDA graph: {timing.graph_gap}"]
    return columns | {"reason": "; ".join(gap for gap in gaps if gap) or None}


def stage_columns(
    method: Method,
    tensors: tuple[Tensor, Tensor, Tensor],
    problem: Problem,
    training: Training | None,
    cache: Cache,
    call_s: float,
) -> dict[str, Any]:
    """Medians of the stages of calls that take `call_s`; `training` is the pass with gradients, None in a forward."""
    q, k, v = tensors
    selection: BlockSelection | None = None

    def select() -> None:
        nonlocal selection
        if problem.direction == "decode":
            append_newest(method, k, v, problem)
            return
        selection = None if method.chooses_inside else method.select(q, k, problem)

    def attend() -> Tensor:
        return training.attend(selection) if training else method.attend(q, k, v, selection, problem)

    call = staged(select, attend, training.backward if training else None)
    with torch.no_grad():
        timed = stage_times(call, q.device, cache, _stage_repeats(call_s))
    stages = timed.seconds
    build, route, append = stages.get("build"), stages.get("route"), stages.get("append")
    index = stages["select"] - (build or 0.0) - (route or 0.0)
    return {
        "build_s": build,
        "route_s": route,
        "index_s": max(0.0, index) if selection is not None and append is None else None,
        "append_s": append,
        "attend_s": stages["attend"],
        "backward_s": stages.get("backward"),
        "reason": "its stages hold waits for the host" if timed.waits_for_host else None,
    }


def _stage_repeats(call_s: float) -> int:
    if call_s >= LONG_CALL_S:
        return 1
    return max(STAGE_REPEATS, min(MOST_STAGE_REPEATS, int(STAGES_S / max(call_s, 1e-6))))


def timed_call(
    method: Method, tensors: tuple[Tensor, Tensor, Tensor], problem: Problem, training: Training | None
) -> Callable[[], object]:
    """What the clock times: a whole forward; a whole forward and backward; or the backward of one forward, whose graph is
    kept."""
    if training is None:
        return lambda: method(*tensors, problem)
    if problem.direction == "train":
        return training.train
    output = training.attend(training.select())
    return lambda: training.backward(output)
