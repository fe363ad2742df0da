"""Figures: each is defined once here, as a tidy dataframe with its meaning. Renderers only draw what they are given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import pandas as pd

from pyramidbench.comparable import by_tile, fullest_length, one_per_point, usual_budget
from pyramidbench.frame import Setting, failed, frontier, measured, settings
from pyramidbench.palette import Series, series_of
from pyramidbench.units import integer, ratio, share, significant, tokens

Kind = Literal["lines", "tradeoff", "dots"]
Ticks = Literal["tokens", "ms", "ratio", "share", "count"]
COLUMNS = ["row", "panel", "series", "shown", "x", "y", "low", "high", "status", "frontier", "note"]
MOST_SETTINGS = 4
"""Settings that get figures, the largest first: beyond these a page grows faster than what it tells."""


@dataclass(frozen=True)
class Axis:
    """What an axis shows, with its unit, and how its values are spaced and written."""

    label: str
    ticks: Ticks
    log: bool = False


@dataclass(frozen=True)
class Panel:
    """One pair of axes: its `name` in the data's column `panel`, and the axis of the measured value."""

    name: str
    axis: Axis


@dataclass(frozen=True)
class Figure:
    """A figure before it is drawn. `name` is a file's stem; `x` is the axis that the panels share (dots have none).

    `data` has COLUMNS. lines: y over x, low and high its interval; y is missing where `status` says why, x is missing
    for a constant, which goes across. tradeoff: points, those of one `shown` joined; `frontier` marks those that no
    other beats, `note` is a word beside the point. dots: x is the value; one line of the chart per `shown`, one block
    of lines per `row`.
    """

    name: str
    kind: Kind
    title: str
    subtitle: str
    alt: str
    x: Axis | None
    panels: tuple[Panel, ...]
    series: dict[str, Series]
    data: pd.DataFrame
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class NoFigure:
    """A figure that this run has no data for, and why."""

    name: str
    title: str
    reason: str


MASS = Axis("attention mass kept (share)", "share")
RECALL = Axis("recall of the exact Top-K blocks (share)", "share")
MEASURES = {
    "recall": Axis("recall of the exact\nTop-K blocks (share)", "share"),
    "mass_outside_forced": Axis("attention kept outside\nthe forced blocks (share)", "share"),
    "output_error": Axis("output error (relative L2),\nlower is better", "share"),
}


def figures(summary: pd.DataFrame) -> list[Figure | NoFigure]:
    """Every figure of a summary (`frame.summarise`), for each of its settings, or the reason why one is missing."""
    looks = series_of(summary)
    drawn: list[Figure | NoFigure] = []
    for index, setting in enumerate(settings(summary)):
        suffix = f"-{index + 1}" if index else ""
        if index < MOST_SETTINGS:
            drawn += [define(setting, looks, suffix) for define in DEFINITIONS]
        else:
            reason = f"the run has more than {MOST_SETTINGS} settings and the largest ones come first"
            drawn.append(NoFigure(f"all{suffix}", f"Figures of {setting.text}", reason))
    return drawn


def _tradeoff(setting: Setting, looks: dict[str, Series], suffix: str) -> Figure | NoFigure:
    name, title = f"tradeoff{suffix}", "Speed-up against attention mass kept"
    rows = measured(setting.rows).dropna(subset=["speedup"])
    rivals = rows[(rows["kind"] == "selection") & rows["mass_kept"].notna()]
    if rivals.empty:
        return NoFigure(name, title, "no selection has both a time beside dense attention and a mass kept")
    length = fullest_length(rivals)
    rows = rows[(rows["seq_len_kv"] == length) & (rows["mass_kept"].notna() | (rows["kind"] == "dense"))]
    rivals = rivals[rivals["seq_len_kv"] == length]
    floor = (rows["kind"] == "bound") & (rows["mass_kept"] < rivals["mass_kept"].min())
    parts = []
    for level, part in by_tile(rows[~floor]):
        part = one_per_point(part, ["label", "top_k"])
        part = part.assign(mass_kept=part["mass_kept"].where(part["kind"] != "dense", 1.0)).sort_values("top_k")
        tidy = _tidy(part, panel=level, x=part["mass_kept"], y=part["speedup"])
        varied = part.groupby("label")["top_k"].transform("nunique") > 1
        note = ("K " + part["top_k"].map(integer)).where(varied, "")
        parts.append(tidy.assign(frontier=part.index.isin(frontier(part).index), note=note))
    reference = rivals["dense_method"].iloc[0]
    low = sorted(set(rows.loc[floor, "label"]))
    notes = (f"Left of the picture: {', '.join(low)} (a floor, not a rival).",) if low else ()
    axis = Axis(f"speed-up over {reference}", "ratio", log=True)
    about = f"{tokens(length)} tokens, {_budgets(rows)}. {setting.text}"
    return _figure(name, "tradeoff", title, about, MASS, dict.fromkeys(_names(parts), axis), looks, parts, notes)


