"""The clock: how long single calls take. CUDA events on a GPU, perf_counter on a CPU.

The cache is cold before each call, by overwriting twice the L2 outside the timed region, or warm, by a call of the same
kind that is not timed. Which calls, how many and in which order is decided in `pyramidbench.sampling`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Literal, Protocol, get_args

import torch

from pyramidbench.device_queue import CudaQueue, Queue
from pyramidbench.errors import UserError

Call = Callable[[], object]
Announce = Callable[[int], None]
Cache = Literal["cold", "warm"]
HOST_REPEATS = 5
LONG_CALL_S = 0.2
"""Calls from here on are repeated once where others are repeated several times, outside the clock."""
LAUNCH_BOUND = 0.8
"""Host time ÷ measured time from which on the host bounds a call. Where the host is slower than the device the two are nearly
equal, and a part of the host's time passes while the cache is overwritten, so the bar lies below 1."""
LEAD = 2.0
"""Seconds for which a GPU is kept busy before a batch ÷ those that its host takes to hand over a call."""
UNKNOWN_CACHE_BYTES = 64 << 20
"""Overwritten on a CPU that does not tell the size of its L2: more than the L2 of any core."""
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def nobody(index: int) -> None:
    """Nobody needs to know whose turn it is."""


class Clock(Protocol):
    """Times calls on one kind of device. `name` is the column `clock`."""

    name: str

    def turns(self, calls: Sequence[Call], announce: Announce = nobody) -> list[float]:
        """Seconds that each of these calls takes, made one after another; `announce(i)` comes before call i is prepared."""
        ...

    def host_s(self, call: Call, repeats: int) -> float | None:
        """Median seconds that the host takes to issue the call; None where the host computes it itself."""
        ...

    def cool(self) -> None:
        """Make the cache cold, if this clock does so."""
        ...

    def now(self) -> float:
        """Wall time in seconds, for budgets."""
        ...


class CpuClock:
    """perf_counter around each call. A result is freed after the time is taken."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.name = f"perf_counter, {'cold L2' if cache == 'cold' else 'warm cache'}"
        size = 2 * _l2_bytes() * torch.get_num_threads() if cache == "cold" else 0
        self.flush = torch.empty(size, dtype=torch.uint8)

    def turns(self, calls: Sequence[Call], announce: Announce = nobody) -> list[float]:
        taken: list[float] = []
        before: Call | None = None
        with uncollected():
            for index, call in enumerate(calls):
                announce(index)
                self.cool()
                if self.cache == "warm" and call is not before:
                    call()
                start = time.perf_counter()
                result = call()
                taken.append(time.perf_counter() - start)
                before = call
                del result
        return taken

    def host_s(self, call: Call, repeats: int) -> float | None:  # noqa: ARG002 - the host is the device
        return None

    def cool(self) -> None:
        self.flush.zero_()

    def now(self) -> float:
        return time.perf_counter()


class CudaClock:
    """CUDA events around each call, one synchronise after all of them.

    After that synchronise the device is idle, so the first call of the next batch would wait for the host where no other one
    does. So the device is kept busy before it, as if the last call were still running: for long enough to hand over a call of
    its kind, and not at all where the host bounds that one, as then nothing would be left to do.
    """

    def __init__(self, queue: Queue, cache: Cache) -> None:
        self.queue = queue
        self.cache = cache
        self.name = f"CUDA events, {cache} L2"
        self.lead_s = 0.0

    def turns(self, calls: Sequence[Call], announce: Announce = nobody) -> list[float]:
        pairs = []
        host_s = 0.0
        before: Call | None = None
        with uncollected():
            if self.cache == "cold":
                self.queue.hold(self.lead_s)
            for index, call in enumerate(calls):
                announce(index)
                self.cool()
                if self.cache == "warm" and call is not before:
                    call()
                issued = time.perf_counter()
                start = self.queue.mark()
                result = call()
                pairs.append((start, self.queue.mark()))
                host_s = time.perf_counter() - issued
                before = call
                del result
            self.queue.wait()
        taken = [1e-3 * start.elapsed_time(end) for start, end in pairs]
        self.lead_s = min(taken[-1], LEAD * host_s) if host_s < LAUNCH_BOUND * taken[-1] else 0.0
        return taken

    def host_s(self, call: Call, repeats: int) -> float | None:
        taken = []
        for _ in range(repeats):
            self.queue.wait()
            start = time.perf_counter()
            result = call()
            taken.append(time.perf_counter() - start)
            self.queue.wait()
            del result
        return median(taken)

    def cool(self) -> None:
        if self.cache == "cold":
            self.queue.cool()

    def now(self) -> float:
        return time.perf_counter()


def check_cache(word: str) -> Cache:
    """The state of the cache that a user asked for.

    Raises:
        UserError: another word than "cold" or "warm".
    """
    for known in get_args(Cache):
        if word == known:
            return known
    raise UserError(f"--cache '{word}' is not known; accepted: cold (the L2 is overwritten before each call), warm.")


def clock_for(device: torch.device, cache: Cache = "cold") -> Clock:
    """The clock of a device."""
    return CudaClock(CudaQueue(device), cache) if device.type == "cuda" else CpuClock(cache)


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection in here: it would fall into some call's time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _l2_bytes() -> int:
    """The L2 of one core, as Linux tells it; UNKNOWN_CACHE_BYTES elsewhere."""
    for level in sorted(_CACHES.glob("index*/level")):
        size = level.with_name("size")
        if level.read_text().strip() == "2" and size.exists():
            return int(size.read_text().strip().removesuffix("K")) << 10
    return UNKNOWN_CACHE_BYTES
