"""Drawing with matplotlib: a Figure's data as PNG, or as SVG that follows the page's colours. Decides looks, not content."""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from pyramidbench.figures import Axis, Figure
from pyramidbench.labels import text_size
from pyramidbench.painters import paint_dot_column, paint_lines, paint_tradeoff
from pyramidbench.palette import DARK, GRID, INK, MUTED, PAPER
from pyramidbench.units import integer, one_line, significant, tokens

WIDTH, PANEL, DOT_LINE = 8.0, 3.0, 0.235
LEFT, FOOT, PANEL_HEAD = 0.95, 0.62, 0.4
"""Inches. At 100 pixels an inch a figure is 800 pixels wide, and no text in it is smaller than 12 pixels."""
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans", "font.size": 10, "text.parse_math": False, "text.color": INK, "figure.dpi": 100,
    "axes.edgecolor": MUTED, "axes.labelcolor": INK, "axes.linewidth": 0.8, "axes.axisbelow": True,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": GRID, "grid.linewidth": 0.8,
    "xtick.color": MUTED, "ytick.color": MUTED, "xtick.labelcolor": INK, "ytick.labelcolor": INK,
    "xtick.labelsize": 9.5, "ytick.labelsize": 9.5, "svg.fonttype": "path", "svg.hashsalt": "pyramidbench",
    "lines.linewidth": 1.8, "lines.markersize": 6.5,
}  # fmt: skip


def save_png(figure: Figure, path: Path, *, dpi: int = 160) -> None:
    """Write a figure with its title as PNG, on white."""
    with mpl.rc_context(STYLE):
        _canvas(figure, heading=True).savefig(path, dpi=dpi, facecolor=PAPER, metadata={"Software": None})


def to_svg(figure: Figure) -> str:
    """A figure without its title as an `svg` element; its colours are CSS variables, so a page sets light and dark."""
    buffer = io.StringIO()
    with mpl.rc_context(STYLE):
        canvas = _canvas(figure, heading=False)
        canvas.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r' (width|height)="[\d.]+pt"', "", text, count=2)
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{figure.name}-", text)
    for light in DARK:
        text = text.replace(light, css_variable(light))
    return text.replace("<svg ", '<svg aria-hidden="true" ', 1)


def css_variable(colour: str) -> str:
    """The CSS reference that stands for a colour of the palette in SVG."""
    return f"var(--c{colour.removeprefix('#')})"


def _canvas(figure: Figure, *, heading: bool) -> Canvas:
    rows = list(dict.fromkeys(figure.data["row"])) if figure.kind == "dots" else [panel.name for panel in figure.panels]
    lines = [figure.data.loc[figure.data["row"] == row, "shown"].nunique() for row in rows]
    heights = [DOT_LINE * (count + 0.6) if figure.kind == "dots" else PANEL for count in lines]
    about = textwrap.wrap(figure.subtitle, 108) if heading else []
    notes = [line for note in figure.notes for line in textwrap.wrap(note, 112)] if heading else []
    top = 0.42 + 0.19 * len(about) if heading else 0.0
    top += 0.4 if figure.kind == "dots" else 0.0
    foot = FOOT + 0.19 * len(notes)
    canvas = Canvas(figsize=(WIDTH, top + sum(heights) + PANEL_HEAD * len(rows) + foot))
    if heading:
        _write(canvas, 0.12, 0.30, one_line(figure.title), size=13.5, weight="bold")
    for index, line in enumerate(about):
        _write(canvas, 0.12, 0.53 + 0.19 * index, line, size=9, color=MUTED)
    for index, line in enumerate(notes):
        _write(canvas, 0.12, canvas.get_figheight() - 0.12 - 0.19 * (len(notes) - 1 - index), line, size=9, color=MUTED)
    if figure.kind == "dots":
        _dots(canvas, figure, rows, heights, top)
    else:
        _stacked(canvas, figure, top)
    return canvas


def _write(
    canvas: Canvas, left: float, top: float, text: str, *, size: float, color: str = INK, weight: str = "normal"
) -> None:
    """Text at inches from the upper left corner (its base line)."""
    canvas.text(left / WIDTH, 1 - top / canvas.get_figheight(), text, fontsize=size, color=color, fontweight=weight)


def _axes(canvas: Canvas, left: float, top: float, width: float, height: float) -> Axes:
    """Axes at inches from the upper left corner."""
    total = canvas.get_figheight()
    return canvas.add_axes((left / WIDTH, 1 - (top + height) / total, width / WIDTH, height / total))


