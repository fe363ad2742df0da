"""A profile as people read it: its columns, and the sentences around them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pyramidbench.frame import Row
from pyramidbench.profiling.profile import Profile
from pyramidbench.profiling.rows import KernelRow, StageRow, short_name
from pyramidbench.tables import Column, TextColumn
from pyramidbench.units import MISSING, milliseconds, one_line, significant, tokens

ORDER = ("build", "route", "index", "attend", "backward")
MOST_KERNELS = 12
LONGEST_NAME = 30


@dataclass(frozen=True)
class Shown:
    """A table: its title, its columns, the rows that they read, and what is to be said below it."""

    title: str
    columns: tuple[Column, ...]
    rows: list[Row]
    notes: tuple[str, ...] = ()


def about(profile: Profile) -> str:
    """What was profiled, on what."""
    cell = profile.cell
    heads = f"{cell.heads}" if cell.heads == cell.kv_heads else f"{cell.heads}:{cell.kv_heads}"
    heads += " head" if heads == "1" else " heads"
    layer = "" if cell.layer is None else f", layer {cell.layer}"
    parameters = "".join(f", {name} {value}" for name, value in cell.parameters.items())
    return (
        f"{cell.method}{parameters} at {tokens(cell.seq_len_kv)} tokens, {one_line(cell.input)}{layer}, "
        f"batch {cell.batch}, {heads}, head dim {cell.head_dim}, {cell.dtype}, "
        f"{'causal' if cell.causal else 'not causal'}, {cell.direction}, "
        f"{one_line(profile.device.name)}"
    )


def launched(profile: Profile) -> str:
    """What a trace counts: kernels of a GPU, torch operators on a CPU."""
    return "kernels" if profile.device.kind == "cuda" else "operators"


def order(stages: Iterable[StageRow]) -> list[StageRow]:
    """Stages in the order of a call, each followed by its parts in theirs."""
    kept = list(stages)
    known = [*ORDER, *(stage.path for stage in kept if stage.path not in ORDER)]
    return sorted(kept, key=lambda stage: known.index(stage.path.split("/")[0]))


def stage_table(profile: Profile) -> Shown:
    """Time and rates of each stage and part."""
    on_gpu, counted = profile.device.kind == "cuda", launched(profile)
    columns = (
        _text("stage", lambda row: f"- {row.path.split('/', 1)[1]}" if row.is_part else row.path),
        _number("wall, ms", lambda row: milliseconds(row.wall_s)),
        _number("of call", lambda row: _percent(row.wall_s / profile.wall_s), 1),
        *([_number("device, ms", lambda row: milliseconds(row.device_s))] if on_gpu else []),
        _number(f"{counted}, ms", lambda row: milliseconds(row.kernels_s), 2),
        _number("launches" if on_gpu else "runs", lambda row: f"{row.launches:.0f}", 2),
        *_rates(profile),
    )
    device = "device: between two CUDA events, with no wait for the host. " if on_gpu else ""
    notes = (
        f"wall: with the device idle at both ends. {device}{counted}: sum of their own times in the trace, which slows them.",
        f"Operations are the formula's, bytes what its {counted} must move at least. of roof: the least time that the measured "
        "peaks allow ÷ the time; over 100% a cache served them.",
    )
    return Shown("Stages, and their parts", columns, [_row(stage) for stage in order(profile.stages)], notes)


def kernel_table(profile: Profile) -> Shown:
    """The kernels that take longest."""
    total = sum(kernel.time_s for kernel in profile.kernels) or 1.0
    has_counters = any(kernel.source == "ncu" for kernel in profile.kernels)
    columns = (
        _text(launched(profile).removesuffix("s"), lambda row: _brief(row.name)),
        _text("stage", lambda row: row.path),
        _number("ms", lambda row: milliseconds(row.time_s)),
        _number("share", lambda row: _percent(row.time_s / total), 4),
        _number("launches" if profile.device.kind == "cuda" else "runs", lambda row: f"{row.launches:g}", 2),
        *_rates(profile),
        _text("work from", lambda row: row.source or MISSING, 5),
        *(COUNTERS if has_counters else ()),
    )
    left = profile.kernels[MOST_KERNELS:]
    rest = _percent(sum(kernel.time_s for kernel in left) / total)
    notes = (
        [f"{len(left)} more take {rest} of the time; kernels.csv has them all, by their full names."] if left else []
    )
    notes.append(
        "work from: shapes (of an operator's tensors), arguments (of a Triton kernel), formula (of a stage that is one kernel)"
        + (", ncu (hardware counters)." if has_counters else ".")
    )
    return Shown(
        f"{launched(profile).capitalize()} by time, per call",
        columns,
        [_row(k) for k in profile.kernels[:MOST_KERNELS]],
        tuple(notes),
    )


def sentences(profile: Profile) -> list[str]:
    """The whole call: what the device does, what the host adds, and the peaks."""
    peak = profile.device
    lines = [_on_gpu(profile) if peak.kind == "cuda" else _on_cpu(profile)]
    if peak.peak_flops_per_s and peak.peak_bytes_per_s:
        product, (name, unit) = "bf16" if peak.kind == "cuda" else "fp32", _flops_unit(profile)
        lines.append(
            f"Measured peaks: {significant(peak.peak_flops_per_s / unit)} {name} ({product} product), "
            f"{significant(peak.peak_bytes_per_s / 1e9)} GB/s (copy)."
        )
    return lines


def _on_cpu(profile: Profile) -> str:
    return (
        f"One call takes {milliseconds(profile.wall_s)} ms (median of {profile.calls}) and runs {profile.launches:.0f} torch "
        f"operators. Host overhead: {_overhead(profile)}, Python and dispatch outside operators, scaled from the trace."
    )


def _on_gpu(profile: Profile) -> str:
    bound = "so launches bind it" if profile.host_s >= profile.busy_s else "so the device binds it"
    return (
        f"One call takes {milliseconds(profile.wall_s)} ms (median of {profile.calls}), {milliseconds(profile.device_s)} ms "
        f"between its events on the device; kernels run for {milliseconds(profile.busy_s)} ms in {profile.launches:.0f} "
        f"launches. Host overhead: {_overhead(profile)} in which no kernel ran. The host hands all over within "
        f"{milliseconds(profile.host_s)} ms, {bound}."
    )


def _overhead(profile: Profile) -> str:
    return f"{milliseconds(profile.overhead_s)} ms ({_percent(profile.overhead_s / profile.wall_s)})"


def _row(row: StageRow | KernelRow) -> Row:
    """A row as tables read it."""
    return {"row": row, "kind": ""}


def _number(header: str, write: Callable[[Any], str], priority: int = 0) -> Column:
    return Column("row", header, "", lambda row: write(row["row"]), priority)


def _text(header: str, write: Callable[[Any], str], priority: int = 0) -> Column:
    return TextColumn("row", header, "", lambda row: write(row["row"]), priority)


def _rates(profile: Profile) -> Sequence[Column]:
    name, unit = _flops_unit(profile)
    return (
        _number(name, lambda row: _scaled(row.flops_per_s, unit), 3),
        _number("GB/s", lambda row: _scaled(row.bytes_per_s, 1e9), 1),
        _number("of roof", lambda row: _percent(row.roof_share)),
    )


def _flops_unit(profile: Profile) -> tuple[str, float]:
    return ("TFLOP/s", 1e12) if profile.device.kind == "cuda" else ("GFLOP/s", 1e9)


def _scaled(value: float | None, unit: float) -> str:
    if value is None:
        return MISSING
    return significant(value / unit) if value >= 0.01 * unit else "<0.01"


def _brief(name: str) -> str:
    short = short_name(one_line(name)).removeprefix("aten::")
    return short if len(short) <= LONGEST_NAME else f"{short[: LONGEST_NAME - 1]}…"


def _percent(share: float | None) -> str:
    if share is None:
        return MISSING
    return f"{100 * share:.0f}%" if share >= 0.1 else f"{100 * share:.1f}%" if share >= 0.001 else "<0.1%"


COUNTERS = (
    _number("L2 GB/s", lambda row: _scaled(row.over_counted(row.l2_bytes), 1e9), 6),
    _number("tensor", lambda row: _percent(row.tensor_share), 6),
    _number("SM", lambda row: _percent(row.sm_share), 6),
    _number("warps", lambda row: _percent(row.occupancy), 6),
    _number("registers", lambda row: MISSING if row.registers is None else f"{row.registers:.0f}", 6),
)
