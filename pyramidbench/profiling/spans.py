"""Spans: the stages of a call and their parts, as a listener hears them; timed, or marked for profilers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from statistics import median
from typing import Literal

import torch

from pyramidbench.device import synchronize
from pyramidbench.device_queue import CudaQueue
from pyramidbench.stage_clock import queued_times
from pyramidbench.stages import listening

Call = Callable[[], object]
Spanned = Callable[["Spans"], object]
"""A call that marks its own outermost stages with the spans that it is given."""
PREFIX = "pyramidbench/"
"""Begins the name of every mark, so that a trace's own annotations are told apart from others'."""
How = Literal["wall", "device"]
SELECT, INDEX = "select", "index"
"""The span around all of choosing, and the stage that is what it takes besides the stages inside."""


class Spans:
    """Listens to stages and parts, and hands on the path of each: "route", "route/level 3"."""

    def __init__(self, around: Callable[[str], AbstractContextManager[object]]) -> None:
        self.around = around
        self.open: list[str] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.open.append(name)
        try:
            with self.around("/".join(self.open)):
                yield
        finally:
            self.open.pop()


def run_with(call: Spanned, around: Callable[[str], AbstractContextManager[object]]) -> None:
    """Run a call once, with every stage and part of it inside `around(path)`."""
    spans = Spans(around)
    with listening(spans, parts=True):
        call(spans)


def marks(path: str) -> AbstractContextManager[object]:
    """A range in torch's trace, and on a GPU an NVTX range too, which Nsight's tools show."""
    stack = ExitStack()
    stack.enter_context(torch.profiler.record_function(PREFIX + path))
    if torch.cuda.is_available():
        stack.enter_context(torch.cuda.nvtx.range(PREFIX + path))
    return stack


def span_times(call: Spanned, device: torch.device, repeats: int, how: How) -> dict[str, float]:
    """Median seconds of each path over repeated calls, in the order in which they were first entered.

    wall: with the device idle at both ends, so waiting and launching count. device: between two CUDA events, with the host
    ahead of the device, as `pyramidbench.stage_clock` says.
    """
    if how == "device":
        queued = queued_times(lambda listener: run_with(call, listener), CudaQueue(device), "warm", repeats)
        return _with_index(queued.seconds)
    calls = [_with_index(_wall_times(call, device)) for _ in range(repeats)]
    return {path: median(taken.get(path, 0.0) for taken in calls) for path in calls[0]}


def call_between_marks(call: Spanned, device: torch.device, warm_calls: int = 3) -> None:
    """Some calls to warm up, then one between cudaProfilerStart and cudaProfilerStop, which is all that Nsight Compute sees."""
    for _ in range(warm_calls):
        run_with(call, lambda _: nullcontext())
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.cudart().cudaProfilerStart()
    run_with(call, marks)
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.cudart().cudaProfilerStop()


def _wall_times(call: Spanned, device: torch.device) -> dict[str, float]:
    seconds: dict[str, float] = {}

    @contextmanager
    def around(path: str) -> Iterator[None]:
        seconds.setdefault(path, 0.0)
        synchronize(device)
        start = time.perf_counter()
        yield
        synchronize(device)
        seconds[path] += time.perf_counter() - start

    run_with(call, around)
    return seconds


def _with_index(seconds: dict[str, float]) -> dict[str, float]:
    """And what choosing takes besides the stages inside it."""
    inside = [taken for path, taken in seconds.items() if path.startswith(f"{SELECT}/") and path.count("/") == 1]
    return seconds | ({INDEX: max(0.0, seconds[SELECT] - sum(inside))} if inside else {})
