"""The trace of a call: torch.profiler's Chrome trace, and what it says of each kernel (on a CPU: each operator).

The file is read back from the format that Perfetto and chrome://tracing show, so what is counted is what one sees there.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Collection, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from pyramidbench.device import synchronize
from pyramidbench.profiling.quiet import without_lines
from pyramidbench.profiling.spans import PREFIX, Spanned, marks, run_with

CALL = "call"
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")


@dataclass(frozen=True)
class TracedKernel:
    """Kernels (or operators) of one name in one span, per call. An operator's seconds are its own, without those it calls.

    operator: the torch operator that launched a kernel, None where none did (a Triton kernel), or for an operator itself.
    """

    name: str
    path: str
    launches: float
    seconds: float
    operator: str | None = None


@dataclass(frozen=True)
class Traced:
    """What a trace holds, per call. `busy_s`: time in which at least one kernel (on a CPU: one operator) ran. `span_s`: time
    of the call in the trace, which is longer than without a profiler. `on_device`: kernels of a GPU, not operators."""

    kernels: tuple[TracedKernel, ...]
    busy_s: float
    span_s: float
    on_device: bool


@dataclass(frozen=True)
class _Event:
    name: str
    category: str
    start: float
    end: float
    thread: object
    correlation: int | None

    @classmethod
    def of(cls, raw: dict[str, Any]) -> _Event:
        arguments = raw.get("args", {})
        return cls(
            str(raw["name"]), str(raw.get("cat", "")), float(raw["ts"]), float(raw["ts"]) + float(raw.get("dur", 0.0)),
            raw.get("tid"), arguments.get("correlation"),
        )  # fmt: skip


def record_trace(call: Spanned, device: torch.device, calls: int, path: Path, known: Collection[str] = ()) -> Traced:
    """Run a call so many times under torch.profiler, write the trace (gzipped JSON), and read it with `read_trace`."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    # There is one cycle, so nothing accumulates; torch 2.11 warns of what the default would clear.
    profiler = torch.profiler.profile(activities=activities, acc_events=True)
    with without_lines("USDT:"):
        profiler.start()
    # The first call in a trace starts the profiler's own machinery; outside the marks it does not count.
    run_with(call, lambda _: nullcontext())
    for _ in range(calls):
        with marks(CALL):
            run_with(call, marks)
            synchronize(device)
    with without_lines("USDT:"):
        profiler.stop()
    profiler.export_chrome_trace(str(path))
    return read_trace(path, calls, known)


def read_trace(path: Path, calls: int, known: Collection[str] = ()) -> Traced:
    """What a trace of so many marked calls says, per call.

    A kernel belongs to the innermost span that was open when it was launched, whenever it ran. Operators in `known`, whose
    work one knows as a whole, stand for all that they call.
    """
    raw = json.loads(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())
    events = [_Event.of(event) for event in raw["traceEvents"] if event.get("ph") == "X" and "ts" in event]
    spans = [event for event in events if event.category == "user_annotation" and event.name.startswith(PREFIX)]
    kernels = [event for event in events if event.category in DEVICE_WORK]
    whole = [event for event in spans if event.name == PREFIX + CALL]
    span_s = 1e-6 * sum(event.end - event.start for event in whole) / calls
    operators = _outermost([event for event in events if event.category == "cpu_op"], known)
    if kernels:
        launched = {event.correlation: event for event in events if event.category in LAUNCHES}
        work = [_Work(k, launched.get(k.correlation, k), k.end - k.start) for k in kernels]
    else:
        work = [_Work(event, event, own) for event, own in _own_times(operators)]
    counted = [item for item in work if _innermost(whole, item.launch)]
    rows = _summed(counted, spans, operators if kernels else [], calls)
    return Traced(rows, 1e-6 * _covered(item.event for item in counted) / calls, span_s, bool(kernels))


@dataclass(frozen=True)
class _Work:
    """A kernel or operator, the event that launched it, and its own time in microseconds."""

    event: _Event
    launch: _Event
    own: float


def _summed(work: list[_Work], spans: list[_Event], operators: list[_Event], calls: int) -> tuple[TracedKernel, ...]:
    """Launches and times by name, span and operator."""
    found: dict[tuple[str, str, str | None], list[float]] = defaultdict(list)
    for item in work:
        span = _innermost(spans, item.launch)
        assert span is not None
        operator = _innermost([o for o in operators if o.thread == item.launch.thread], item.launch)
        found[item.event.name, span.name.removeprefix(PREFIX), operator.name if operator else None].append(item.own)
    rows = [
        TracedKernel(name, path, len(own) / calls, 1e-6 * sum(own) / calls, operator)
        for (name, path, operator), own in found.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.seconds))


def _innermost(events: list[_Event], inside: _Event) -> _Event | None:
    """The shortest event that was open when another began."""
    around = [event for event in events if event.start <= inside.start < event.end and event is not inside]
    return min(around, key=lambda event: event.end - event.start, default=None)


def _outermost(operators: list[_Event], known: Collection[str]) -> list[_Event]:
    """The operators without those that a known one called."""
    kept: list[_Event] = []
    until: dict[object, float] = {}
    for event in sorted(operators, key=lambda event: (event.start, -event.end)):
        if event.start >= until.get(event.thread, float("-inf")):
            kept.append(event)
            if event.name in known:
                until[event.thread] = event.end
    return kept


def _own_times(operators: list[_Event]) -> list[tuple[_Event, float]]:
    """Each operator with its time less that of the operators it called; they are sorted by their start."""
    own: list[tuple[_Event, float]] = []
    stacks: dict[object, list[int]] = defaultdict(list)
    for event in operators:
        stack = stacks[event.thread]
        while stack and own[stack[-1]][0].end <= event.start:
            stack.pop()
        if stack:
            parent, left = own[stack[-1]]
            own[stack[-1]] = (parent, left - (event.end - event.start))
        stack.append(len(own))
        own.append((event, event.end - event.start))
    return own


def _covered(events: Iterable[_Event]) -> float:
    """Length of time in which at least one of the events ran."""
    total, reached = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event.start):
        total += max(0.0, event.end - max(event.start, reached))
        reached = max(reached, event.end)
    return total