def _quality(setting: Setting, looks: dict[str, Series], suffix: str) -> Figure | NoFigure:
    name, title = f"quality{suffix}", "What each method finds at an equal budget"
    rows = measured(setting.rows)
    rows = rows[(rows["kind"] != "dense") & rows["recall"].notna()]
    if rows.empty:
        return NoFigure(name, title, "no row has a recall")
    length = fullest_length(rows)
    rows = usual_budget(rows[rows["seq_len_kv"] == length])
    parts = []
    for level, part in by_tile(rows):
        part = one_per_point(part, ["label"]).sort_values("recall", ascending=False)
        parts += [_tidy(part, row=level, panel=measure, x=part[measure]) for measure in MEASURES]
    parts = [part.dropna(subset=["x"]) for part in parts]
    axes = {measure: axis for measure, axis in MEASURES.items() if rows[measure].notna().any()}
    about = f"{tokens(length)} tokens, {_budgets(rows)}. {setting.text}"
    return _figure(name, "dots", title, about, None, axes, looks, parts)


def _scaling(setting: Setting, looks: dict[str, Series], suffix: str) -> Figure | NoFigure:
    name, title = f"scaling{suffix}", "Time of one attention call by length"
    if measured(setting.rows).dropna(subset=["latency_s"])["seq_len_kv"].nunique() < 2:
        return NoFigure(name, title, "no row has timing at two lengths")
    rows = usual_budget(setting.rows)
    rows = pd.concat([rows[rows["latency_s"].notna()], failed(rows)])
    parts = []
    for level, part in by_tile(rows):
        part = one_per_point(part, ["label", "seq_len_kv"]).sort_values("seq_len_kv")
        part = part[part["label"].isin(part.loc[part["latency_s"].notna(), "label"])]
        tidy = _tidy(part, panel=level, x=part["seq_len_kv"], y=1e3 * part["latency_s"])
        parts.append(tidy.assign(low=1e3 * part["latency_low_s"], high=1e3 * part["latency_high_s"]))
    axis = Axis("time of a call (ms)", "ms", log=True)
    x = Axis("sequence length (tokens)", "tokens", log=True)
    notes = ("Bars: 95 % interval of the median. A cross: the method's last number, with what stopped it.",)
    about = f"{_budgets(rows)}. {setting.text}"
    return _figure(name, "lines", title, about, x, dict.fromkeys(_names(parts), axis), looks, parts, notes)


def _by_levels(setting: Setting, looks: dict[str, Series], suffix: str) -> Figure | NoFigure:
    name, title = f"levels{suffix}", "Recall of important blocks by level count"
    rows = measured(setting.rows)
    rows = usual_budget(rows[(rows["kind"] == "selection") & rows["recall"].notna()])
    varied = rows.groupby(["label", "seq_len_kv", "query_tile"])["levels"].transform("nunique") > 1
    if not varied.any():
        return NoFigure(name, title, "no method was run with two level counts at one length and budget")
    length = rows.loc[varied, "seq_len_kv"].max()
    parts = []
    for level, part in by_tile(rows[rows["seq_len_kv"] == length]):
        part = part.drop_duplicates(["label", "levels"]).sort_values("levels")
        moves = varied.loc[part.index]
        if moves.any():
            parts.append(_tidy(part, panel=level, x=part["levels"].where(moves), y=part["recall"]))
    x = Axis("levels walked (1 is a single pass)", "count")
    about = f"{tokens(length)} tokens, {_budgets(rows)}; a method with one level count goes across. {setting.text}"
    return _figure(name, "lines", title, about, x, dict.fromkeys(_names(parts), RECALL), looks, parts)


