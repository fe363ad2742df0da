"""Interactive charts on two axes of numbers: lines over a length or budget, the trade-off, the roofline."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import altair as alt
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from pyramidbench.reporting.chart_looks import SHAPES, by_series, css_variable, dashes, labels, ticks
from pyramidbench.reporting.chart_parts import TIP, faded, own, points, source, stacked, text, values
from pyramidbench.reporting.figure import END, Axis, Figure, Guide, Panel
from pyramidbench.reporting.painters import is_crowded
from pyramidbench.reporting.palette import MUTED, PAPER, SHADE
from pyramidbench.reporting.scales import Nines
from pyramidbench.units import one_line

HEIGHT = 300


def lines(figure: Figure, panel: Panel, data: pd.DataFrame) -> alt.LayerChart:
    """Lines with markers and intervals; constants across; a cross at the last number before a gap."""
    return stacked(_lines(figure, panel, data))


def tradeoff(figure: Figure, panel: Panel, data: pd.DataFrame) -> alt.LayerChart:
    """Points above a shaded region where dense attention is faster; a name beside each method, or where there are many beside
    those that nothing beats: the key above has them all."""
    even = own([{"y": 1.0}])
    below = even.mark_rect(color=css_variable(SHADE)).encode(y=alt.Y("y:Q"), y2=alt.Y2Value(HEIGHT))  # type: ignore[no-untyped-call]
    rule = even.mark_rule(color=css_variable(MUTED)).encode(y=alt.Y("y:Q"))
    named = data[data["frontier"]] if is_crowded(data) else data
    return stacked([below, rule, *_lines(figure, panel, data), *_names(figure, data, named)])


def roofline(figure: Figure, panel: Panel, data: pd.DataFrame) -> alt.LayerChart:
    """Points under the roofs, which are named."""
    written = []
    for guide in figure.guides:
        (left, low), (right, high) = guide.corners
        flat = low == high
        place = {"at": right if flat else math.sqrt(left * right), "y": math.sqrt(low * high), "name": guide.label}
        beside = text(
            own([place]), align="right" if flat else "left", dx=0 if flat else 8, dy=-8 if flat else 6, colour=MUTED
        )
        written.append(beside.encode(x=alt.X("at:Q"), y=alt.Y("y:Q"), text=alt.Text("name:N")))
    return stacked([*_lines(figure, panel, data), *written])


def _lines(figure: Figure, panel: Panel, data: pd.DataFrame) -> list[alt.Chart]:
    assert figure.x is not None
    guides = [guide for guide in figure.guides if guide.panel == panel.name]
    # Panels of shares have one axis, so that one stands above the other.
    known = figure.data if figure.x.ticks == "kept" else data
    widths = [*_numbers(known, ["x"]), *(x for guide in guides for x, _ in guide.corners)]
    x = alt.X("at:Q", scale=_scale(figure.x, widths), axis=_axis(figure.x, widths))
    heights = [*_numbers(data, ["y", "low", "high"]), *(y for guide in guides for _, y in guide.corners)]
    y = alt.Y("y:Q", scale=_scale(panel.axis, heights), axis=_axis(panel.axis, heights))
    rows, measured = source(), f"datum.part != '{END}' && isValid(datum.x)"
    colour = by_series(figure, data).colour
    layers = [
        *_guides(figure, guides, x, y),
        rows.transform_filter(measured).mark_line(strokeWidth=2).encode(
            x=x, y=y, color=colour, strokeDash=dashes(figure, data), opacity=faded(), detail=alt.Detail("shown:N")),
        rows.transform_filter(f"{measured} && isValid(datum.low)").mark_rule(strokeWidth=1.5).encode(
            x=x, y=alt.Y("low:Q", title=panel.axis.label), y2=alt.Y2("high:Q"), color=colour, opacity=faded()),
        points(rows.transform_filter(f"{measured} && isValid(datum.y)"), figure, data, x, y),
        rows.transform_filter(f"datum.part == '{END}'").mark_point(
            shape=SHAPES["X"], filled=True, size=260, strokeWidth=1, stroke=css_variable(PAPER)
        ).encode(x=x, y=y, color=colour, opacity=faded(), tooltip=TIP),
    ]  # fmt: skip
    if data["x"].isna().any():
        across = rows.transform_filter("!isValid(datum.x)")
        rule = across.mark_rule(strokeDash=[6, 4], strokeWidth=1.5)
        layers.append(rule.encode(y=y, color=colour, opacity=faded(), tooltip=TIP))
        layers.append(points(across, figure, data, alt.XValue("width"), y))  # type: ignore[no-untyped-call]
    return layers


def places(figure: Figure, xs: Iterable[float]) -> list[float]:
    """Where values stand on a figure's x axis: shares of attention by their nines, all others where they are."""
    if figure.x is None or figure.x.ticks != "kept":
        return list(xs)
    return [
        float(at) for at in Nines.of(_shares(_numbers(figure.data, ["x"]))).decades(np.asarray(list(xs), dtype=float))
    ]


