"""Figures of speed: the trade-off, time by length, and where the time goes."""

from __future__ import annotations

import pandas as pd

from pyramidbench.comparable import by_tile, fullest_length, one_per_point, usual_budget, usual_tile
from pyramidbench.cost import STAGES
from pyramidbench.frame import failed, frontier, measured
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
    some,
    tidy,
)
from pyramidbench.scaling import scalings
from pyramidbench.scaling_table import HEADERS, MEANING, scaling_rows
from pyramidbench.units import MISSING, integer, is_missing, one_line, tokens

MASS = Axis("attention mass kept (share)", "kept")
LENGTH = Axis("sequence length (tokens)", "tokens", log=True)
TIME = Axis("time of a call (ms)", "ms", log=True)
STAGE_TIME = Axis("time (ms)", "plain")
TRADEOFF = Heading("tradeoff", "tradeoff", "Speed-up against attention mass kept")
SCALING = Heading("scaling", "time", "Time of one attention call by length")
STAGES_BY_LENGTH = Heading("stages", "stages", "Where the time goes, by length")
STAGES_BY_LEVELS = Heading("stages-levels", "stages", "Where the time goes, by level count")
REPLAYED = (
    "Steps whose launches take the host about as long as the step, and those beside them, are replayed as a CUDA graph."
)
APART = (
    "A tick: the whole call. Stages are timed apart, each waited for, so that they can add up to more than the call."
)


def tradeoff(subject: Subject) -> Figure | NoFigure:
    rows = measured(subject.rows).dropna(subset=["speedup"])
    rivals = rows[(rows["kind"] == "selection") & rows["mass_kept"].notna()]
    if rivals.empty:
        return TRADEOFF.missing(subject, "no selection has both a time beside dense attention and a mass kept")
    length = fullest_length(rivals)
    rows = rows[(rows["seq_len_kv"] == length) & (rows["mass_kept"].notna() | (rows["kind"] == "dense"))]
    rivals = rivals[rivals["seq_len_kv"] == length]
    floor = (rows["kind"] == "bound") & (rows["mass_kept"] < rivals["mass_kept"].min())
    parts = [_tradeoff_panel(level, part) for level, part in by_tile(rows[~floor])]
    low = sorted(set(rows.loc[floor, "label"]))
    notes = (f"Left of the picture: {', '.join(low)} (a floor, not a rival).",) if low else ()
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
    if measured(subject.rows).dropna(subset=["latency_s"])["seq_len_kv"].nunique() < 2:
        return SCALING.missing(subject, "no row has timing at two lengths")
    rows = usual_budget(subject.rows)
    rows = pd.concat([rows[rows["latency_s"].notna()], failed(rows)])
    parts, silent = [], set()
    for level, part in by_tile(rows):
        part = one_per_point(part, ["label", "seq_len_kv"]).sort_values("seq_len_kv")
        timed = part["label"].isin(part.loc[part["latency_s"].notna(), "label"])
        silent |= {_stopped(row) for _, row in part[~timed].iterrows()}
        part = part[timed]
        median, low, high = (1e3 * _seconds(part, name) for name in ("latency_s", "latency_low_s", "latency_high_s"))
        points = tidy(part, panel=level, x=part["seq_len_kv"], y=median)
        parts.append(with_ends(points.assign(low=low, high=high)))
    notes: tuple[str, ...] = (
        "Bars: 95 % interval of the median. A cross: the last number before a length that gave none.",
    )
    notes += (f"No number at any length: {'; '.join(sorted(silent))}.",) if silent else ()
    notes += (REPLAYED,) if _is_replayed(rows).any() else ()
    return SCALING.figure(
        subject, "lines", budgets(rows), LENGTH, dict.fromkeys(names(parts), TIME), parts, notes=notes,
        table=_growth(subject),
    )  # fmt: skip


def _is_replayed(rows: pd.DataFrame) -> pd.Series[bool]:
    """Steps of decoding that were replayed as a CUDA graph, as engines that generate run them."""
    return (rows["pass"] == "decode") & rows["graph_latency_s"].notna()


def _seconds(rows: pd.DataFrame, name: str) -> pd.Series[float]:
    """A column of times, of the replay where that is what counts."""
    return rows[name].where(~_is_replayed(rows), rows[f"graph_{name}"])


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


