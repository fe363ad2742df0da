"""Looks of the interactive charts: colours as CSS variables, markers, ticks and the chart's configuration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
import pandas as pd

from pyramidbench.reporting.figure import Axis, Figure
from pyramidbench.reporting.palette import GRID, INK, MUTED

SHAPES = {
    "o": "circle", "s": "square", "D": "diamond", "^": "triangle-up", "v": "triangle-down", "P": "cross",
    "<": "triangle-left", ">": "triangle-right",
    "X": "M-.9-.5L-.5-.9 0-.4.5-.9.9-.5.4 0 .9.5.5.9 0 .4-.5.9-.9.5-.4 0Z",
    "p": "M0-1 .95-.31 .59.81-.59.81-.95-.31Z", "h": "M0-1 .87-.5 .87.5 0 1-.87.5-.87-.5Z",
    "8": "M-.38-.92H.38L.92-.38V.38L.38.92H-.38L-.92.38V-.38Z",
    "*": "M0-1 .22-.31H.95L.36.12.59.81 0 .38-.59.81-.36.12-.95-.31H-.22Z", "d": "M0-1 .55 0 0 1-.55 0Z",
    "x": "M-.85-.6L-.6-.85 0-.25.6-.85.85-.6.25 0 .85.6.6.85 0 .25-.6.85-.85.6-.25 0Z",
    "+": "M-.18-.95H.18V-.18H.95V.18H.18V.95H-.18V.18H-.95V-.18H-.18Z", "1": "M0 .9L-.9-.6-.6-.8 0 0 .6-.8 .9-.6Z",
}  # fmt: skip
"""A marker of matplotlib's as Vega's symbol: a name, or a path in a square from -1 to 1."""
DASHES = {"-": [1, 0], "--": [6, 4], ":": [2, 3]}


@dataclass(frozen=True)
class Looks:
    """Colour and marker of each method, as encodings."""

    colour: alt.Color
    shape: alt.Shape


def css_variable(colour: str) -> str:
    """The CSS reference that stands for a colour of the palette: a page sets it for light and for dark."""
    return f"var(--c{colour.removeprefix('#')})"


def by_series(figure: Figure, data: pd.DataFrame) -> Looks:
    """Encodings of the methods in some rows."""
    looks = _looks(figure, data)
    domain = list(looks)
    return Looks(
        alt.Color("shown:N", scale=alt.Scale(domain=domain, range=[css_variable(looks[name].colour) for name in domain]),
                  legend=None),
        alt.Shape("shown:N", scale=alt.Scale(domain=domain, range=[SHAPES[looks[name].marker] for name in domain]),
                  legend=None),
    )  # fmt: skip


def dashes(figure: Figure, data: pd.DataFrame) -> alt.StrokeDash:
    looks = _looks(figure, data)
    ranges = [DASHES[look.line] for look in looks.values()]
    return alt.StrokeDash("shown:N", scale=alt.Scale(domain=list(looks), range=ranges), legend=None)


def _looks(figure: Figure, data: pd.DataFrame) -> dict[str, Any]:
    return {shown: figure.series[series] for shown, series in zip(data["shown"], data["series"])}


def ticks(axis: Axis, values: Sequence[float]) -> list[float] | None:
    """Where an axis has its ticks: lengths and counts where there is data, logarithms at round places."""
    known = sorted({value for value in values if math.isfinite(value)})
    if axis.ticks in ("tokens", "count"):
        return known
    if not axis.log:
        return None
    low, high = known[0] / 1.3, known[-1] * 1.3
    if axis.ticks == "ratio":
        return [2.0**power for power in range(-6, 12) if min(low, 0.5) <= 2.0**power <= high]
    steps = (1, 3) if high / low > 20 else (1, 2, 5)
    return [step * 10.0**power for power in range(-6, 9) for step in steps if low <= step * 10.0**power <= high]


def labels(axis: Axis) -> str:
    """How Vega writes a tick's number: as the static figures do."""
    if axis.ticks == "tokens":
        return (
            "datum.value >= 1048576 && datum.value % 1048576 == 0 ? datum.value / 1048576 + 'm' : "
            "datum.value >= 1024 && datum.value % 1024 == 0 ? datum.value / 1024 + 'k' : datum.value"
        )
    if axis.ticks == "ratio":
        return "(datum.value < 1 ? '1/' + format(1 / datum.value, '.3~g') : format(datum.value, '.3~g')) + '×'"
    return "format(datum.value, '~g')"


def config() -> dict[str, Any]:
    """Vega-Lite's configuration: no frame, quiet grid, the page's own font and colours."""
    font = 'system-ui, "Segoe UI", Helvetica, Arial, sans-serif'
    return {
        "font": font, "background": "transparent", "aria": False,
        "view": {"stroke": None}, "mark": {"aria": False},
        "axis": {
            "aria": False, "gridColor": css_variable(GRID), "domainColor": css_variable(MUTED),
            "tickColor": css_variable(MUTED), "labelColor": css_variable(INK), "titleColor": css_variable(INK),
            "labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal", "titlePadding": 9,
            "labelOverlap": "greedy",
        },
    }  # fmt: skip
