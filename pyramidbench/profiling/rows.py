"""The rows of a profile: each stage, part and kernel with its time, its work, and its share of the roofline."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from pydantic import BaseModel, ConfigDict, Field

from pyramidbench.cost import Cost
from pyramidbench.device import Device
from pyramidbench.profiling.spans import INDEX, PREFIX, SELECT
from pyramidbench.profiling.trace import CALL, Traced, TracedKernel
from pyramidbench.profiling.work import Source, Work

MOST_OF = 0.9
"""From this share of a stage's time on, its one kernel does what the stage's formula counts."""
COUNTED = ("counted_s", "bytes", "l2_bytes", "tensor_share", "sm_share", "occupancy", "registers")
"""Columns of a kernel that hardware counters fill."""
Watched = Mapping[tuple[str, str], Work]


class _Rated(BaseModel):
    """Time and work of one call, and the rates that follow."""

    model_config = ConfigDict(frozen=True)

    flops: float | None = Field(default=None, description="floating-point operations, where known")
    bytes: float | None = Field(default=None, description="bytes moved, where known")
    roof_share: float | None = Field(
        default=None, description="the least time that the measured peaks allow for this work ÷ the time taken"
    )

    @property
    def seconds(self) -> float:
        """The time that rates are taken over."""
        raise NotImplementedError

    @property
    def flops_per_s(self) -> float | None:
        return self.flops / self.seconds if self.flops and self.seconds else None

    @property
    def bytes_per_s(self) -> float | None:
        return self.bytes / self.seconds if self.bytes and self.seconds else None


class StageRow(_Rated):
    """A stage, or a part of one: `path` is "route" or "route/level 3"."""

    path: str = Field(description="a stage, or a part of one as stage/part")
    wall_s: float = Field(description="with the device idle at both ends")
    device_s: float | None = Field(
        default=None, description="between two CUDA events, with the host ahead of the device; null on a CPU"
    )
    kernels_s: float = Field(description="sum of its kernels' times (on a CPU: operators'), from the trace")
    launches: float = Field(description="kernels (operators) launched")

    @property
    def seconds(self) -> float:
        return self.device_s or self.wall_s

    @property
    def is_part(self) -> bool:
        return "/" in self.path


class KernelRow(_Rated):
    """A kernel (on a CPU: a torch operator) in one stage, per call."""

    name: str = Field(description="the kernel's name (on a CPU: the torch operator's)")
    path: str = Field(description="the stage or part that launched it")
    launches: float = Field(description="launches of a call")
    time_s: float = Field(description="their time, from the trace")
    source: Source | None = Field(
        default=None,
        description="where its work is known from: shapes (a torch operator's tensors), arguments (a Triton kernel's tensors), "
        "formula (the stage's, of a stage with one kernel), ncu (hardware counters)",
    )
    counted_s: float | None = Field(
        default=None, description="ncu: the launches' time while bytes were counted, each from empty caches"
    )
    l2_bytes: float | None = Field(default=None, description="ncu: bytes through the L2")
    tensor_share: float | None = Field(
        default=None, description="ncu: share of cycles in which the tensor cores worked"
    )
    sm_share: float | None = Field(default=None, description="ncu: throughput of the multiprocessors ÷ their peak")
    occupancy: float | None = Field(default=None, description="ncu: active warps ÷ the most that fit")
    registers: int | None = Field(default=None, description="ncu: registers of a thread")

    @property
    def seconds(self) -> float:
        return self.time_s

    @property
    def bytes_per_s(self) -> float | None:
        return self.over_counted(self.bytes)

    def over_counted(self, moved: float | None) -> float | None:
        """Bytes per second of the time in which they were moved: with counters, that of the tool's own launches."""
        seconds = self.counted_s or self.time_s
        return moved / seconds if moved and seconds else None


def stage_rows(
    walls: Mapping[str, float], on_stream: Mapping[str, float], kernels: Sequence[KernelRow], cost: Cost, device: Device
) -> Iterator[StageRow]:
    """A row for each path that was timed, but the span around choosing.

    Operations are the formula's (`Method.cost`); bytes are those of the stage's kernels, where all that matter have them,
    and otherwise the formula's, which counts every read of a block.
    """
    for path in walls:
        if path != SELECT:
            name = _shown(path)
            own = [kernel for kernel in kernels if kernel.path == name or kernel.path.startswith(f"{name}/")]
            yield _stage_row(name, walls[path], on_stream.get(path), own, cost, device)