def _stacked(canvas: Canvas, figure: Figure, top: float) -> None:
    """Panels one under the other, on one x axis."""
    assert figure.x is not None
    right = 0.2
    if figure.kind == "lines":
        probe = _axes(canvas, 0, 0, 1, 1)
        right = 0.45 + max(text_size(probe, one_line(name), 9.5)[0] for name in figure.data["shown"]) / 72
        probe.remove()
    shared = len({panel.axis for panel in figure.panels}) == 1
    for index, panel in enumerate(figure.panels):
        data = figure.data[figure.data["panel"] == panel.name]
        start = top + index * (PANEL + PANEL_HEAD) + PANEL_HEAD
        axes = _axes(canvas, LEFT, start, WIDTH - LEFT - right, PANEL)
        _scale(axes, "y", panel.axis, figure.data if shared else data)
        _scale(axes, "x", figure.x, figure.data)
        title = panel.name if shared else panel.axis.label
        axes.set_title(title[:1].upper() + title[1:], loc="left", fontsize=10, fontweight="bold", pad=7)
        if shared:
            axes.set_ylabel(panel.axis.label)
            axes.yaxis.set_label_coords((0.2 - LEFT) / (WIDTH - LEFT - right), 0.5)
        last = index == len(figure.panels) - 1
        axes.tick_params(labelbottom=last)
        axes.set_xlabel(figure.x.label if last else "")
        paint = paint_tradeoff if figure.kind == "tradeoff" else paint_lines
        paint(axes, data, figure.series)


def _scale(axes: Axes, which: str, axis: Axis, data: pd.DataFrame) -> None:
    """Limits with room at the ends, ticks at round places (lengths and counts: where there is data), plain numbers."""
    columns = ["y", "low", "high"] if which == "y" else ["x"]
    values = data[columns].to_numpy(dtype=float)
    values = values[np.isfinite(values)]
    low, high = float(values.min()), float(values.max())
    if axis.ticks == "ratio":
        low, high = min(low, 0.8), max(high, 1.25)
    setting, spine = (axes.set_xlim, axes.xaxis) if which == "x" else (axes.set_ylim, axes.yaxis)
    if axis.log:
        (axes.set_xscale if which == "x" else axes.set_yscale)("log", base=2 if axis.ticks != "ms" else 10)
        room = (high / low) ** 0.09 if high > low else 1.4
        setting(low / room, high * room)
    else:
        room = 0.09 * (high - low) or 0.05
        setting(low - room, high + room)
    if axis.ticks in ("tokens", "count"):
        spine.set_major_locator(FixedLocator(sorted(set(data["x"].dropna()))))
    elif axis.log:
        wide = np.log10(high / low) > 1.3
        spine.set_major_locator(
            LogLocator(10, subs=(1, 3) if wide else (1, 2, 5)) if axis.ticks == "ms" else LogLocator(2)
        )
    spine.set_minor_locator(NullLocator())
    if axis.ticks != "share":
        spine.set_major_formatter(FuncFormatter(lambda value, _: WRITERS[axis.ticks](value)))


WRITERS: dict[str, Callable[[float], str]] = {
    "tokens": tokens,
    "count": integer,
    "ms": lambda value: significant(value, 1) if value < 1 else f"{value:g}",
    "ratio": lambda value: f"{value:.3g}×",
}


def _dots(canvas: Canvas, figure: Figure, rows: list[str], heights: list[float], top: float) -> None:
    """One column per measure, one block of lines per row, a value beside each dot."""
    probe = _axes(canvas, 0, 0, 1, 1)
    left = 0.35 + max(text_size(probe, one_line(name), 9.5)[0] for name in figure.data["shown"]) / 72
    probe.remove()
    width = (WIDTH - left - 0.1) / len(figure.panels)
    for row, height in zip(rows, heights):
        block = figure.data[figure.data["row"] == row]
        names = list(dict.fromkeys(block["shown"]))
        top += PANEL_HEAD
        _write(canvas, 0.12, top - 0.1, row[:1].upper() + row[1:], size=10, weight="bold")
        for column, panel in enumerate(figure.panels):
            axes = _axes(canvas, left + column * width, top, width - 0.18, height)
            data = block[block["panel"] == panel.name]
            paint_dot_column(axes, data, names, figure.series)
            axes.set_xlim(0, 1.3 * figure.data.loc[figure.data["panel"] == panel.name, "x"].max())
            axes.tick_params(left=False, labelleft=column == 0, labelbottom=row == rows[-1])
            if row == rows[0]:
                axes.annotate(
                    panel.axis.label,
                    (0, 1),
                    (0, 24),
                    xycoords="axes fraction",
                    textcoords="offset points",
                    fontsize=9.5,
                )
        top += height
