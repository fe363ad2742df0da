"""Heat maps side by side: one per method, layers by heads, on one scale."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure as Canvas

from pyramidbench.reporting.figure import Figure
from pyramidbench.reporting.layout import WIDTH, axes_at
from pyramidbench.reporting.painters_areas import heat_key, heat_range, paint_heat
from pyramidbench.units import one_line

IN_A_ROW, CELL, HEAD, GAP, LEFT, KEY = 3, 0.3, 0.34, 0.4, 0.62, 0.4


def maps_height(figure: Figure) -> float:
    """Inches that the maps and their scale need."""
    return KEY + -(-len(figure.panels) // IN_A_ROW) * (_map_height(figure.data) + HEAD + GAP) - GAP


def _map_height(data: pd.DataFrame) -> float:
    return min(3.0, max(0.5, CELL * data["y"].nunique()))


def draw_maps(canvas: Canvas, figure: Figure, top: float) -> None:
    """The maps in rows of three below their scale; layers are named at the left, heads below."""
    low, high = heat_range(figure.data["value"])
    heat_key(axes_at(canvas, LEFT, top + 0.12, WIDTH - LEFT, 0.2), low, high)
    height, width = _map_height(figure.data), (WIDTH - LEFT - 0.15) / IN_A_ROW
    for index, panel in enumerate(figure.panels):
        row, column = divmod(index, IN_A_ROW)
        start = top + KEY + row * (height + HEAD + GAP) + HEAD
        axes = axes_at(canvas, LEFT + column * width, start, width - 0.3, height)
        data = figure.data[figure.data["panel"] == panel.name]
        paint_heat(axes, data, low, high)
        axes.set_title(one_line(panel.name), loc="left", fontsize=9.5, fontweight="bold", pad=5)
        if column == 0:
            axes.set_ylabel("layer", fontsize=9)
        if index + IN_A_ROW >= len(figure.panels):
            axes.set_xlabel("head", fontsize=9)
