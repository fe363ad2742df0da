"""Drawing with matplotlib: a Figure's data as PNG and SVG, for a screen or for a paper. Decides looks, not content."""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure as Canvas
from numpy.typing import NDArray
from PIL import Image

from pyramidbench.reporting.columns import columns_height, draw_columns
from pyramidbench.reporting.figure import Figure
from pyramidbench.reporting.labels import text_size
from pyramidbench.reporting.layout import LEFT, PANEL_HEAD, WIDTH, axes_at, write
from pyramidbench.reporting.maps import draw_maps, maps_height
from pyramidbench.reporting.painters import is_crowded, paint_lines, paint_roofline, paint_tradeoff
from pyramidbench.reporting.palette import DARK, GRID, HEAT, INK, MUTED, PAPER
from pyramidbench.reporting.scales import scale
from pyramidbench.units import one_line

Style = Literal["screen", "paper"]
STYLES: tuple[Style, ...] = ("screen", "paper")
FOOT, PANEL = 0.62, 3.0
NAME = 13.5 / 72
"""Inches from one name right of a panel to the next."""
RC: dict[Any, Any] = {
    "font.family": "DejaVu Sans", "font.size": 10, "text.parse_math": False, "text.color": INK, "figure.dpi": 100,
    "axes.edgecolor": MUTED, "axes.labelcolor": INK, "axes.linewidth": 0.8, "axes.axisbelow": True,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": GRID, "grid.linewidth": 0.8,
    "xtick.color": MUTED, "ytick.color": MUTED, "xtick.labelcolor": INK, "ytick.labelcolor": INK,
    "xtick.labelsize": 9.5, "ytick.labelsize": 9.5, "figure.facecolor": PAPER, "svg.fonttype": "path",
    "svg.hashsalt": "pyramidbench", "lines.linewidth": 1.8, "lines.markersize": 6.5,
}  # fmt: skip


@dataclass(frozen=True)
class Medium:
    """What a figure is drawn for: its width in inches as printed, dots an inch, and whether its title stands above it."""

    width: float
    dpi: int
    heading: bool


MEDIA: dict[Style, Medium] = {"screen": Medium(WIDTH, 160, True), "paper": Medium(7.0, 400, False)}
"""A paper's figure is as wide as both columns of a page, and its title is the paper's caption."""


def save(figure: Figure, folder: Path, style: Style = "screen") -> list[Path]:
    """Write a figure as PNG (on white) and as SVG into a folder; returns the two paths."""
    medium = MEDIA[style]
    with mpl.rc_context(RC):
        canvas = draw(figure, heading=medium.heading)
        png, svg = folder / f"{figure.name}.png", folder / f"{figure.name}.svg"
        _save_png(canvas, png, medium)
        svg.write_text(_svg(canvas, figure, medium), encoding="utf-8")
    return [png, svg]


def _save_png(canvas: Canvas, path: Path, medium: Medium) -> None:
    """A palette of the figure's colours and their blends with white makes a file of a third of the size."""
    canvas.set_dpi(medium.dpi * medium.width / WIDTH)
    painted = FigureCanvasAgg(canvas)
    painted.draw()  # type: ignore[no-untyped-call]
    pixels = np.asarray(painted.renderer.buffer_rgba()).view("<u4")[..., 0]
    codes, found = pd.factorize(pixels.ravel())
    colours = np.stack([found & 255, found >> 8 & 255, found >> 16 & 255], axis=-1).astype(np.int32)
    nearest = ((colours[:, None] - _blends()) ** 2).sum(-1).argmin(-1).astype(np.uint8)
    image = Image.fromarray(nearest[codes].reshape(pixels.shape), mode="P")
    image.putpalette(_blends().ravel().tolist())
    image.save(path, compress_level=8, dpi=(medium.dpi, medium.dpi))
    canvas.set_dpi(RC["figure.dpi"])


@lru_cache
def _blends() -> NDArray[np.int32]:
    """The colours of figures, pure and in steps towards the paper, as the edges of lines and text need: [≤ 256, 3]."""
    paper = np.array(to_rgb(PAPER))
    steps = [(colour, 26 if colour == INK else 11) for colour in DARK] + [(colour, 4) for colour in HEAT]
    mixed = [np.array(to_rgb(colour)) * (1 - i / n) + paper * i / n for colour, n in steps for i in range(n)]
    return np.unique(np.rint(255 * np.array(mixed)).astype(np.int32), axis=0)


def _svg(canvas: Canvas, figure: Figure, medium: Medium) -> str:
    buffer = io.StringIO()
    canvas.savefig(
        buffer, format="svg", facecolor=PAPER, metadata={"Date": None, "Creator": None, "Title": one_line(figure.title)}
    )
    text = re.sub(r"<!--.*?-->", "", buffer.getvalue(), flags=re.DOTALL)
    text = re.sub(r"(?<=\d\.\d\d)\d+", "", text)
    height = canvas.get_figheight() * medium.width / WIDTH
    text = re.sub(r' width="[\d.]+pt"', f' width="{medium.width:g}in"', text, count=1)
    return re.sub(r' height="[\d.]+pt"', f' height="{height:.3f}in"', text, count=1)


