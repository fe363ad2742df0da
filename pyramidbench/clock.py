"""The clock: how long a call takes, once it is warm. CUDA events on a GPU, perf_counter on a CPU.

The steady state only: set-up, compilation and the first call are timed elsewhere and never enter. On a GPU the cache is
made cold before each call by overwriting a buffer of twice the L2, outside the timed region, with no synchronise inside.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Protocol, TypeVar

import torch

from pyramidbench.stages import listening
from pyramidbench.stats import median_interval

Call = Callable[[], object]
Output = TypeVar("Output")
ENOUGH_SAMPLES = 30
ENOUGH_SECONDS = 0.1
FEWEST_SAMPLES = 3
CLOSE_ENOUGH = 0.005
"""Half width of the interval of the median, relative, at which sampling stops."""
WARM_UP = ((1e-3, 0.1), (1e-2, 1.0), (float("inf"), 3.0))
"""Seconds of warm-up by the time of a call: a call under 1 ms gets 0.1 s, one under 10 ms 1 s, a longer one 3 s."""


class Clock(Protocol):
    """Times batches of calls on one kind of device."""

    name: str

    def times(self, call: Call, count: int) -> list[float]:
        """Seconds that each of `count` calls takes."""
        ...

    def now(self) -> float:
        """Wall time in seconds, for budgets."""
        ...


class CpuClock:
    """perf_counter around each call."""

    name = "perf_counter, warm cache"

    def times(self, call: Call, count: int) -> list[float]:
        taken = []
        for _ in range(count):
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
        return taken

    def now(self) -> float:
        return time.perf_counter()


class CudaClock:
    """CUDA events around each call, a cold L2 before it, one synchronise after the batch."""

    name = "CUDA events, cold L2"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.flush = torch.empty(
            2 * torch.cuda.get_device_properties(device).L2_cache_size, dtype=torch.uint8, device=device
        )

    def times(self, call: Call, count: int) -> list[float]:
        pairs = []
        for _ in range(count):
            self.flush.zero_()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize(self.device)
        return [start.elapsed_time(end) * 1e-3 for start, end in pairs]

    def now(self) -> float:
        return time.perf_counter()


def clock_for(device: torch.device) -> Clock:
    """The clock of a device."""
    return CudaClock(device) if device.type == "cuda" else CpuClock()


def sample(call: Call, clock: Clock, budget_s: float) -> list[float]:
    """Steady-state samples of a call, seconds.

    Warms up (at most a third of the budget), then samples until there are 30 of them and 0.1 s, and the 95 % interval of
    the median is within ±0.5 %; or until the budget is spent, but never with fewer than 3 samples.
    """
    start = clock.now()
    once = clock.times(call, 1)[0]
    wanted = next(seconds for limit, seconds in WARM_UP if once < limit)
    while clock.now() - start < min(wanted, budget_s / 3):
        clock.times(call, _batch(once))
    samples: list[float] = []
    while True:
        left = budget_s - (clock.now() - start)
        if len(samples) >= FEWEST_SAMPLES and left <= 0:
            return samples
        if len(samples) >= ENOUGH_SAMPLES and sum(samples) >= ENOUGH_SECONDS and _settled(samples):
            return samples
        samples += clock.times(call, min(_batch(once), max(1, int(left / max(once, 1e-6)))))


def _batch(seconds: float) -> int:
    """Calls per batch: about 20 ms of them, at most 10."""
    return max(1, min(10, int(0.02 / max(seconds, 1e-6))))


def _settled(samples: list[float]) -> bool:
    return median_interval(samples).relative_half_width <= CLOSE_ENOUGH


class StageTimer:
    """Adds up the seconds of each named stage while a call runs under `listening(timer)`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the enclosed work as part of stage `name`; the device is synchronised at both ends."""
        _wait(self.device)
        start = time.perf_counter()
        yield
        _wait(self.device)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def stage_times(
    select: Call,
    attend: Callable[[], Output],
    device: torch.device,
    repeats: int,
    backward: Callable[[Output], object] | None = None,
) -> dict[str, float]:
    """Median seconds of the stages inside `select`, of "select" as a whole, of "attend", and of "backward" from its result
    where one is given."""
    calls = []
    for _ in range(repeats):
        timer = StageTimer(device)
        with listening(timer), timer("select"):
            select()
        with timer("attend"):
            output = attend()
        if backward is not None:
            with timer("backward"):
                backward(output)
        calls.append(timer.seconds)
    return {name: median(call.get(name, 0.0) for call in calls) for name in calls[0]}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
