"""A profile: one cell's stages and kernels with their times, their work, and how near they come to the device's peaks."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

import torch
from pydantic import BaseModel, ConfigDict, Field

from pyramidbench.cell import Cell
from pyramidbench.device import Device, fingerprint, synchronize
from pyramidbench.device_queue import CudaQueue
from pyramidbench.profiling.call import ProfiledCall
from pyramidbench.profiling.rows import KernelRow, StageRow, kernel_rows, stage_rows
from pyramidbench.profiling.spans import span_times
from pyramidbench.profiling.trace import CALL, record_trace
from pyramidbench.profiling.work import kernel_work
from pyramidbench.stage_clock import queued_times
from pyramidbench.stages import Listener

SCHEMA_VERSION = 1
TRACED_CALLS = 3
MOST_REPEATS = 20
TRACE = "trace.json.gz"


class Profile(BaseModel):
    """One cell in depth. Times are seconds per call; medians of `calls` calls without a profiler unless told otherwise."""

    model_config = ConfigDict(frozen=True)

    schema_version: int = Field(default=SCHEMA_VERSION, description="version of this file's keys")
    cell: Cell = Field(description="what was profiled")
    device: Device = Field(description="what it ran on, with its measured peaks")
    calls: int = Field(description="calls that each time is the median of")
    wall_s: float = Field(description="a whole call, until the device is idle again")
    host_s: float = Field(description="a whole call, until the host has handed everything to the device")
    device_s: float | None = Field(
        description="a whole call between two CUDA events, handed over while the device was busy; null on a CPU"
    )
    busy_s: float = Field(
        description="time of a call in which a kernel ran (on a CPU: a torch operator), from the trace"
    )
    traced_s: float = Field(description="a whole call in the trace, slowed by the profiler")
    stages: tuple[StageRow, ...] = Field(description="stages and their parts")
    kernels: tuple[KernelRow, ...] = Field(description="kernels, the longest first")

    @property
    def overhead_s(self) -> float:
        """What the host adds: on a GPU the time of a call in which no kernel ran; on a CPU the time outside operators, which
        is Python and dispatch, scaled from the trace."""
        if self.device.kind == "cuda":
            return max(0.0, self.wall_s - self.busy_s)
        return self.wall_s * max(0.0, 1 - self.busy_s / self.traced_s)

    @property
    def launches(self) -> float:
        """Kernels (on a CPU: operators) that one call launches."""
        return sum(kernel.launches for kernel in self.kernels)


def profile_cell(cell: Cell, device: torch.device, folder: Path, budget_s: float = 2.0) -> Profile:
    """Profile a cell on a device; the trace goes into `folder`, which is made.

    budget_s: seconds of repeated calls for each kind of time.

    Raises:
        UserError: the cell cannot run here.
        GateFailure: its result is wrong.
    """
    call = ProfiledCall.of(cell, device)
    folder.mkdir(parents=True, exist_ok=True)
    found = fingerprint(device, peaks=True)
    on_gpu = device.type == "cuda"
    once = min(_timed(call, device)[0] for _ in range(3))
    repeats = max(3, min(MOST_REPEATS, int(budget_s / once)))
    whole = [_timed(call, device) for _ in range(repeats)]
    walls = span_times(call, device, repeats, "wall")
    on_stream = span_times(call, device, repeats, "device") if on_gpu else {}
    work = kernel_work(call)
    # An operator of our own is opened up: what it calls says more than its arguments.
    known = {name for name, _ in work if name.startswith("aten::")}
    traced = record_trace(call, device, TRACED_CALLS, folder / TRACE, known)
    kernels = kernel_rows(traced, work, call.cost, found)
    return Profile(
        cell=cell,
        device=found,
        calls=repeats,
        wall_s=median(wall for wall, _ in whole),
        host_s=median(host for _, host in whole),
        device_s=_device_s(call, device, repeats) if on_gpu else None,
        busy_s=traced.busy_s,
        traced_s=traced.span_s,
        stages=tuple(stage_rows(walls, on_stream, kernels, call.cost, found)),
        kernels=kernels,
    )


def _timed(call: ProfiledCall, device: torch.device) -> tuple[float, float]:
    """Seconds of one unmarked call: until the device is idle, and until the host is free."""
    synchronize(device)
    start = time.perf_counter()
    call.whole()
    host = time.perf_counter() - start
    synchronize(device)
    return time.perf_counter() - start, host


def _device_s(call: ProfiledCall, device: torch.device, repeats: int) -> float:
    """Median seconds of unmarked calls on the device, with the host ahead of it."""

    def whole(listener: Listener) -> None:
        with listener(CALL):
            call.whole()

    return queued_times(whole, CudaQueue(device), "warm", repeats).seconds[CALL]
