"""Derived tables: what is computed from a run's rows before anything is shown. One row per cell goes in."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import fmean, geometric_mean
from typing import Any

import pandas as pd

from pyramidbench.errors import UserError
from pyramidbench.record import MEASURED
from pyramidbench.registry import create
from pyramidbench.units import integer, is_missing, one_line

PROBLEM = [
    "run", "device", "batch", "heads", "kv_heads", "head_dim", "dtype", "causal", "pass", "input", "seq_len", "seq_len_kv",
]  # fmt: skip
"""Columns that two rows must share before one may be called faster than the other. `run` names the run where several are
read together, and is missing where there is one."""
BUDGET = ["block_size", "top_k", "levels", "query_tile"]
KEYS = ["method", "kind", "backend", *PROBLEM, *BUDGET, "parameters"]
"""Columns that two cells must share before they may be averaged: all but layer and seed."""
SETTING = [*(column for column in PROBLEM if column not in ("seq_len", "seq_len_kv")), "layers"]
MEANS = [
    "latency_s", "latency_low_s", "latency_high_s", "graph_latency_s", "graph_latency_low_s", "graph_latency_high_s",
    "build_s", "route_s", "index_s", "append_s", "attend_s", "backward_s", "tokens_per_s", "bytes_per_token", "density",
    "selected_blocks", "recall", "recall_p5", "recall_with_forced", "mass_kept", "mass_kept_p5", "mass_ratio", "mass_ratio_p5",
    "mass_outside_forced", "output_error", "output_error_p95", "trivial_share", "useful_flops_per_s",
]  # fmt: skip
WEAKEST = ["recall_worst_head", "mass_kept_worst_head", "samples", "sampled_tiles"]
LARGEST = ["output_error_worst_head", "peak_memory_bytes", "expected_memory_bytes", "memory_flagged"]
SPEEDUP = ["speedup", "speedup_low", "speedup_high"]
REPLAY_SPEEDUP = [f"graph_{name}" for name in SPEEDUP]
TEXTS = [
    "cell",
    "seed",
    "reason",
    "budget",
    "dense_method",
    "graph_dense_method",
    "quality_source",
    "clock",
    "speedup_reason",
]
Row = dict[Any, Any]


@dataclass(frozen=True)
class Setting:
    """Rows that may stand in one table or figure: one run, device, pass, input, set of layers, head shape, dtype, block
    size."""

    text: str
    rows: pd.DataFrame


def measured(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows that carry numbers."""
    return frame[frame["status"].isin(MEASURED)]


