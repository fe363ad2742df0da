"""The state of the GPU while it is measured, from NVML: clock, power, temperature, and why it holds itself back.

Read between blocks of calls, never inside a timed region; nothing is ever set.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

REST_S = 2.0
"""Pause after a throttled block, for the device to cool down."""
REASONS = {
    0x04: "power cap", 0x08: "hardware slowdown", 0x10: "sync boost", 0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown", 0x80: "power brake", 0x100: "display clocks",
}  # fmt: skip
"""NVML's nvmlClocksEventReason* bits; idle (0x01) and clocks set by an application (0x02) hold nothing back."""
THROTTLING = frozenset({"hardware slowdown", "software thermal slowdown", "hardware thermal slowdown", "power brake"})
"""What makes a block throttled. The power cap does not: large kernels run at it always; it stands in the row besides."""


@dataclass(frozen=True)
class DeviceState:
    """One reading, or the worst of several: hertz, watts, degrees Celsius, reasons. None: the device does not tell."""

    sm_clock_hz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    reasons: frozenset[str] = frozenset()

    @property
    def throttled(self) -> bool:
        return bool(self.reasons & THROTTLING)

    @classmethod
    def worst(cls, states: Iterable[DeviceState]) -> DeviceState:
        """The lowest clock, the highest power and temperature, and every reason."""
        found = list(states)
        return cls(
            min((s.sm_clock_hz for s in found if s.sm_clock_hz is not None), default=None),
            max((s.power_w for s in found if s.power_w is not None), default=None),
            max((s.temperature_c for s in found if s.temperature_c is not None), default=None),
            frozenset().union(*(s.reasons for s in found)),
        )


class Watch(Protocol):
    """Reads the device's state. `gap` says why it cannot, or is None."""

    gap: str | None

    def read(self) -> DeviceState | None:
        """The state now; None where there is none to read."""
        ...

    def rest(self) -> None:
        """Let the device recover."""
        ...


class Unwatched:
    """A device without NVML: a CPU, or a GPU whose driver does not answer."""

    def __init__(self, gap: str | None = None) -> None:
        self.gap = gap

    def read(self) -> DeviceState | None:
        return None

    def rest(self) -> None: ...


class NvmlWatch:
    """NVML through its own Python binding (package nvidia-ml-py)."""

    gap: str | None = None

    def __init__(self, nvml: Any, handle: Any) -> None:
        self.nvml = nvml
        self.handle = handle

    def read(self) -> DeviceState | None:
        nvml, handle = self.nvml, self.handle
        clock = self._ask(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
        power = self._ask(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        degrees = self._ask(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
        bits = self._ask(lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
        return DeviceState(
            None if clock is None else 1e6 * clock,
            None if power is None else 1e-3 * power,
            degrees,
            frozenset(text for bit, text in REASONS.items() if int(bits or 0) & bit),
        )

    def rest(self) -> None:
        time.sleep(REST_S)

    def _ask(self, question: Callable[[], float]) -> float | None:
        """The answer, or None where this device or driver has none."""
        try:
            return question()
        except self.nvml.NVMLError:
            return None


def watch_for(device: torch.device) -> Watch:
    """The watch of a device; on a GPU whose NVML does not answer, one whose `gap` says why."""
    if device.type != "cuda":
        return Unwatched()
    import pynvml

    uuid = str(torch.cuda.get_device_properties(device).uuid)
    try:
        pynvml.nvmlInit()
        return NvmlWatch(pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("MIG-") else f"GPU-{uuid}"))
    except pynvml.NVMLError as error:
        return Unwatched(f"NVML does not answer: {error}")