def _shares(numbers: Sequence[float]) -> NDArray[np.float64]:
    return np.asarray(numbers, dtype=float)


def _numbers(data: pd.DataFrame, columns: list[str]) -> list[float]:
    return [float(value) for value in data[columns].to_numpy().ravel() if value == value]


def _axis(axis: Axis, numbers: Sequence[float]) -> alt.Axis:
    """The axis with its ticks where the static figures have them."""
    if axis.ticks == "kept":
        nines = Nines.of(_shares(numbers))
        at = [float(place) for place in nines.decades(np.array(nines.ticks(_shares(numbers))))]
        shown = f"format({1 + nines.least} - pow(10, -datum.value), '.3~f')"
        return alt.Axis(title=axis.label, values=at, labelExpr=shown)
    title, chosen = axis.label.replace("\n", " "), ticks(axis, numbers)
    if chosen is None:
        return alt.Axis(title=title, labelExpr=labels(axis), tickCount=6)
    return alt.Axis(title=title, labelExpr=labels(axis), values=chosen)


def _scale(axis: Axis, numbers: Sequence[float]) -> alt.Scale:
    if axis.ticks == "kept":
        return alt.Scale(zero=False, nice=False, domain=list(Nines.of(_shares(numbers)).ends(_shares(numbers))))
    low, high = min(numbers), max(numbers)
    if axis.ticks == "ratio":
        low, high = min(low, 0.8), max(high, 1.25)
    if axis.log:
        room = (high / low) ** 0.07 if high > low else 1.3
        return alt.Scale(type="log", domain=[low / room, high * room], nice=False)
    pad = 0.07 * (high - low) or 0.05
    return alt.Scale(zero=False, nice=False, domain=[low - pad, high + pad])


def _guides(figure: Figure, guides: list[Guide], x: alt.X, y: alt.Y) -> list[alt.Chart]:
    """Lines that are no series, in grey."""
    drawn = []
    for guide in guides:
        places_x = places(figure, [at for at, _ in guide.corners])
        heights = [height for _, height in guide.corners]
        corners = [{"at": at, "y": height, "order": i} for i, (at, height) in enumerate(zip(places_x, heights))]
        dash = [5, 3] if guide.dashed else [1, 0]
        line = own(corners).mark_line(color=css_variable(MUTED), strokeWidth=1.3, strokeDash=dash)
        drawn.append(line.encode(x=x, y=y, order=alt.Order("order:Q")))
    return drawn


def _names(figure: Figure, data: pd.DataFrame, named: pd.DataFrame) -> list[alt.Chart]:
    """A name for each method of `named`, beside its middle point: right of it, or left where it would leave the picture."""
    middle = pd.DataFrame([line.iloc[len(line) // 2] for _, line in named.groupby("shown", sort=False)])
    middle = middle.assign(at=places(figure, middle["x"]))
    all_places = places(figure, data["x"])
    at_edge = middle["at"] > max(all_places) - 0.2 * (max(all_places) - min(all_places))
    drawn = []
    for rows, right in ((middle[~at_edge], True), (middle[at_edge], False)):
        texts = values(rows.assign(shown=[one_line(name) for name in rows["shown"]]))
        beside = text(
            own([row | {"at": at} for row, at in zip(texts, rows["at"])]), align="left" if right else "right",
            dx=8 if right else -8, dy=-8,
        )  # fmt: skip
        drawn.append(beside.encode(x=alt.X("at:Q"), y=alt.Y("y:Q"), text=alt.Text("shown:N"), opacity=faded()))
    return drawn
