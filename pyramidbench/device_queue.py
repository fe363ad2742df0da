"""The queue of a GPU: work that the host hands over and the device does in order, and how the host gets ahead of it.

A kernel that is handed over while the device is busy starts when the one before it ends. One that is handed over to an idle
device starts when the host gets round to it, and between two marks such a wait counts like work. So whoever wants the
device's own time gives it something else to do first, and hands over what is timed in the meantime.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch

OVERWRITES = 10
"""Overwrites whose time tells how long one takes, after as many to warm up."""


class Mark(Protocol):
    """A place in the queue, as torch.cuda.Event is one."""

    def query(self) -> bool:
        """Whether the device has come there."""
        ...

    def elapsed_time(self, end: Any, /) -> float:
        """Milliseconds from here to a later mark, once the device has passed both."""
        ...


class Queue(Protocol):
    """What the host hands to the device, besides the calls that are timed."""

    def mark(self) -> Mark:
        """A mark behind all that was handed over so far."""
        ...

    def cool(self) -> None:
        """Overwrite twice the L2, so that it holds nothing that a call could use."""
        ...

    def hold(self, seconds: float) -> None:
        """Keep the device busy for so long at least."""
        ...

    def wait(self) -> None:
        """Until the device has done everything."""
        ...


class CudaQueue:
    """The current stream of a CUDA device. It is held by overwriting the L2 again and again."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        size = 2 * torch.cuda.get_device_properties(device).L2_cache_size
        self.buffer = torch.empty(size, dtype=torch.uint8, device=device)
        self.overwrite_s = self._overwrite_s()

    def mark(self) -> Mark:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def cool(self) -> None:
        self.buffer.zero_()

    def hold(self, seconds: float) -> None:
        for _ in range(math.ceil(seconds / self.overwrite_s)):
            self.cool()

    def wait(self) -> None:
        torch.cuda.synchronize(self.device)

    def _overwrite_s(self) -> float:
        for _ in range(OVERWRITES):
            self.cool()
        start = self.mark()
        for _ in range(OVERWRITES):
            self.cool()
        end = self.mark()
        self.wait()
        return 1e-3 * start.elapsed_time(end) / OVERWRITES
