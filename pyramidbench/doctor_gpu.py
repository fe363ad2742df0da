"""What NVML says of the GPU before a sweep: its driver, who else uses it, and whether it holds its clock back."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from pyramidbench.nvml import DeviceState, NvmlWatch, Watch
from pyramidbench.units import gibibytes

BUSY_PERCENT = 5


@dataclass(frozen=True)
class GpuFinding:
    """One thing that was looked at; `fine`: it does not disturb a measurement."""

    subject: str
    fine: bool
    found: str
    advice: str = ""


def look_at_gpu(watch: Watch) -> Iterator[GpuFinding]:
    """Driver, other processes, clock and throttling of a watched GPU. Nothing is set."""
    if not isinstance(watch, NvmlWatch):
        yield GpuFinding(
            "NVML", False, watch.gap or "does not answer",
            "clocks, throttling and other processes cannot be seen: check the driver, or the container's access to it",
        )  # fmt: skip
        return
    yield _driver(watch.nvml)
    yield _processes(watch.nvml, watch.handle)
    yield _clock(watch)


def unseen_gpus() -> GpuFinding | None:
    """NVIDIA GPUs of this machine that torch does not see; None where there are none, or torch sees one."""
    if torch.cuda.is_available():
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError:
        return None
    if not count:
        return None
    build = f"has CUDA {torch.version.cuda}" if torch.version.cuda else "is built without CUDA"
    return GpuFinding(
        "GPU", False, f"{count} here, and torch, which {build}, sees none",
        "install a torch with CUDA that the driver supports, or set CUDA_VISIBLE_DEVICES",
    )  # fmt: skip


def _driver(nvml: Any) -> GpuFinding:
    number = _asked(nvml, lambda: str(_text(nvml.nvmlSystemGetDriverVersion())))
    cuda = _asked(nvml, lambda: int(nvml.nvmlSystemGetCudaDriverVersion()))
    supports = f", up to CUDA {cuda // 1000}.{cuda % 1000 // 10}" if cuda else ""
    return GpuFinding("driver", number is not None, f"{number or 'unknown'}{supports}")


def _processes(nvml: Any, handle: Any) -> GpuFinding:
    """Who else computes there. In a container NVML may name nobody; then the use of the GPU tells."""
    listed = _asked(nvml, lambda: list(nvml.nvmlDeviceGetComputeRunningProcesses(handle))) or []
    others = [process for process in listed if process.pid != os.getpid()]
    used = _asked(nvml, lambda: int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu))
    if not others and (used is None or used < BUSY_PERCENT):
        return GpuFinding("other processes", True, "none" + ("" if used is None else f", the GPU is used {used} % now"))
    held = sum(process.usedGpuMemory or 0 for process in others)
    named = ", ".join(str(process.pid) for process in others[:5])
    found = (
        f"{len(others)} on the GPU (pid {named}) hold {gibibytes(held)}" if others else f"the GPU is used {used} % now"
    )
    return GpuFinding("other processes", False, found, "times will vary and memory is short: end them, or wait")


def _clock(watch: NvmlWatch) -> GpuFinding:
    state = watch.read() or DeviceState()
    nvml, handle = watch.nvml, watch.handle
    most = _asked(nvml, lambda: 1e6 * nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM))
    parts = [
        "" if state.sm_clock_hz is None else f"{state.sm_clock_hz / 1e6:.0f} MHz now",
        "" if most is None else f"{most / 1e6:.0f} MHz at most",
        "" if state.power_w is None else f"{state.power_w:.0f} W",
        "" if state.temperature_c is None else f"{state.temperature_c:.0f} °C",
        f"held back by: {', '.join(sorted(state.reasons))}" if state.reasons else "",
    ]
    advice = "times would be those of a slowed device: let it cool, or check its power" if state.throttled else ""
    return GpuFinding("clock", not state.throttled, ", ".join(part for part in parts if part) or "unknown", advice)


def _asked(nvml: Any, question: Callable[[], Any]) -> Any:
    """The answer, or None where this device or driver has none."""
    try:
        return question()
    except nvml.NVMLError:
        return None


def _text(value: str | bytes) -> str:
    """Older bindings give bytes."""
    return value.decode() if isinstance(value, bytes) else value
