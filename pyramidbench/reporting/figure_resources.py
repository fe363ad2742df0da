"""Figures of resources: memory beside its formula, and the roofline."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from pyramidbench.comparable import one_per_point, usual_budget, usual_tile
from pyramidbench.errors import UserError
from pyramidbench.frame import Row, failed, measured
from pyramidbench.memory import TOO_MUCH
from pyramidbench.passes import pass_cost
from pyramidbench.problem import Problem
from pyramidbench.registry import create
from pyramidbench.replays import as_replayed
from pyramidbench.reporting.figure import (
    Axis,
    Figure,
    Guide,
    Heading,
    NoFigure,
    Subject,
    at_length,
    budgets,
    names,
    some,
    tidy,
)
from pyramidbench.units import is_missing, one_line, significant

MEMORY = Heading("memory", "memory", "Peak memory of a call, measured beside formula")
ROOFLINE = Heading("roofline", "roofline", "Arithmetic rate beside what the device can do")
MEBIBYTES = Axis("peak (MiB)", "plain")
INTENSITY = Axis("useful operations per byte (FLOP/B)", "plain", log=True)


def memory(subject: Subject) -> Figure | NoFigure:
    rows = usual_budget(subject.rows)
    rows = _one_tile(rows, measured(rows).dropna(subset=["peak_memory_bytes"]))
    known = measured(rows).dropna(subset=["peak_memory_bytes"])
    if known.empty:
        return MEMORY.missing(subject, "no row has a measured peak of memory")
    lengths = some(list(known["seq_len_kv"]))
    shown = pd.concat([rows[rows.index.isin(known.index)], failed(rows)])
    shown = shown[shown["label"].isin(known["label"]) & shown["seq_len_kv"].isin(lengths)]
    shown = one_per_point(shown, ["label", "seq_len_kv"]).sort_values("peak_memory_bytes", ascending=False)
    order = list(dict.fromkeys(shown.loc[shown["seq_len_kv"] == lengths[-1], "label"]))
    shown = shown.assign(shown=shown["label"]).sort_values(
        "label", key=lambda column: column.map(lambda label: order.index(label) if label in order else len(order))
    )
    parts = []
    for length in lengths:
        here = shown[shown["seq_len_kv"] == length]
        mebibytes = {"x": here["peak_memory_bytes"] / 2**20, "y": here["expected_memory_bytes"] / 2**20}
        parts.append(tidy(here, panel=at_length(length), **mebibytes))
    notes = ("A tick: output and workspace by the method's formula.", *_over(shown))
    axes = dict.fromkeys(names(parts), MEBIBYTES)
    return MEMORY.figure(subject, "dots", f"{budgets(rows)}; peak above the inputs", None, axes, parts, notes=notes)


def _one_tile(rows: pd.DataFrame, known: pd.DataFrame) -> pd.DataFrame:
    """The rows at the tile at which most methods are among `known`, and those without tiles."""
    tiled = known.dropna(subset=["query_tile"])
    if tiled.empty:
        return rows
    tile = usual_tile(tiled)
    return rows[rows["query_tile"].isna() | (rows["query_tile"] == tile)]


def _over(rows: pd.DataFrame) -> tuple[str, ...]:
    over = rows[rows["memory_flagged"] == 1]
    if over.empty:
        return ()
    found = (over["peak_memory_bytes"] / over["expected_memory_bytes"]).groupby(over["label"]).max()
    named = ", ".join(f"{one_line(label)} (up to {significant(times, 2)}×)" for label, times in found.items())
    return (f"Over {TOO_MUCH:g}× its formula: {named}.",)


def roofline(subject: Subject) -> Figure | NoFigure:
    peaks = subject.device.get("peak_flops_per_s"), subject.device.get("peak_bytes_per_s")
    if is_missing(peaks[0]) or is_missing(peaks[1]):
        return ROOFLINE.missing(subject, "the run holds no measured peaks of its device")
    rows = as_replayed(usual_budget(measured(subject.rows)).dropna(subset=["latency_s", "useful_flops_per_s"]))
    if rows.empty:
        return ROOFLINE.missing(subject, "no row has a rate of arithmetic")
    rows = one_per_point(_one_tile(rows, rows), ["label", "seq_len_kv"])
    rows = rows.assign(moved=[moved_bytes(row, subject.device) for row in rows.to_dict("records")], shown=rows["label"])
    unknown = sorted(set(rows.loc[rows["moved"].isna(), "label"]))
    rows = rows.dropna(subset=["moved"]).sort_values("seq_len_kv")
    if rows.empty:
        return ROOFLINE.missing(subject, "no method here has a cost formula that can be read")
    return _under_roofs(subject, rows, float(str(peaks[0])), float(str(peaks[1])), unknown)


def _under_roofs(subject: Subject, rows: pd.DataFrame, flops: float, bandwidth: float, unknown: list[str]) -> Figure:
    size, unit = (1e12, "TFLOP/s") if flops >= 1e13 else (1e9, "GFLOP/s")
    intensity = rows["useful_flops_per_s"] * rows["latency_s"] / rows["moved"]
    part = tidy(rows, panel="roofline", x=intensity, y=rows["useful_flops_per_s"] / size)
    ridge = flops / bandwidth
    left, right = min(intensity.min(), ridge) / 1.6, max(intensity.max(), ridge) * 1.6
    roofs = (
        Guide("roofline", f"copy: {significant(bandwidth / 1e9)} GB/s",
              ((left, left * bandwidth / size), (ridge, flops / size))),
        Guide("roofline", f"matrix product: {significant(flops / size)} {unit}",
              ((ridge, flops / size), (right, flops / size))),
    )  # fmt: skip
    notes: tuple[str, ...] = (
        "Roofs: measured in this run. Useful: operations on attended pairs and on selection. Bytes: by the method's cost "
        "formula before any cache reuse, so that a point may stand above the slope. A line follows a method by length.",
    )
    notes += (f"Without a cost formula here: {', '.join(map(one_line, unknown))}.",) if unknown else ()
    axes = {"roofline": Axis(f"useful rate ({unit})", "plain", log=True)}
    about = f"{budgets(rows)}, {_lengths(rows)}"
    return ROOFLINE.figure(subject, "roofline", about, INTENSITY, axes, [part], notes=notes, guides=roofs)


def _lengths(rows: pd.DataFrame) -> str:
    shortest, longest = rows["seq_len_kv"].min(), rows["seq_len_kv"].max()
    return at_length(longest) if shortest == longest else f"{at_length(shortest)} to {at_length(longest)}"


def moved_bytes(row: Row, device: Mapping[str, Any]) -> float:
    """Bytes that a call reads and writes by its method's cost formula; NaN where the method or its formula is not there."""
    try:
        method = create(row["method"], json.loads(row["parameters"] or "{}"))
        problem = Problem(
            batch=int(row["batch"]), heads=int(row["heads"]), kv_heads=int(row["kv_heads"]), seq_len_q=int(row["seq_len"]),
            seq_len_kv=int(row["seq_len_kv"]), head_dim=int(row["head_dim"]), head_dim_v=int(row["head_dim"]),
            dtype=row["dtype"], causal=bool(row["causal"]), scale=1.0, device=str(device.get("kind", "cpu")),
            direction=row["pass"],
        )  # fmt: skip
        return float(pass_cost(method, problem).bytes) or math.nan
    except (UserError, NotImplementedError):
        return math.nan