def stages_by_length(subject: Subject) -> Figure | NoFigure:
    rows = _staged(subject)
    if rows.empty:
        return STAGES_BY_LENGTH.missing(subject, "no selection was timed stage by stage")
    lengths = some(list(rows["seq_len_kv"]))
    order = _slowest_first(rows, fullest_length(rows))
    lost = usual_budget(failed(subject.rows))
    lost = lost[lost["label"].isin(rows["label"]) & (lost["query_tile"] == rows["query_tile"].iloc[0])]
    rows = pd.concat([rows, lost.assign(shown=lost["label"])])
    parts = []
    for length in lengths:
        here = one_per_point(rows[rows["seq_len_kv"] == length], ["label"])
        parts.append(_stage_bars(here.assign(panel=at_length(length)).sort_values("label", key=lambda c: c.map(order))))
    about = f"{budgets(rows)}, tile {integer(rows['query_tile'].iloc[0])}; each length on its own scale"
    axes = dict.fromkeys(names(parts), STAGE_TIME)
    return STAGES_BY_LENGTH.figure(subject, "bars", about, None, axes, parts, notes=(APART,))


def stages_by_levels(subject: Subject) -> Figure | NoFigure:
    rows = _staged(subject)
    varied = rows.groupby(["label", "seq_len_kv"])["levels"].transform("nunique") > 1
    if not varied.any():
        return STAGES_BY_LEVELS.missing(subject, "no method was timed with two level counts at one length and budget")
    rows = rows[varied]
    lengths = some(list(rows["seq_len_kv"]), 3)
    rows = rows[rows["seq_len_kv"].isin(lengths)].sort_values(["seq_len_kv", "label", "levels"])
    # Levels that were asked for and those that "auto" comes to may be the same.
    rows = rows.drop_duplicates(["seq_len_kv", "label", "levels"])
    rows = rows.assign(
        panel=rows["seq_len_kv"].map(at_length), shown=rows["label"] + ", " + rows["levels"].map(_levels)
    )
    about = f"{budgets(rows)}, tile {integer(rows['query_tile'].iloc[0])}; each length on its own scale"
    axes = dict.fromkeys(rows["panel"].unique(), STAGE_TIME)
    return STAGES_BY_LEVELS.figure(subject, "bars", about, None, axes, [_stage_bars(rows)], notes=(APART,))


def _staged(subject: Subject) -> pd.DataFrame:
    """Selections with a time for each stage, at the usual budget and at the tile that most of them have."""
    rows = measured(subject.rows)
    rows = rows[(rows["kind"] != "dense") & rows["latency_s"].notna() & rows["attend_s"].notna()]
    rows = usual_budget(rows)
    if rows.empty:
        return rows.assign(shown=rows["label"])
    tile = usual_tile(rows)
    return rows[rows["query_tile"] == tile].assign(shown=rows["label"])


def _slowest_first(rows: pd.DataFrame, length: float) -> dict[str, float]:
    """A rank for each label: by its time at that length; those that have none there come last."""
    at = rows.assign(near=rows["seq_len_kv"] == length).sort_values(["near", "latency_s"], ascending=False)
    return {label: float(rank) for rank, label in enumerate(dict.fromkeys(at["label"]))}


def _stage_bars(rows: pd.DataFrame) -> pd.DataFrame:
    """A row for each stage that took time (of pass backward the gradients alone, as its time is), and one without stage and
    numbers for what gave none."""
    whole = tidy(rows, panel=rows["panel"], y=1e3 * rows["latency_s"]).assign(way=rows["pass"])
    parts = [whole[whole["y"].isna()]]
    for stage in STAGES:
        if f"{stage}_s" in rows:
            own = whole.assign(part=stage, x=1e3 * rows[f"{stage}_s"])
            belongs = (own["way"] != "backward") | (stage == "backward")
            parts.append(own[belongs & (own["x"] > 0) & own["y"].notna()])
    place = {label: rank for rank, label in enumerate(rows["shown"])}
    stacked = pd.concat([part for part in parts if len(part)])
    return stacked.sort_values("shown", key=lambda names: names.map(place), kind="stable").drop(columns="way")


def _levels(count: float) -> str:
    return "1 level" if count == 1 else f"{integer(count)} levels"