def failed(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows that carry a reason and no numbers."""
    return frame[~frame["status"].isin(MEASURED)]


def with_speedups(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with `dense_method` and `speedup` filled in; both are null where no dense row can be the reference.

    The reference of a row is the fastest measured dense row of the same problem, input, layer and device. Where the two
    were timed in turns the row has its speed-up from pairs, with an interval; else it is the ratio of the medians.
    """
    result = frame.copy()
    found = [_speedup(row, best) for row, best, _ in _references(frame)]
    for index, name in enumerate(("dense_method", *SPEEDUP)):
        kind = object if name == "dense_method" else float
        result[name] = pd.Series([values[index] for values in found], index=frame.index, dtype=kind)
    return result


def _speedup(row: Row, best: Row | None) -> tuple[object, ...]:
    """dense_method, speedup, speedup_low, speedup_high of a row whose reference is `best`."""
    nothing = float("nan")
    if best is None:
        return None, nothing, nothing, nothing
    if not is_missing(row.get("speedup_low")) and row["dense_method"] == best["method"]:
        return best["method"], row["speedup"], row["speedup_low"], row["speedup_high"]
    return best["method"], best["latency_s"] / row["latency_s"], nothing, nothing


def speedup_reasons(frame: pd.DataFrame) -> pd.Series:
    """Why a row that has a time has no speed-up, as text; None where it has one."""
    reasons: list[str | None] = []
    for row, best, stopped in _references(frame):
        if best is not None or is_missing(row["latency_s"]):
            reasons.append(None)
        elif stopped is None:
            reasons.append("no dense method was timed on this problem and input")
        else:
            why = "" if is_missing(stopped["reason"]) else f" ({stopped['reason']})"
            reasons.append(f"{stopped['method']} at this length: {stopped['status']}{why}")
    return pd.Series(reasons, index=frame.index, dtype=object)


def _references(frame: pd.DataFrame) -> Iterator[tuple[Row, Row | None, Row | None]]:
    """Each row with the fastest dense row that was timed on its problem (None where the row itself has no time), and
    with a dense row that gave no number on it."""
    keys = [*PROBLEM, "layer"]
    dense = frame[frame["kind"] == "dense"]
    timed = measured(dense).dropna(subset=["latency_s"]).sort_values("latency_s", ascending=False, kind="stable")
    best = {_key(row, keys): row for row in timed.to_dict("records")}
    stopped = {_key(row, keys): row for row in failed(dense).to_dict("records")}
    for row in frame.to_dict("records"):
        has_time = row["status"] in MEASURED and not is_missing(row["latency_s"])
        yield row, best.get(_key(row, keys)) if has_time else None, stopped.get(_key(row, keys))


def _key(row: Row, keys: Iterable[str]) -> tuple[object, ...]:
    """Values that can be compared: missing ones are equal, whatever stands for them."""
    return tuple(None if is_missing(row.get(key)) else row[key] for key in keys)


def summarise(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per method, problem, input and budget: the mean over layers and seeds, with the count as `cells`.

    Timed and untimed cells are kept apart, and `layers` names what a mean is over: means over different layers are never
    compared. Quality and time are means; worst heads and sample counts are the weakest, memory the largest; `speedup` and the
    ends of its interval are geometric means over the cells. Rows without numbers are joined where status and reason agree.
    `label` tells apart rows of one method whose parameters differ beyond the budget, e.g. "pyramid beam=1".
    """
    source = with_speedups(frame).assign(speedup_reason=speedup_reasons(frame))
    if "run" not in source:
        source["run"] = None
    source["device"] = source.groupby("run", dropna=False)["device"].transform(_only_value_filled)
    source["backend"] = _dense_backends_joined(source)
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in source.to_dict("records"):
        measured_how = ("measured", is_missing(row["latency_s"]))
        outcome = measured_how if row["status"] in MEASURED else (row["status"], str(row["reason"]))
        groups.setdefault((*_key(row, KEYS), *outcome), []).append(row)
    numbers = [*MEANS, *WEAKEST, *LARGEST, *SPEEDUP, *REPLAY_SPEEDUP]
    summary = pd.DataFrame(
        map(_joined, groups.values()), columns=["status", "cells", "layers", *KEYS, *numbers, *TEXTS]
    )
    numeric = ["seq_len", "seq_len_kv", *BUDGET, *numbers]
    summary[numeric] = summary[numeric].apply(pd.to_numeric)
    summary["label"] = labels(summary)
    return summary


def _dense_backends_joined(source: pd.DataFrame) -> pd.Series:
    """The backends, and for a dense method all that it took on one problem: plain `dense` may find another kernel the fastest
    on another layer, and is one row still."""
    keys, taken = [key for key in KEYS if key != "backend"], dict[tuple[object, ...], set[str]]()
    rows = source.to_dict("records")
    for row in rows:
        if row["kind"] == "dense" and not is_missing(row["backend"]):
            taken.setdefault(_key(row, keys), set()).add(str(row["backend"]))
    joined = [
        " or ".join(sorted(taken[_key(row, keys)]))
        if row["kind"] == "dense" and _key(row, keys) in taken
        else row["backend"]
        for row in rows
    ]
    return pd.Series(joined, index=source.index, dtype=object)


def _joined(rows: list[Row]) -> Row:
    """One row for cells that differ in layer and seed only."""
    layers = sorted({int(row["layer"]) for row in rows if not is_missing(row["layer"])})
    named = ", ".join(str(layer) for layer in layers) or None
    joined: Row = {"status": _weakest_status(rows), "cells": len(rows), "layers": named}
    joined |= {key: None if is_missing(rows[0][key]) else rows[0][key] for key in KEYS}
    for names, join in (
        (MEANS, fmean),
        (WEAKEST, min),
        (LARGEST, max),
        ([*SPEEDUP, *REPLAY_SPEEDUP], geometric_mean),
        (TEXTS, _first),
    ):
        for name in names:
            known = [row[name] for row in rows if not is_missing(row[name])]
            joined[name] = join(known) if known else None
    return joined


def _weakest_status(rows: list[Row]) -> str:
    statuses = [str(row["status"]) for row in rows]
    return next((weak for weak in ("throttled", "low_n") if weak in statuses), statuses[0])


def _first(texts: list[Any]) -> Any:
    return texts[0]


def _only_value_filled(column: pd.Series) -> pd.Series:
    """The column with its one value in the gaps: a cell that never ran does not name the device that it had."""
    values = column.dropna().unique()
    return column.where(column.notna(), values[0]) if len(values) == 1 else column


def labels(summary: pd.DataFrame) -> list[str]:
    """A name for each row: its method, and the parameters beyond the budget that tell it apart from another row of that
    method and that its preset does not have."""
    given = [{} if is_missing(text) else json.loads(text) for text in summary["parameters"]]
    values: dict[tuple[str, str], set[str]] = {}
    for method, parameters in zip(summary["method"], given):
        for name, value in parameters.items():
            values.setdefault((method, name), set()).add(json.dumps(value))
    return [
        " ".join([method, *(f"{name}={_short(value)}" for name, value in own.items() if len(values[method, name]) > 1)])
        for method, own in (
            (method, _unusual(method, parameters)) for method, parameters in zip(summary["method"], given)
        )
    ]


def _unusual(method: str, parameters: Row) -> Row:
    """The parameters beyond the budget that differ from the method's own; all of them where the method is not known."""
    try:
        usual = dataclasses.asdict(create(method))
    except UserError:
        usual = {}
    return {name: value for name, value in parameters.items() if name not in BUDGET and usual.get(name, ...) != value}


def _short(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def settings(summary: pd.DataFrame) -> list[Setting]:
    """The summary cut into what may be compared, the largest part first (of several runs: the largest of each, then the
    next). Dense rows, which have no blocks, join every block size of their problem."""
    parts = []
    for _, rows in summary.groupby(SETTING, dropna=False, sort=False):
        uneven = (rows["seq_len"] != rows["seq_len_kv"]).map({True: 1.0, False: 0.0}) * rows["seq_len"]
        uneven = uneven.fillna(0)
        for queries, same in rows.groupby(uneven, sort=False):
            sizes = sorted(same["block_size"].dropna().unique()) or [None]
            for size in sizes:
                kept = same if size is None else same[same["block_size"].isna() | (same["block_size"] == size)]
                parts.append(Setting(_setting_text(kept.iloc[0], size, int(float(str(queries)))), kept))
    parts.sort(key=lambda part: -len(part.rows))
    before = Counter[object]()
    ranks = []
    for part in parts:
        run = part.rows["run"].iloc[0]
        ranks.append(before[run])
        before[run] += 1
    return [part for _, part in sorted(zip(ranks, parts), key=lambda ranked: ranked[0])]


def _setting_text(row: pd.Series, block_size: float | None, queries: int) -> str:
    heads, kv_heads = integer(row["heads"]), integer(row["kv_heads"])
    several = "," in str(row["layers"])
    parts = [
        "" if is_missing(row["run"]) else f"run {one_line(row['run'])}: input {one_line(row['input'])}",
        f"input {one_line(row['input'])}" if is_missing(row["run"]) else "",
        "" if is_missing(row["layers"]) else f"mean of layers {row['layers']}" if several else f"layer {row['layers']}",
        f"batch {integer(row['batch'])}",
        f"{heads} heads" if heads == kv_heads else f"{heads}:{kv_heads} heads",
        f"head dim {integer(row['head_dim'])}",
        str(row["dtype"]),
        "causal" if row["causal"] else "not causal",
        str(row["pass"]),
        f"{queries} quer{'y' if queries == 1 else 'ies'}" if queries else "",
        f"blocks of {integer(block_size)}" if block_size else "",
        "unknown device" if is_missing(row["device"]) else one_line(row["device"]),
    ]
    return ", ".join(part for part in parts if part)


def frontier(summary: pd.DataFrame) -> pd.DataFrame:
    """The rows of each problem that no other row beats in both speed-up and attention mass kept, by falling mass.

    Dense keeps all mass by definition. Bounds (an oracle, a floor) are no rivals and take no part.
    """
    rows = measured(summary)
    rows = rows[rows["kind"] != "bound"].copy()
    rows.loc[rows["kind"] == "dense", "mass_kept"] = 1.0
    rows = rows.dropna(subset=["speedup", "mass_kept"]).sort_values(["mass_kept", "speedup"], ascending=False)
    before = rows.groupby(PROBLEM, dropna=False)["speedup"].transform(lambda values: values.cummax().shift())
    return rows[before.isna() | (rows["speedup"] > before)]
