"""The page's interactive charts: a Figure's data as Vega-Lite, by Altair. Decides looks, not content.

Every panel is a chart of its own, as wide as its place on the page. Colours are CSS variables, so that the page's theme (and
its print) reaches into the drawn SVG; marks carry the `cell` that the page explains on hover.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import altair as alt
import pandas as pd

from pyramidbench.reporting import chart_lines, chart_rows
from pyramidbench.reporting.chart_looks import config
from pyramidbench.reporting.chart_parts import PICKED, ROWS, values
from pyramidbench.reporting.figure import Figure, Kind, Panel
from pyramidbench.units import one_line

DRAWN: dict[Kind, Callable[[Figure, Panel, pd.DataFrame], alt.LayerChart]] = {
    "lines": chart_lines.lines, "tradeoff": chart_lines.tradeoff, "roofline": chart_lines.roofline,
    "dots": chart_rows.dots, "bars": chart_rows.bars, "heat": chart_rows.heat,
}  # fmt: skip


@dataclass(frozen=True)
class Chart:
    """One panel: the row that it stands in, its title, and a Vega-Lite specification."""

    row: str
    title: str
    spec: dict[str, Any]


def charts(figure: Figure) -> list[Chart]:
    """The charts of a figure, row by row and panel by panel."""
    made = []
    for row in figure.data["row"].unique():
        for panel in figure.panels:
            data = figure.data[(figure.data["panel"] == panel.name) & (figure.data["row"] == row)]
            if len(data):
                spec = _spec(DRAWN[figure.kind](figure, panel, data), data, figure)
                made.append(Chart(row[:1].upper() + row[1:], _title(figure, panel), spec))
    return made


def _rows(figure: Figure, data: pd.DataFrame) -> list[dict[str, Any]]:
    """The data, and where each mark stands on an axis that marks of all panels share."""
    rows = values(data)
    if figure.x is None or figure.kind == "heat":
        return rows
    return [row | {"at": at} if "x" in row else row for row, at in zip(rows, chart_lines.places(figure, data["x"]))]


def _title(figure: Figure, panel: Panel) -> str:
    if figure.kind == "roofline":
        return ""
    title = one_line(panel.name)
    return title if figure.kind == "heat" else title[:1].upper() + title[1:]


def _spec(chart: alt.LayerChart, data: pd.DataFrame, figure: Figure) -> dict[str, Any]:
    lines = {"dots": "shown", "bars": "shown", "heat": "y"}.get(figure.kind)
    height = chart_lines.HEIGHT if lines is None else chart_rows.STEP * data[lines].nunique()
    # Tests hold the specifications to Vega-Lite's schema; here that would take longer than all the rest. What belongs to the
    # whole chart is added as text: each of Altair's methods for it copies the chart with its data.
    spec: dict[str, Any] = chart.to_dict(validate=False)
    spec.setdefault("datasets", {})[ROWS] = _rows(figure, data)
    return spec | {
        "params": [{"name": PICKED, "value": ""}],
        "width": "container",
        "height": height,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "config": config(),
    }
