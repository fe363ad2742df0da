"""What the interactive charts are put together from: data, texts, points and layers, each with the same hover and fading."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import altair as alt
import pandas as pd

from pyramidbench.reporting.chart_looks import by_series, css_variable
from pyramidbench.reporting.figure import Figure
from pyramidbench.reporting.palette import INK, MUTED, PAPER

PICKED = "picked"
"""A signal of every chart: the method that the reader picked in a legend, or an empty text."""
ROWS = "rows"
"""The dataset of a chart that holds its figure's data; others hold places of texts and guides."""
COLUMNS = ["shown", "part", "x", "y", "low", "high", "value", "status", "reason", "note", "cell"]
TIP = alt.Tooltip("shown:N")
"""Makes a mark explain itself; the page finds the words by the mark's `cell`."""


def values(data: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a chart, with what is missing left out."""
    rows = data[COLUMNS].to_dict("records")
    return [{str(key): _plain(value) for key, value in row.items() if not _is_blank(value)} for row in rows]


def _is_blank(value: Any) -> bool:
    return bool(value is None or value == "" or value != value)


def _plain(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else int(value) if hasattr(value, "dtype") else value


def source() -> alt.Chart:
    """A chart whose data the specification gets at the end, once for all its layers."""
    return alt.Chart(alt.NamedData(ROWS))


def own(rows: Sequence[dict[str, Any]]) -> alt.Chart:
    """A chart with data of its own."""
    return alt.Chart(alt.InlineData(values=list(rows)))


def stacked(charts: Iterable[alt.Chart]) -> alt.LayerChart:
    """Charts one above the other."""
    made = alt.layer(*charts)
    assert isinstance(made, alt.LayerChart)
    return made


def faded() -> alt.OpacityValue:
    """Full where nothing or this method is picked, else nearly gone."""
    shown = {"test": f"{PICKED} == '' || {PICKED} == datum.shown", "value": 1}
    return alt.OpacityValue(condition=shown, value=0.1)


def points(chart: alt.Chart, figure: Figure, data: pd.DataFrame, x: alt.X | alt.XValue, y: alt.Y) -> alt.Chart:
    """A marker for each row, in the look of its method."""
    looks = by_series(figure, data)
    return chart.mark_point(filled=True, size=95, strokeWidth=0.8, stroke=css_variable(PAPER)).encode(
        x=x, y=y, color=looks.colour, shape=looks.shape, opacity=faded(), tooltip=TIP
    )


def text(
    chart: alt.Chart, *, dx: int, dy: int = 0, align: Literal["left", "right"] = "left", colour: str = INK
) -> alt.Chart:
    """Text beside a place; the caller says which and where."""
    return chart.mark_text(align=align, dx=dx, dy=dy, fontSize=12, color=css_variable(colour))


def statuses(chart: alt.Chart, y: alt.Y) -> alt.Chart:
    """What stands in the place of a number that is missing; its reason is told on hover."""
    written = chart.mark_text(align="left", x=4, fontSize=12, color=css_variable(MUTED))
    return written.encode(y=y, text=alt.Text("status:N"), tooltip=TIP)