def _stage_row(
    name: str, wall_s: float, device_s: float | None, own: Sequence[KernelRow], cost: Cost, device: Device
) -> StageRow:
    work = cost.stage(name)
    took = sum(kernel.time_s for kernel in own)
    known = [kernel for kernel in own if kernel.bytes is not None]
    moved = sum(kernel.bytes or 0.0 for kernel in known)
    if sum(kernel.time_s for kernel in known) < MOST_OF * took or not moved:
        moved = work.bytes
    flops = work.flops or None
    share = _roof_share(flops, moved or None, device_s or wall_s, device)
    return StageRow(
        path=name, wall_s=wall_s, device_s=device_s, kernels_s=took, launches=sum(kernel.launches for kernel in own),
        flops=flops, bytes=moved or None, roof_share=share,
    )  # fmt: skip


def kernel_rows(traced: Traced, watched: Watched, cost: Cost, device: Device) -> tuple[KernelRow, ...]:
    """A row for each kernel in the trace, longest first; its work by its name, or by the operator that launched it alone."""
    together = Counter((kernel.operator, kernel.path) for kernel in traced.kernels)
    totals: Counter[str] = Counter()
    for kernel in traced.kernels:
        totals[_stage(_shown(kernel.path))] += kernel.seconds  # type: ignore[assignment]
    rows = []
    for kernel in traced.kernels:
        work = watched.get((kernel.name, kernel.path))
        if work is None and kernel.operator and together[kernel.operator, kernel.path] == 1:
            work = watched.get((kernel.operator, kernel.path))
        rows.append(_kernel_row(kernel, work, cost, totals, device))
    return tuple(rows)


def _kernel_row(
    kernel: TracedKernel, work: Work | None, cost: Cost, totals: Mapping[str, float], device: Device
) -> KernelRow:
    path = _shown(kernel.path)
    stage = _stage(path)
    source = work.source if work else None
    flops, moved = (work.flops, work.bytes) if work else (None, None)
    if flops is None and cost.stage(stage).flops and kernel.seconds >= MOST_OF * totals[stage]:
        flops, source = cost.stage(stage).flops, "formula"
    return KernelRow(
        name=kernel.name, path=path, launches=kernel.launches, time_s=kernel.seconds, flops=flops, bytes=moved or None,
        source=source if flops or moved else None, roof_share=_roof_share(flops, moved or None, kernel.seconds, device),
    )  # fmt: skip


def with_counters(row: KernelRow, counted: Mapping[str, float], device: Device) -> KernelRow:
    """A kernel's row with what hardware counters say, by names of COUNTED; bytes are those that reached the memory, in the
    time that they took then."""
    shares = (
        _roof_share(row.flops, None, row.time_s, device),
        _roof_share(None, counted.get("bytes"), counted.get("counted_s", row.time_s), device),
    )
    share = max((share for share in shares if share is not None), default=None)
    known = {name: counted[name] for name in COUNTED if name in counted}
    return KernelRow.model_validate(row.model_dump() | known | {"source": "ncu", "roof_share": share})


def short_name(kernel: str) -> str:
    """A kernel's name without return type, template arguments and parameters, in which tools differ."""
    bare = re.sub(r"^void\s+", "", kernel.strip())
    bare = re.sub(r"(\(anonymous namespace\)|<unnamed>)::", "", bare)
    return re.split(r"[<(]", bare, maxsplit=1)[0].strip() or kernel


def _roof_share(flops: float | None, moved: float | None, seconds: float, device: Device) -> float | None:
    if (flops is None and moved is None) or not seconds or not device.peak_flops_per_s or not device.peak_bytes_per_s:
        return None
    return max((flops or 0.0) / device.peak_flops_per_s, (moved or 0.0) / device.peak_bytes_per_s) / seconds


def _shown(path: str) -> str:
    """A path as people read it: choosing's stages stand for themselves, and the rest of it is the index."""
    path = path.removeprefix(PREFIX)
    if path == CALL:
        return "outside stages"
    return INDEX if path == SELECT else path.removeprefix(f"{SELECT}/")


def _stage(path: str) -> str:
    return path.split("/")[0]
