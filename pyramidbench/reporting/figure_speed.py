"""Figures of speed: the trade-off, and time by length."""

from __future__ import annotations

import pandas as pd

from pyramidbench.comparable import IN_TORCH, by_tile, chosen_in_torch, fullest_length, one_per_point, usual_budget
from pyramidbench.frame import failed, frontier, measured
from pyramidbench.replays import as_replayed, is_replayed
from pyramidbench.reporting.figure import (
    END,
    Axis,
    Figure,
    Guide,
    Heading,
    NoFigure,
    Subject,
    Table,
    at_length,
    budgets,
    names,
    tidy,
    unit_of,
)
from pyramidbench.scaling import scalings
from pyramidbench.scaling_table import HEADERS, MEANING, scaling_rows
from pyramidbench.units import MISSING, integer, is_missing, one_line, tokens

MASS = Axis("attention mass kept (share)", "kept")
LENGTH = Axis("sequence length (tokens)", "tokens", log=True)
TRADEOFF = Heading("tradeoff", "tradeoff", "Speed-up against attention mass kept")
SCALING = Heading("scaling", "time", "Time of one attention call by length")
STEP_SCALING = Heading("scaling", "time", "Time of one decoding step by length")
FRONTIER = "Up and to the right is better. Dashed: the frontier of what nothing beats in both, bounds apart."
A_STEP = "A step: one layer's attention for the newest token of each sequence."
REPLAYED = (
    "Where launching takes the host about as long as the step itself, times are of the step replayed as a CUDA graph, as "
    "engines run it."
)


def tradeoff(subject: Subject) -> Figure | NoFigure:
    rows = as_replayed(measured(subject.rows)).dropna(subset=["speedup"])
    rivals = rows[(rows["kind"] == "selection") & rows["mass_kept"].notna()]
    if rivals.empty:
        return TRADEOFF.missing(subject, "no selection has both a time beside dense attention and a mass kept")
    length = fullest_length(rivals)
    rows = rows[(rows["seq_len_kv"] == length) & (rows["mass_kept"].notna() | (rows["kind"] == "dense"))]
    rivals = rivals[rivals["seq_len_kv"] == length]
    floor = (rows["kind"] == "bound") & (rows["mass_kept"] < rivals["mass_kept"].min())
    parts = [_tradeoff_panel(level, part) for level, part in by_tile(rows[~floor])]
    low = sorted(set(rows.loc[floor, "label"]))
    slowed = chosen_in_torch(rows)
    notes = (FRONTIER, *((f"Left of the picture: {', '.join(low)} (a floor, not a rival).",) if low else ()))
    notes += (f"{IN_TORCH}: {', '.join(slowed)}.",) if slowed else ()
    axis = Axis(f"speed-up over {rivals['dense_method'].iloc[0]}", "ratio", log=True)
    return TRADEOFF.figure(
        subject, "tradeoff", f"{at_length(length)}, {budgets(rows)}", MASS, dict.fromkeys(names(parts), axis), parts,
        notes=notes, guides=tuple(_frontier(part) for part in parts),
    )  # fmt: skip


def _tradeoff_panel(level: str, rows: pd.DataFrame) -> pd.DataFrame:
    part = one_per_point(rows, ["label", "top_k"])
    part = part.assign(mass_kept=part["mass_kept"].where(part["kind"] != "dense", 1.0)).sort_values("top_k")
    varied = part.groupby("label")["top_k"].transform("nunique") > 1
    note = ("K " + part["top_k"].map(integer)).where(varied, "")
    points = tidy(
        part,
        panel=level,
        x=part["mass_kept"],
        y=part["speedup"],
        note=note,
        low=part["speedup_low"],
        high=part["speedup_high"],
    )
    return points.assign(frontier=part.index.isin(frontier(part).index))


def _frontier(points: pd.DataFrame) -> Guide:
    """Steps along the points that nothing beats."""
    best = points[points["frontier"]].sort_values("x")
    corners: list[tuple[float, float]] = []
    for x, y in zip(best["x"], best["y"]):
        corners += [(corners[-1][0], y)] if corners else []
        corners.append((float(x), float(y)))
    return Guide(points["panel"].iloc[0], "frontier", tuple(corners), dashed=True)


def scaling(subject: Subject) -> Figure | NoFigure:
    steps = (subject.rows["pass"] == "decode").all()
    heading = STEP_SCALING if steps else SCALING
    if measured(subject.rows).dropna(subset=["latency_s"])["seq_len_kv"].nunique() < 2:
        return heading.missing(subject, "no row has timing at two lengths")
    rows = usual_budget(subject.rows)
    replayed = is_replayed(rows).any()
    rows = as_replayed(pd.concat([rows[rows["latency_s"].notna()], failed(rows)]))
    time = unit_of(rows["latency_s"])
    parts, silent = [], set()
    for level, part in by_tile(rows):
        part = one_per_point(part, ["label", "seq_len_kv"]).sort_values("seq_len_kv")
        timed = part["label"].isin(part.loc[part["latency_s"].notna(), "label"])
        silent |= {_stopped(row) for _, row in part[~timed].iterrows()}
        part = part[timed]
        median, low, high = (time.scale * part[name] for name in ("latency_s", "latency_low_s", "latency_high_s"))
        points = tidy(part, panel=level, x=part["seq_len_kv"], y=median)
        parts.append(with_ends(points.assign(low=low, high=high)))
    notes: tuple[str, ...] = (A_STEP,) if steps else ()
    notes += ("Bars: 95 % interval of the median. A cross: the last number before a length that gave none.",)
    notes += (f"No number at any length: {'; '.join(sorted(silent))}.",) if silent else ()
    notes += (REPLAYED,) if replayed else ()
    axis = Axis(f"time of a {'step' if steps else 'call'} ({time.name})", "ms", log=True)
    return heading.figure(
        subject, "lines", budgets(rows), LENGTH, dict.fromkeys(names(parts), axis), parts, notes=notes,
        table=_growth(subject),
    )  # fmt: skip


def _growth(subject: Subject) -> Table | None:
    """Slopes and crossovers, without the columns that no method here fills."""
    rows = scaling_rows(scalings(subject.setting))
    kept = [i for i in range(len(HEADERS)) if any(row[i] not in ("", MISSING) for row in rows)]
    texts = tuple(tuple(one_line(row[i]) or MISSING for i in kept) for row in rows)
    header = tuple(HEADERS[i] for i in kept)
    return Table(subject.titled("How time grows with the length"), header, texts, (MEANING,)) if rows else None


def _stopped(row: pd.Series) -> str:
    why = "" if is_missing(row["reason"]) else f": {one_line(row['reason'])}"
    return f"{one_line(row['label'])} ({row['status']}{why})"


def with_ends(points: pd.DataFrame) -> pd.DataFrame:
    """The points of lines over lengths, with a mark at each number that a length without one follows."""
    ends = []
    for _, line in points.groupby("shown", sort=False):
        before = line.shift(1)
        gaps = line[line["y"].isna() & before["y"].notna()]
        last = before.loc[gaps.index]
        note = [f"{status} at {tokens(length)}" for status, length in zip(gaps["status"], gaps["x"])]
        ends.append(gaps.assign(part=END, x=last["x"], y=last["y"], low=float("nan"), high=float("nan"), note=note))
    return pd.concat([points, *[end for end in ends if len(end)]], ignore_index=True)
