"""The stage clock: how long the parts of a call take.

On a GPU a stage lies between two events of one whole call. The host hands the call over, stage after stage, while the device
is kept busy with something else, and is done before the device begins; so no stage holds a wait for the host to launch its
kernels, as it would if each were timed from an idle device. Whether the host was that far ahead is asked each time, and its
lead made longer until it is. A call that itself waits for the device, as for a size that depends on data, cannot be handed over
like that: its stages hold those waits, and `waits_for_host` says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

import torch

from pyramidbench.clock import Cache, Call, CpuClock, uncollected
from pyramidbench.device_queue import CudaQueue, Mark, Queue
from pyramidbench.stages import Listener, listening

Output = TypeVar("Output")
Staged = Callable[[Listener], object]
"""A call that runs each of its stages inside `listener(name)`."""
LEAD = 3.0
"""Seconds for which the device is held at first ÷ those that the host takes to hand a call over; a warm cache takes two."""
SHORTEST_LEAD_S = 1e-4
LONGEST_LEAD_S = 0.05
"""Longer than a host needs for as many launches as the queue of a device holds, about a thousand."""


@dataclass(frozen=True)
class StageTimes:
    """Median seconds by stage; waits_for_host: they hold times in which a GPU waited for its host."""

    seconds: dict[str, float]
    waits_for_host: bool = False


@dataclass(frozen=True)
class _Run:
    """One call in its stages. ahead: the host had handed it all over before the device began."""

    seconds: dict[str, float]
    ahead: bool


def stage_times(call: Staged, device: torch.device, cache: Cache, repeats: int) -> StageTimes:
    """Median seconds of a call's stages, of as many calls, each with a cold or a warm cache; work of one name adds up."""
    if device.type == "cuda":
        return queued_times(call, CudaQueue(device), cache, repeats)
    clock = CpuClock(cache)
    if cache == "warm":
        call(_nobody)
    return StageTimes(_medians(_on_cpu(call, clock) for _ in range(repeats)))


def queued_times(call: Staged, queue: Queue, cache: Cache, repeats: int) -> StageTimes:
    """Median seconds that the device takes for each stage of a call."""
    with uncollected():
        lead_s = max(SHORTEST_LEAD_S, LEAD * _host_s(call, queue))
        runs = [_on_queue(call, queue, cache, min(lead_s, LONGEST_LEAD_S))]
        while not runs[-1].ahead and lead_s < LONGEST_LEAD_S:
            lead_s *= 2
            runs = [_on_queue(call, queue, cache, min(lead_s, LONGEST_LEAD_S))]
        lead_s = min(lead_s, LONGEST_LEAD_S) if runs[0].ahead else 0.0
        runs += [_on_queue(call, queue, cache, lead_s) for _ in range(repeats - 1)]
    ahead = [run for run in runs if run.ahead]
    return StageTimes(_medians(run.seconds for run in ahead or runs), waits_for_host=not ahead)


def staged(select: Call, attend: Callable[[], Output], backward: Callable[[Output], object] | None = None) -> Staged:
    """A call whose stages are those inside `select`, "select" as a whole, "attend", and "backward" of what that gave."""

    def call(listener: Listener) -> None:
        with listening(listener), listener("select"):
            select()
        with listener("attend"):
            output = attend()
        if backward is not None:
            with listener("backward"):
                backward(output)

    return call


def _on_cpu(call: Staged, clock: CpuClock) -> dict[str, float]:
    seconds: dict[str, float] = {}

    @contextmanager
    def listener(name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start

    clock.cool()
    with uncollected():
        call(listener)
    return seconds


def _on_queue(call: Staged, queue: Queue, cache: Cache, lead_s: float) -> _Run:
    """The device's time of each stage of one call. In a warm cache it follows one of its own kind that is not timed."""
    seconds: dict[str, float] = {}
    marks: list[tuple[str, Mark, Mark]] = []

    @contextmanager
    def listener(name: str) -> Iterator[None]:
        seconds.setdefault(name, 0.0)
        start = queue.mark()
        yield
        marks.append((name, start, queue.mark()))

    queue.hold(lead_s)
    if cache == "warm":
        call(_nobody)
    else:
        queue.cool()
    begin = queue.mark()
    call(listener)
    ahead = not begin.query()
    queue.wait()
    for name, start, end in marks:
        seconds[name] += 1e-3 * start.elapsed_time(end)
    return _Run(seconds, ahead)


def _host_s(call: Staged, queue: Queue) -> float:
    """Seconds that the host takes to hand a call over."""
    queue.wait()
    start = time.perf_counter()
    call(_nobody)
    taken = time.perf_counter() - start
    queue.wait()
    return taken


def _medians(calls: Iterable[dict[str, float]]) -> dict[str, float]:
    """Of each stage that the first call has."""
    every = list(calls)
    return {name: median(call.get(name, 0.0) for call in every) for name in every[0]}


def _nobody(name: str) -> AbstractContextManager[object]:  # noqa: ARG001 - a listener that times nothing
    return nullcontext()
