"""Sheet: a page of small panels in the look of all reports: title, what it is about, names of methods, then a grid."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D

from pyramidbench.reporting.draw import RC
from pyramidbench.reporting.layout import WIDTH, axes_at, write
from pyramidbench.reporting.palette import BOUND, INK, MUTED, PAPER, Series, series_of
from pyramidbench.units import one_line

LOOK = {**RC, "xtick.labelsize": 8.5, "ytick.labelsize": 8.5, "axes.labelsize": 9, "lines.linewidth": 1.5}
"""The look of all reports, with smaller words: panels are small here."""
DPI = 160
MARKER_SIZE = 4.5
LEFT, FOOT = 0.68, 0.52
NAMES_IN_A_ROW, NAME_HEIGHT = 5, 0.2


@dataclass(frozen=True)
class Grid:
    """Panels in rows and columns. height: inches of a panel; gaps in inches; names: the methods shown, for the key on top."""

    rows: int
    columns: int
    height: float
    names: tuple[Series, ...] = ()
    column_gap: float = 0.16
    row_gap: float = 0.42
    """Above each row: its panels' titles stand there."""
    right: float = 0.14


def sheet(title: str, about: str, grid: Grid) -> tuple[Canvas, list[Axes]]:
    """A canvas with its heading and key, and the axes of its panels, row by row."""
    lines = textwrap.wrap(one_line(about), 108)
    key_rows = -(-len(grid.names) // NAMES_IN_A_ROW)
    top = 0.42 + 0.19 * len(lines) + NAME_HEIGHT * key_rows + (0.12 if key_rows else 0.0)
    height = top + grid.rows * (grid.row_gap + grid.height) + FOOT
    canvas = Canvas(figsize=(WIDTH, height))
    FigureCanvasAgg(canvas)
    write(canvas, 0.12, 0.30, title, size=13.5, weight="bold")
    for index, line in enumerate(lines):
        write(canvas, 0.12, 0.53 + 0.19 * index, line, size=9, color=MUTED)
    _key(canvas, grid.names, 0.62 + 0.19 * len(lines))
    width = (WIDTH - LEFT - grid.right - grid.column_gap * (grid.columns - 1)) / grid.columns
    found = []
    for row in range(grid.rows):
        start = top + row * (grid.row_gap + grid.height) + grid.row_gap - 0.06
        for column in range(grid.columns):
            found.append(axes_at(canvas, LEFT + column * (width + grid.column_gap), start, width, grid.height))
    return canvas, found


def _key(canvas: Canvas, names: Sequence[Series], top: float) -> None:
    """A line with its marker and a name for each method, five in a row."""
    step = (WIDTH - 0.3) / NAMES_IN_A_ROW
    for index, look in enumerate(names):
        row, column = divmod(index, NAMES_IN_A_ROW)
        left, down = 0.15 + column * step, top + row * NAME_HEIGHT
        y = 1 - down / canvas.get_figheight()
        at = [(left + part) / WIDTH for part in (0, 0.15, 0.3)]
        canvas.add_artist(Line2D([at[0], at[2]], [y, y], color=look.colour, ls=look.line, lw=1.5))
        if look.line != "--":
            canvas.add_artist(Line2D([at[1]], [y], color=look.colour, **marker(look)))
        colour = MUTED if look.muted else INK
        canvas.text((left + 0.38) / WIDTH, y, one_line(look.name), fontsize=9, color=colour, va="center_baseline")


def head(axes: Axes, text: str, name: str = "") -> None:
    """A panel's title, with a name in bold above it: that of a row, at its first panel."""
    axes.set_title(text, loc="left", fontsize=9, pad=4)
    if name:
        axes.annotate(
            one_line(name), (0, 1), (0, 16), xycoords="axes fraction", textcoords="offset points", fontsize=9,
            fontweight="bold",
        )  # fmt: skip


def guess_line(axes: Axes, value: float) -> None:
    """A dotted line where a guess lies."""
    axes.axhline(value, color=BOUND, ls=":", lw=1)
    axes.annotate(
        "guess", (0.99, value), (0, -2), textcoords="offset points", xycoords=axes.get_yaxis_transform(), fontsize=7.5,
        color=MUTED, ha="right", va="top",
    )  # fmt: skip


def marker(look: Series) -> dict[str, Any]:
    """Marker settings of a method's line."""
    stroked = look.marker in "x+1"
    edge = look.colour if stroked else PAPER
    return {"marker": look.marker, "ms": MARKER_SIZE, "mec": edge, "mew": 1.2 if stroked else 0.3}


def looks(rows: pd.DataFrame) -> dict[str, Series]:
    """The look of every method of some rows, the dense one first and dashed."""
    found = series_of(rows.assign(label=rows["method"]))
    return {name: Series(name, INK, "o", "--") if name == "dense" else look for name, look in found.items()}


def shown(rows: pd.DataFrame, series: dict[str, Series]) -> tuple[Series, ...]:
    """The looks of the methods that rows have, in their order."""
    return tuple(series[name] for name in rows["method"].unique())


def save(canvas: Canvas, folder: Path, name: str) -> None:
    """Write a canvas as PNG."""
    canvas.savefig(folder / f"{name}.png", dpi=DPI, facecolor=PAPER, metadata={"Software": None})


def same_y(panels: Iterable[Axes], columns: int) -> None:
    """Give the panels one range, with its numbers at the first of each row."""
    panels = list(panels)
    limits = [axes.get_ylim() for axes in panels if axes.has_data()]
    for number, axes in enumerate(panels):
        if limits:
            axes.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
        if number % columns:
            axes.tick_params(labelleft=False, left=False)
