"""Peak memory of a call above its inputs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import torch

from pyramidbench.allocator import release_freed_memory

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def peak_above_inputs(call: Callable[[], object], device: torch.device) -> int | None:
    """Peak bytes held during one call, above what was held before it; the result of the call counts.

    CUDA: the allocator's peak. CPU on Linux: the peak of the resident memory. None where neither can be read.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = call()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before
        del result
        return peak
    if not _reset_resident_peak():
        return None
    before = _resident("VmRSS")
    result = call()
    peak = _resident("VmHWM") - before
    del result
    return max(0, peak)


def _reset_resident_peak() -> bool:
    """Make the kernel forget the highest resident size so far; False where that is not possible.

    Freed memory goes back to the system first: what the C library still holds would hide the call's own use of it.
    """
    release_freed_memory()
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return _STATUS.exists()


def _resident(field: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024