def _by_budget(setting: Setting, looks: dict[str, Series], suffix: str) -> Figure | NoFigure:
    name, title = f"budget{suffix}", "Recall and attention mass by budget"
    rows = measured(setting.rows)
    rows = rows[(rows["kind"] != "dense") & rows["recall"].notna()]
    varied = rows[rows.groupby(["label", "seq_len_kv", "query_tile"])["top_k"].transform("nunique") > 1]
    if varied.empty:
        return NoFigure(name, title, "no method was run with two budgets at one length")
    length = varied["seq_len_kv"].max()
    varied = varied[varied["seq_len_kv"] == length]
    tile = varied.groupby("query_tile")["label"].nunique().idxmax()
    varied = one_per_point(varied[varied["query_tile"] == tile], ["label", "top_k"]).sort_values("top_k")
    varied = varied.assign(shown=varied["label"])
    rivals = varied[varied["kind"] == "selection"]
    parts = [
        _tidy(rivals, panel="recall", x=rivals["top_k"], y=rivals["recall"]),
        _tidy(varied, panel="mass_kept", x=varied["top_k"], y=varied["mass_kept"]),
    ]
    x = Axis("blocks kept by rank, K", "count", log=True)
    about = f"{tokens(length)} tokens, tile {integer(varied['query_tile'].iloc[0])}. {setting.text}"
    return _figure(name, "lines", title, about, x, {"recall": RECALL, "mass_kept": MASS}, looks, parts)


Definition = Callable[[Setting, dict[str, Series], str], "Figure | NoFigure"]
DEFINITIONS: tuple[Definition, ...] = (_tradeoff, _quality, _scaling, _by_levels, _by_budget)


def _tidy(rows: pd.DataFrame, **columns: pd.Series | str) -> pd.DataFrame:
    """COLUMNS for rows that `comparable` has chosen."""
    empty = rows[["shown", "status"]].assign(series=rows["label"], row="", y=float("nan"), frontier=False, note="")
    return empty.assign(**columns).reindex(columns=COLUMNS)


def _names(parts: list[pd.DataFrame]) -> list[str]:
    return [part["panel"].iloc[0] for part in parts]


def _figure(
    name: str, kind: Kind, title: str, about: str, x: Axis | None, axes: dict[str, Axis],
    looks: dict[str, Series], parts: list[pd.DataFrame], notes: tuple[str, ...] = (),
) -> Figure:  # fmt: skip
    data = pd.concat(parts, ignore_index=True)
    panels = tuple(Panel(panel, axis) for panel, axis in axes.items())
    series = {label: looks[label] for label in data["series"].unique()}
    return Figure(
        name, kind, title, about, f"{title}. {about}. {_said(kind, panels, data)}", x, panels, series, data, notes
    )


def _said(kind: Kind, panels: tuple[Panel, ...], data: pd.DataFrame) -> str:
    """The last value of each series in words, panel by panel, for those who cannot see the picture."""
    value = "x" if kind == "dots" else "y"
    sentences = []
    for row in data["row"].unique():
        for panel in panels:
            part = data[(data["panel"] == panel.name) & (data["row"] == row)].dropna(subset=[value])
            last = part.drop_duplicates("shown", keep="last")
            write = {"share": share, "ratio": ratio}.get(panel.axis.ticks, significant)
            values = ", ".join(f"{shown} {write(number)}" for shown, number in zip(last["shown"], last[value]))
            where = ", ".join(text for text in (row, panel.name) if text and text not in MEASURES)
            sentences.append(f"{panel.axis.label} {where}: {values}.".replace("\n", " ").replace(" :", ":"))
    return " ".join(sentences)


def _budgets(rows: pd.DataFrame) -> str:
    """The budgets of some rows: 'K 8', 'K 4 to 16'."""
    values = sorted(rows["top_k"].dropna().unique())
    if not values:
        return "no block budget"
    return f"K {integer(values[0])}" + (f" to {integer(values[-1])}" if len(values) > 1 else "")