def draw(figure: Figure, *, heading: bool) -> Canvas:
    """The figure on a canvas WIDTH inches wide, with its title, what it is about and its notes, or without all three."""
    titles = textwrap.wrap(one_line(figure.title), 72) if heading else []
    about = textwrap.wrap(one_line(figure.subtitle), 108) if heading else []
    notes = [line for note in figure.notes for line in textwrap.wrap(one_line(note), 112)] if heading else []
    titled = 0.30 + 0.25 * (len(titles) - 1)
    top = titled + 0.12 + 0.19 * len(about) if heading else 0.0
    canvas = Canvas(figsize=(WIDTH, top + _height(figure) + FOOT + 0.19 * len(notes)))
    FigureCanvasAgg(canvas)  # Without a renderer of its own, a figure makes one for every text that is measured.
    for index, line in enumerate(titles):
        write(canvas, 0.12, 0.30 + 0.25 * index, line, size=13.5, weight="bold")
    for index, line in enumerate(about):
        write(canvas, 0.12, titled + 0.23 + 0.19 * index, line, size=9, color=MUTED)
    for index, line in enumerate(notes):
        write(canvas, 0.12, canvas.get_figheight() - 0.12 - 0.19 * (len(notes) - 1 - index), line, size=9, color=MUTED)
    layout: dict[str, Callable[[Canvas, Figure, float], None]] = {
        "dots": draw_columns, "bars": draw_columns, "heat": draw_maps,
    }  # fmt: skip
    layout.get(figure.kind, _stacked)(canvas, figure, top)
    return canvas


def _height(figure: Figure) -> float:
    """Inches that the panels of a figure need below its heading."""
    if figure.kind == "heat":
        return maps_height(figure)
    if figure.kind in ("dots", "bars"):
        return columns_height(figure)
    return sum(_panel_height(figure, panel.name) + PANEL_HEAD for panel in figure.panels)


def _panel_height(figure: Figure, name: str) -> float:
    """Inches of a stacked panel: where names stand right of it, all of them have room."""
    names = figure.data.loc[figure.data["panel"] == name, "shown"].nunique() if _names_right(figure) else 0
    return max(PANEL, NAME * names + 0.2)


def _stacked(canvas: Canvas, figure: Figure, top: float) -> None:
    """Panels one under the other, on one x axis."""
    assert figure.x is not None
    right = _right_margin(canvas, figure)
    shared = len({panel.axis for panel in figure.panels}) == 1
    start = top
    for index, panel in enumerate(figure.panels):
        data = figure.data[figure.data["panel"] == panel.name]
        height = _panel_height(figure, panel.name)
        axes = axes_at(canvas, LEFT, start + PANEL_HEAD, WIDTH - LEFT - right, height)
        start += PANEL_HEAD + height
        guides = [guide for guide in figure.guides if guide.panel == panel.name]
        corners = pd.DataFrame([corner for guide in guides for corner in guide.corners], columns=["x", "y"])
        scale(axes, "y", panel.axis, pd.concat([figure.data if shared else data, corners]))
        scale(axes, "x", figure.x, pd.concat([figure.data, corners]))
        title = panel.name if figure.kind != "roofline" else ""
        axes.set_title(title[:1].upper() + title[1:], loc="left", fontsize=10, fontweight="bold", pad=7)
        if shared:
            axes.set_ylabel(panel.axis.label)
            axes.yaxis.set_label_coords((0.2 - LEFT) / (WIDTH - LEFT - right), 0.5)
        last = index == len(figure.panels) - 1
        axes.tick_params(labelbottom=last)
        axes.set_xlabel(figure.x.label if last else "")
        paint = {"tradeoff": paint_tradeoff, "roofline": paint_roofline}.get(figure.kind, paint_lines)
        paint(axes, data, figure.series, guides)


def _names_right(figure: Figure) -> bool:
    """Whether names stand right of the axes: those of lines, and of points where there are many."""
    panels = [data for _, data in figure.data.groupby("panel")]
    return figure.kind == "lines" or any(map(is_crowded, panels))


def _right_margin(canvas: Canvas, figure: Figure) -> float:
    """Inches right of the axes: the names of lines stand there."""
    if not _names_right(figure):
        return 0.2
    probe = axes_at(canvas, 0, 0, 1, 1)
    widest = max(text_size(probe, one_line(name), 9.5)[0] for name in figure.data["shown"].unique())
    probe.remove()
    return 0.45 + widest / 72
