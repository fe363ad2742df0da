"""The figures of a profile, each as a tidy dataframe with its titles: the stages' times, and the roofline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pandas as pd

from pyramidbench.profiling.profile import Profile
from pyramidbench.profiling.rows import KernelRow, StageRow
from pyramidbench.profiling.table import about, launched, order

MOST_KERNELS = 8
"""Kernels on the roofline, the longest first: smaller ones only cover the others."""


@dataclass(frozen=True)
class ProfileFigure:
    """A figure before it is drawn; `name` is a file's stem.

    stages: one row per stage and measure, with columns stage, part (bool), measure, ms. roofline: one row per point, with
    columns name, kind (stage or kernel), intensity (operations per byte), flops_per_s, ms; `peaks` are the device's
    measured operations and bytes per second.
    """

    name: Literal["stages", "roofline"]
    title: str
    subtitle: str
    data: pd.DataFrame
    peaks: tuple[float, float] | None = None
    notes: tuple[str, ...] = ()


def profile_figures(profile: Profile) -> list[ProfileFigure]:
    """The figures that a profile has data for: the roofline needs operations, bytes and measured peaks."""
    stages = ProfileFigure(
        "stages", "Where the time of one call goes", about(profile), _stages(profile), notes=_notes(profile)
    )
    points = _roofline(profile)
    peaks = profile.device.peak_flops_per_s, profile.device.peak_bytes_per_s
    if points.empty or peaks[0] is None or peaks[1] is None:
        return [stages]
    note = "Operations by the method's formula; bytes that the kernels must move at least, which a cache may serve."
    roof = ProfileFigure(
        "roofline", "Stages and kernels below the measured roofline", about(profile), points, (peaks[0], peaks[1]), (note,)
    )  # fmt: skip
    return [stages, roof]


def _stages(profile: Profile) -> pd.DataFrame:
    rows = []
    for stage in order(profile.stages):
        measures = {"wall": stage.wall_s, "device": stage.device_s, launched(profile): stage.kernels_s}
        rows += [
            {"stage": stage.path, "part": stage.is_part, "measure": measure, "ms": 1e3 * seconds}
            for measure, seconds in measures.items()
            if seconds is not None
        ]
    return pd.DataFrame(rows)


def _notes(profile: Profile) -> tuple[str, ...]:
    if profile.device.kind == "cuda":
        return (
            "wall: the device idle at both ends. device: between two events. kernels: sum of kernel times, from the trace.",
        )
    return ("wall: time of the stage. operators: sum of torch operators' own times, from the trace, which slows them.",)


def _roofline(profile: Profile) -> pd.DataFrame:
    stages = [_point(stage, stage.path, "stage") for stage in profile.stages if not stage.is_part]
    kernels = [_point(kernel, kernel.name, "kernel") for kernel in profile.kernels[: 3 * MOST_KERNELS]]
    points = [point for point in [*stages, *kernels[:MOST_KERNELS]] if point is not None]
    return pd.DataFrame(points, columns=["name", "kind", "intensity", "flops_per_s", "ms"])


def _point(row: StageRow | KernelRow, name: str, kind: str) -> tuple[str, str, float, float, float] | None:
    if not row.flops or not row.bytes or not row.flops_per_s:
        return None
    return name, kind, row.flops / row.bytes, row.flops_per_s, 1e3 * row.seconds
