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
from typing import Literal, Protocol, TypeVar, get_args

import torch

from pyramidbench.device import synchronize
from pyramidbench.errors import UserError
from pyramidbench.stages import listening

Call = Callable[[], object]
Announce = Callable[[int], None]
Cache = Literal["cold", "warm"]
Output = TypeVar("Output")
HOST_REPEATS = 5
LONG_CALL_S = 0.2
"""Calls from here on are repeated once where others are repeated several times, outside the clock."""
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
        with _uncollected():
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
    """CUDA events around each call, one synchronise after all of them."""

    def __init__(self, device: torch.device, cache: Cache) -> None:
        self.device = device
        self.cache = cache
        self.name = f"CUDA events, {cache} L2"
        size = 2 * torch.cuda.get_device_properties(device).L2_cache_size if cache == "cold" else 0
        self.flush = torch.empty(size, dtype=torch.uint8, device=device)

    def turns(self, calls: Sequence[Call], announce: Announce = nobody) -> list[float]:
        pairs = []
        before: Call | None = None
        with _uncollected():
            for index, call in enumerate(calls):
                announce(index)
                self.cool()
                if self.cache == "warm" and call is not before:
                    call()
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                result = call()
                end.record()
                pairs.append((start, end))
                before = call
                del result
            torch.cuda.synchronize(self.device)
        return [start.elapsed_time(end) * 1e-3 for start, end in pairs]

    def host_s(self, call: Call, repeats: int) -> float | None:
        taken = []
        for _ in range(repeats):
            torch.cuda.synchronize(self.device)
            start = time.perf_counter()
            result = call()
            taken.append(time.perf_counter() - start)
            torch.cuda.synchronize(self.device)
            del result
        return median(taken)

    def cool(self) -> None:
        self.flush.zero_()

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
    return CudaClock(device, cache) if device.type == "cuda" else CpuClock(cache)


@contextmanager
def _uncollected() -> Iterator[None]:
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


class StageTimer:
    """Adds up the seconds of each named stage while a call runs under `listening(timer)`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the enclosed work as part of stage `name`; the device is synchronised at both ends."""
        synchronize(self.device)
        start = time.perf_counter()
        yield
        synchronize(self.device)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def stage_times(
    select: Call,
    attend: Callable[[], Output],
    device: torch.device,
    repeats: int,
    backward: Callable[[Output], object] | None = None,
    cool: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Median seconds of the stages inside `select`, of "select" as a whole, of "attend", and of "backward" from its result
    where one is given; `cool` comes before each repetition."""
    calls = []
    for _ in range(repeats):
        cool()
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
