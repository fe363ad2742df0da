"""Peak memory of a call above its inputs, as a whole and stage by stage, in a pass of its own."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from pyramidbench.allocator import release_freed_memory
from pyramidbench.device import release_cached
from pyramidbench.stages import listening

Chosen = TypeVar("Chosen")
Output = TypeVar("Output")
TOO_MUCH = 1.5
"""Measured ÷ formula from which on a row is flagged."""
RESOLUTION_BYTES = {"cuda": 1 << 20, "cpu": 8 << 20}
"""What a reading may be off by: small allocations are rounded, and resident memory moves by pages that others touch."""
_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Peaks:
    """Bytes held at most above what was held before the call, the result included; `stages` are those of each stage, and
    `reserved` is what the CUDA allocator took from the device."""

    held: int
    reserved: int | None
    stages: dict[str, int]


class Gauge(Protocol):
    """Reads how much memory is held, and its peak since the last reset."""

    def reset(self) -> None: ...

    def held(self) -> int: ...

    def peak(self) -> int: ...

    def reserved(self) -> int | None: ...


class CudaGauge:
    """The caching allocator's own numbers."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def reset(self) -> None:
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)

    def held(self) -> int:
        torch.cuda.synchronize(self.device)
        return torch.cuda.memory_allocated(self.device)

    def peak(self) -> int:
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device)

    def reserved(self) -> int | None:
        return torch.cuda.max_memory_reserved(self.device)


class ResidentGauge:
    """The resident memory of this process on Linux. What was freed goes back to the system at a reset: what the C library
    still holds would hide the next use of it."""

    def reset(self) -> None:
        release_freed_memory()
        _CLEAR.write_text("5")

    def held(self) -> int:
        return _resident("VmRSS")

    def peak(self) -> int:
        return _resident("VmHWM")

    def reserved(self) -> int | None:
        return None


def gauge_for(device: torch.device) -> Gauge | None:
    """The gauge of a device; None on a CPU whose system does not tell."""
    if device.type == "cuda":
        return CudaGauge(device)
    try:
        _CLEAR.write_text("5")
    except OSError:
        return None
    return ResidentGauge() if _STATUS.exists() else None


@dataclass
class StagePeaks:
    """The peak of each stage above what was held at the start of the call; what lies between stages is "index"."""

    gauge: Gauge
    before: int
    reserved: int = 0
    bytes: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Read the enclosed work as part of stage `name`."""
        self.note("index")
        yield
        self.note(name)

    def note(self, name: str) -> None:
        """Count the peak since the last reset to `name`, and reset it."""
        above = max(0, self.gauge.peak() - self.before)
        self.bytes[name] = max(self.bytes.get(name, 0), above)
        self.reserved = max(self.reserved, self.gauge.reserved() or 0)
        self.gauge.reset()


def measure_peaks(
    select: Callable[[], Chosen],
    attend: Callable[[Chosen], Output],
    device: torch.device,
    backward: Callable[[Output], object] | None = None,
) -> Peaks | None:
    """Peak memory of one call: choose, attend to what was chosen, and go back where `backward` is given.

    CUDA: the allocator's peak, with nothing cached before. CPU on Linux: the peak of the resident memory. None where
    neither can be read.
    """
    gauge = gauge_for(device)
    if gauge is None:
        return None
    gc.collect()
    release_cached(device)
    gauge.reset()
    reserved = gauge.reserved()
    peaks = StagePeaks(gauge, gauge.held())
    with listening(peaks):
        chosen = select()
    peaks.note("index")
    output = attend(chosen)
    peaks.note("attend")
    gradients = backward(output) if backward is not None else None
    if backward is not None:
        peaks.note("backward")
    if chosen is None:
        del peaks.bytes["index"]
    del gradients
    return Peaks(
        max(peaks.bytes.values()), None if reserved is None else max(0, peaks.reserved - reserved), peaks.bytes
    )


def is_too_much(measured: float | None, expected: float, device: str) -> bool | None:
    """Whether a measured peak is over 1.5 times the formula, by more than a reading may be off; None without one."""
    if measured is None:
        return None
    return measured > TOO_MUCH * expected + RESOLUTION_BYTES[device]


def _resident(field_name: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(field_name))
    return int(line.split()[1]) * 1024
