"""Interactive charts with a line per method or layer: dots with their numbers, bars of stages, maps of recall."""

from __future__ import annotations

from typing import Any

import altair as alt
import pandas as pd

from pyramidbench.reporting.chart_looks import css_variable, labels
from pyramidbench.reporting.chart_parts import TIP, faded, own, points, source, stacked, statuses, text, values
from pyramidbench.reporting.columns import most_of
from pyramidbench.reporting.figure import Figure, Panel
from pyramidbench.reporting.painters_areas import MOST_NUMBERS, heat_range
from pyramidbench.reporting.palette import HEAT, INK, MUTED, OTHER_STAGE, PAPER, STAGES
from pyramidbench.units import significant

STEP = 23
"""Pixels from one line to the next."""
ROOM = 0.2
"""Share of the axis that a stage must take up to carry its name."""


def _methods(data: pd.DataFrame) -> alt.Y:
    """A line per method, in the order of the data."""
    order = list(dict.fromkeys(data["shown"]))
    return alt.Y("shown:N", sort=order, axis=alt.Axis(title=None, labelLimit=190, ticks=False, domain=False))


def _from_zero(field: str, panel: Panel, most: float) -> alt.X:
    """An axis from 0; its title is left out where it stands above the panel already."""
    title = None if panel.name == panel.axis.label else panel.axis.label
    axis = alt.Axis(title=title, tickCount=4, labelExpr=labels(panel.axis))
    return alt.X(field, scale=alt.Scale(domain=[0, most], nice=False), axis=axis)


def dots(figure: Figure, panel: Panel, data: pd.DataFrame) -> alt.LayerChart:
    """A dot and its number per method, a tick for what it is held against, a status where there is no number."""
    most = 1.3 * most_of(figure.data[figure.data["panel"] == panel.name])
    x, y, rows = _from_zero("x:Q", panel, most), _methods(data), source()
    write = ".3f" if panel.axis.ticks == "share" else ".3~r"
    known = rows.transform_filter("isValid(datum.x)")
    numbers = text(known.transform_calculate(end="max(datum.x, datum.y || 0)"), dx=9)
    tick = rows.transform_filter("isValid(datum.y)").mark_tick(thickness=2, size=15, color=css_variable(MUTED))
    return stacked([
        tick.encode(x=alt.X("y:Q"), y=y, opacity=faded()),
        points(known, figure, data, x, y),
        numbers.encode(x=alt.X("end:Q"), y=y, text=alt.Text("x:Q", format=write), opacity=faded()),
        statuses(rows.transform_filter("!isValid(datum.x)"), y),
    ])  # fmt: skip


def bars(figure: Figure, panel: Panel, data: pd.DataFrame) -> alt.LayerChart:
    """Stages one after another, named where there is room, a tick for the whole call, a status where there is none."""
    y, rows = _methods(data), _stacked_stages(data[data["y"].notna()])
    most = 1.25 * max([1e-9, *(row["end"] for row in rows), *(row["y"] for row in rows)])
    whole = [
        {"shown": row["shown"], "y": row["y"], "end": max(row["end"], row["y"]), "number": significant(row["y"])}
        for row in {row["shown"]: row for row in rows}.values()
    ]
    stages = list(dict.fromkeys(filter(None, figure.data["part"])))
    colours = [css_variable(STAGES.get(stage, OTHER_STAGE)[0]) for stage in stages]
    bar = own(rows).mark_bar(size=16, stroke=css_variable(PAPER), strokeWidth=0.6)
    tick = own(whole).mark_tick(thickness=2, size=21, color=css_variable(INK))
    return stacked([
        bar.encode(
            x=_from_zero("start:Q", panel, most), x2=alt.X2("end:Q"), y=y, tooltip=TIP, opacity=faded(),
            color=alt.Color("part:N", scale=alt.Scale(domain=stages, range=colours), legend=None)),
        *(_stage_names([row for row in rows if row["x"] > ROOM * most], ink, y) for ink in (INK, PAPER)),
        tick.encode(x=alt.X("y:Q"), y=y, opacity=faded()),
        text(own(whole), dx=7).encode(x=alt.X("end:Q"), y=y, text=alt.Text("number:N"), opacity=faded()),
        statuses(own(values(data[data["y"].isna()])), y),
    ])  # fmt: skip


def _stacked_stages(data: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows with the place where each stage starts and ends."""
    ends = data.groupby("shown")["x"].cumsum()
    places = zip((ends - data["x"]).round(6), ends.round(6))
    return [{**row, "start": start, "end": end} for row, (start, end) in zip(values(data), places)]


def _stage_names(rows: list[dict[str, Any]], ink: str, y: alt.Y) -> alt.Chart:
    """Names on the stages whose colour wants this ink; no theme changes it, since none changes how dark a stage is."""
    own_ink = [row for row in rows if STAGES.get(row["part"], OTHER_STAGE)[1] == ink]
    written = own(own_ink).mark_text(align="left", dx=5, fontSize=11, color=ink)
    return written.encode(x=alt.X("start:Q"), y=y, text=alt.Text("part:N"), tooltip=TIP)


def heat(figure: Figure, panel: Panel, data: pd.DataFrame) -> alt.LayerChart:  # noqa: ARG001 - all take a panel
    """A map of layers and heads on the scale that the figure's maps share, with numbers where they fit."""
    low, high = heat_range(figure.data["value"])
    x = alt.X("x:O", axis=alt.Axis(title="head", labelAngle=0, ticks=False, domain=False))
    y = alt.Y("y:O", axis=alt.Axis(title="layer", ticks=False, domain=False))
    colour = alt.Color("value:Q", scale=alt.Scale(type="quantize", domain=[low, high], range=list(HEAT)), legend=None)
    cells = source().mark_rect(stroke=css_variable(PAPER)).encode(x=x, y=y, color=colour, tooltip=TIP)
    if max(data["x"].nunique(), data["y"].nunique()) > MOST_NUMBERS:
        return stacked([cells])
    ink = alt.ColorValue(condition={"test": f"datum.value < {(low + high) / 2}", "value": PAPER}, value=INK)
    numbers = source().mark_text(fontSize=11)
    return stacked([cells, numbers.encode(x=x, y=y, text=alt.Text("value:Q", format=".2f"), color=ink)])
