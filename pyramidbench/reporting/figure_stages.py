"""Figures of where the time goes: the stages of a call beside the whole, by length and by level count."""

from __future__ import annotations

import math

import pandas as pd

from pyramidbench.comparable import fullest_length, one_per_point, usual_budget, usual_tile
from pyramidbench.cost import STAGES
from pyramidbench.frame import failed, measured
from pyramidbench.replays import is_replayed
from pyramidbench.reporting.figure import (
    Axis,
    Figure,
    Heading,
    NoFigure,
    Subject,
    TimeUnit,
    at_length,
    budgets,
    names,
    some,
    tidy,
    unit_of,
)
from pyramidbench.units import integer

BY_LENGTH = Heading("stages", "stages", "Where the time goes, by length")
BY_LEVELS = Heading("stages-levels", "stages", "Where the time goes, by level count")
APART = (
    "A tick: the whole call. Stages are timed apart, each waited for, so that they can add up to more than the call."
)
LAUNCHED = (
    "Steps are launched one by one here, so that most of a bar is the host's launching: no stage can be replayed alone. The "
    "figure of time by length shows replayed steps, which take less."
)
STEP = 5
"""Methods of one block differ in time by this factor at the most: in a bar of a tenth of the longest no stage can be seen."""
WIDE = 10
"""Times the fastest up to which the slowest may be for all to stand in one block."""


def by_length(subject: Subject) -> Figure | NoFigure:
    rows = _staged(subject)
    if rows.empty:
        return BY_LENGTH.missing(subject, "no selection was timed stage by stage")
    time, lengths = unit_of(rows["latency_s"]), some(list(rows["seq_len_kv"]))
    blocks = _blocks(_fastest_first(rows, fullest_length(rows)))
    lost = usual_budget(failed(subject.rows))
    lost = lost[lost["label"].isin(rows["label"]) & (lost["query_tile"] == rows["query_tile"].iloc[0])]
    rows = pd.concat([rows, lost.assign(shown=lost["label"])])
    rows = rows.assign(panel=rows["seq_len_kv"].map(at_length), row=rows["label"].map(blocks))
    order = list(blocks)
    parts = []
    for length in lengths:
        here = one_per_point(rows[rows["seq_len_kv"] == length], ["label"])
        parts.append(_stage_bars(here.sort_values("label", key=lambda column: column.map(order.index)), time))
    return BY_LENGTH.figure(
        subject, "bars", _about(rows), None, dict.fromkeys(names(parts), _axis(time)), parts, notes=_notes(rows)
    )


def by_levels(subject: Subject) -> Figure | NoFigure:
    rows = _staged(subject)
    varied = rows.groupby(["label", "seq_len_kv"])["levels"].transform("nunique") > 1
    if not varied.any():
        return BY_LEVELS.missing(subject, "no method was timed with two level counts at one length and budget")
    rows = rows[varied]
    lengths = some(list(rows["seq_len_kv"]), 3)
    rows = rows[rows["seq_len_kv"].isin(lengths)].sort_values(["seq_len_kv", "label", "levels"])
    # Levels that were asked for and those that "auto" comes to may be the same.
    rows = rows.drop_duplicates(["seq_len_kv", "label", "levels"])
    shown = rows["label"] + ", " + rows["levels"].map(_levels)
    rows = rows.assign(panel=rows["seq_len_kv"].map(at_length), shown=shown, row="")
    time = unit_of(rows["latency_s"])
    axes = dict.fromkeys(rows["panel"].unique(), _axis(time))
    return BY_LEVELS.figure(subject, "bars", _about(rows), None, axes, [_stage_bars(rows, time)], notes=_notes(rows))


def _staged(subject: Subject) -> pd.DataFrame:
    """Selections with a time for each stage, at the usual budget and at the tile that most of them have."""
    rows = measured(subject.rows)
    rows = rows[(rows["kind"] != "dense") & rows["latency_s"].notna() & rows["attend_s"].notna()]
    rows = usual_budget(rows)
    if rows.empty:
        return rows.assign(shown=rows["label"])
    tile = usual_tile(rows)
    return rows[rows["query_tile"] == tile].assign(shown=rows["label"])


def _about(rows: pd.DataFrame) -> str:
    scales = "length and block" if rows["row"].nunique() > 1 else "length"
    return f"{budgets(rows)}, tile {integer(rows['query_tile'].iloc[0])}; each {scales} on its own scale"


def _notes(rows: pd.DataFrame) -> tuple[str, ...]:
    return (APART, LAUNCHED) if is_replayed(rows).any() else (APART,)


def _axis(time: TimeUnit) -> Axis:
    return Axis(f"time ({time.name})", "plain")


def _fastest_first(rows: pd.DataFrame, length: float) -> dict[str, float]:
    """The time of each label at that length, or at another one where it has none there, the shortest first; labels without a
    time at that length come last."""
    at = rows.assign(elsewhere=rows["seq_len_kv"] != length).sort_values(["elsewhere", "latency_s"])
    return dict(at.drop_duplicates("label").set_index("label")["latency_s"])


def _blocks(seconds: dict[str, float]) -> dict[str, str]:
    """The block that each label stands in, by how many times the fastest one's time it takes; one block, without a name, where
    all of them fit a scale."""
    fastest, slowest = min(seconds.values()), max(seconds.values())
    if slowest <= WIDE * fastest:
        return dict.fromkeys(seconds, "")
    return {label: _block(math.floor(math.log(own / fastest, STEP) + 1e-9)) for label, own in seconds.items()}


def _block(power: int) -> str:
    most = f"{STEP ** (power + 1)} times the time of the fastest"
    return f"{STEP**power} to {most}" if power else f"up to {most}"


def _stage_bars(rows: pd.DataFrame, time: TimeUnit) -> pd.DataFrame:
    """A row for each stage that took time (of pass backward the gradients alone, as its time is), and one without stage and
    numbers for what gave none."""
    whole = tidy(rows, panel=rows["panel"], row=rows["row"], y=time.scale * rows["latency_s"]).assign(way=rows["pass"])
    parts = [whole[whole["y"].isna()]]
    for stage in STAGES:
        if f"{stage}_s" in rows:
            own = whole.assign(part=stage, x=time.scale * rows[f"{stage}_s"])
            belongs = (own["way"] != "backward") | (stage == "backward")
            parts.append(own[belongs & (own["x"] > 0) & own["y"].notna()])
    place = {label: rank for rank, label in enumerate(rows["shown"])}
    stacked = pd.concat([part for part in parts if len(part)])
    return stacked.sort_values("shown", key=lambda names: names.map(place), kind="stable").drop(columns="way")


def _levels(count: float) -> str:
    return "1 level" if count == 1 else f"{integer(count)} levels"
