"""Figures in columns, a line per method: dots with their numbers, and bars of stages."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as Canvas

from pyramidbench.reporting.figure import Figure
from pyramidbench.reporting.labels import text_size
from pyramidbench.reporting.layout import PANEL_HEAD, WIDTH, axes_at, write
from pyramidbench.reporting.painters import paint_dot_column
from pyramidbench.reporting.painters_areas import paint_bars, stage_key
from pyramidbench.units import one_line

LINE = 0.235
"""Inches from one method to the next."""


def columns_height(figure: Figure) -> float:
    """Inches that the columns need, with the row above them."""
    lines = figure.data.groupby("row", sort=False)["shown"].nunique()
    between = _scale_height(figure) * (len(lines) - 1)
    return _top(figure) + between + sum(LINE * (count + 0.6) + PANEL_HEAD for count in lines)


def _scale_height(figure: Figure) -> float:
    """Inches for the numbers of a scale between two blocks: blocks of bars have a scale each."""
    return 0.22 if figure.kind == "bars" else 0.0


def _top(figure: Figure) -> float:
    """Inches above the first block: for the key of the stages, or for headings of two lines."""
    if figure.kind == "bars":
        return 0.6 if figure.data["row"].any() else 0.4
    return 0.35 if any("\n" in panel.name for panel in figure.panels) else 0.05


def draw_columns(canvas: Canvas, figure: Figure, top: float) -> None:
    """One column per panel, one block of lines per row; the names stand left of the first column."""
    left = _names_width(canvas, figure)
    width = (WIDTH - left - 0.1) / len(figure.panels)
    if figure.kind == "bars":
        stage_key(
            axes_at(canvas, left, top + 0.1, WIDTH - left, 0.2), list(dict.fromkeys(filter(None, figure.data["part"])))
        )
    top += _top(figure)
    rows = list(dict.fromkeys(figure.data["row"]))
    for row in rows:
        block = figure.data[figure.data["row"] == row]
        names = list(dict.fromkeys(block["shown"]))
        top, height = top + PANEL_HEAD, LINE * (len(names) + 0.6)
        write(canvas, 0.12, top - 0.1, row[:1].upper() + row[1:], size=10, weight="bold")
        for column, panel in enumerate(figure.panels):
            axes = axes_at(canvas, left + column * width, top, width - 0.18, height)
            data = block[block["panel"] == panel.name]
            if figure.kind == "bars":
                paint_bars(axes, data, names)
            else:
                own = figure.data[figure.data["panel"] == panel.name]
                most = most_of(own)
                paint_dot_column(axes, data, names, figure.series, panel.axis.ticks, most)
            axes.tick_params(left=False, labelleft=column == 0, labelbottom=row == rows[-1] or figure.kind == "bars")
            if row == rows[0]:
                axes.annotate(panel.name, (0, 1), (0, 24 if row else 10), xycoords="axes fraction",
                              textcoords="offset points", fontsize=9.5)  # fmt: skip
            if row == rows[-1] and panel.axis.label != panel.name:
                axes.set_xlabel(panel.axis.label, fontsize=9)
        top += height + _scale_height(figure)


def most_of(data: pd.DataFrame) -> float:
    """The largest value of a panel, or 1 where it has none."""
    known = data[["x", "y"]].to_numpy(dtype=float).ravel()
    most = max([0.0, *known[np.isfinite(known)]])
    return most if most > 0 else 1.0


def _names_width(canvas: Canvas, figure: Figure) -> float:
    probe = axes_at(canvas, 0, 0, 1, 1)
    widest = max(text_size(probe, one_line(name), 9.5)[0] for name in figure.data["shown"].unique())
    probe.remove()
    return 0.35 + widest / 72
