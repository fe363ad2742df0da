"""What is drawn as areas: stages stacked into bars, and maps of recall by layer and head."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter

from pyramidbench.reporting.labels import text_size
from pyramidbench.reporting.painters import with_room
from pyramidbench.reporting.palette import HEAT, INK, MUTED, OTHER_STAGE, PAPER, STAGES
from pyramidbench.units import integer, one_line, significant

BAR = 0.68
MOST_NUMBERS = 10
"""Heads or layers up to which a map's cells carry their numbers."""


def paint_bars(axes: Axes, data: pd.DataFrame, names: list[str]) -> None:
    """A bar per name: its stages one after another, each with its name where there is room, and a tick for the whole call."""
    axes.set_ylim(len(names) - 0.4, -0.7)
    axes.yaxis.set_major_locator(FixedLocator(range(len(names))))
    axes.set_yticklabels([one_line(name) for name in names])
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False, axis="y")
    longest = max([1e-9, *data.groupby("shown")["x"].sum(), *data["y"].dropna()])
    end = longest * with_room(axes, [significant(whole) for whole in data["y"].dropna()], 8)
    axes.set_xlim(0, end)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.locator_params(axis="x", nbins=4)
    width = axes.get_window_extent().width * 72 / 100
    for shown, bar in data.groupby("shown", sort=False):
        place, start = names.index(str(shown)), 0.0
        if bar["y"].isna().all():
            axes.annotate(bar["status"].iloc[0], (0, place), (4, 0), textcoords="offset points", fontsize=9,
                          va="center_baseline", color=MUTED)  # fmt: skip
            continue
        for stage in bar.to_dict("records"):
            colour, ink = STAGES.get(stage["part"], OTHER_STAGE)
            axes.barh(place, stage["x"], BAR, left=start, color=colour, ec=PAPER, lw=0.6, zorder=2)
            name = text_size(axes, stage["part"], 8.5)[0] + 4
            crossed = start < stage["y"] < start + name * end / width
            if width * stage["x"] / end > name and not crossed:
                axes.annotate(stage["part"], (start, place), (3, 0), textcoords="offset points", color=ink, fontsize=8.5,
                              va="center_baseline", zorder=3)  # fmt: skip
            start += stage["x"]
        whole = float(bar["y"].iloc[0])
        axes.plot([whole] * 2, [place - 0.46, place + 0.46], color=INK, lw=1.4, zorder=4, solid_capstyle="butt")
        axes.annotate(significant(whole), (max(start, whole), place), (5, 0), textcoords="offset points", fontsize=9,
                      va="center_baseline", color=INK)  # fmt: skip


def stage_key(axes: Axes, stages: list[str]) -> None:
    """The stages' colours, in a row of their own."""
    axes.set_axis_off()
    axes.set_xlim(0, axes.get_window_extent().width * 72 / 100)
    axes.set_ylim(0, 1)
    left = 0.0
    for stage in stages:
        axes.add_patch(Rectangle((left, 0.2), 11, 0.6, fc=STAGES.get(stage, OTHER_STAGE)[0], lw=0))
        axes.text(left + 15, 0.5, stage, fontsize=9, va="center", color=INK)
        left += 15 + text_size(axes, stage, 9)[0] + 16


def paint_heat(axes: Axes, data: pd.DataFrame, low: float, high: float) -> None:
    """A map, layers downwards and heads to the right, with numbers where they fit."""
    heads, layers = sorted(data["x"].unique()), sorted(data["y"].unique())
    numbers = max(len(heads), len(layers)) <= MOST_NUMBERS
    for cell in data.dropna(subset=["value"]).to_dict("records"):
        step = heat_step(cell["value"], low, high)
        at = heads.index(cell["x"]) - 0.5, layers.index(cell["y"]) - 0.5
        axes.add_patch(Rectangle(at, 1, 1, fc=HEAT[step], ec=PAPER, lw=1.0 if numbers else 0.2))
        if numbers:
            axes.text(at[0] + 0.5, at[1] + 0.5, f"{cell['value']:.2f}".removeprefix("0"), ha="center", va="center_baseline",
                      fontsize=8.5, color=PAPER if step < 5 else INK)  # fmt: skip
    axes.set_xlim(-0.5, len(heads) - 0.5)
    axes.set_ylim(len(layers) - 0.5, -0.5)
    axes.grid(visible=False)
    for spine, values in ((axes.xaxis, heads), (axes.yaxis, layers)):
        every = max(1, -(-len(values) // 10))
        spine.set_major_locator(FixedLocator(range(0, len(values), every)))
        spine.set_major_formatter(FuncFormatter(lambda i, _, values=values: integer(values[int(i)])))
    for side in axes.spines.values():
        side.set_visible(False)
    axes.tick_params(length=0)


def heat_step(value: float, low: float, high: float) -> int:
    """Which of HEAT's steps a value falls into."""
    return min(len(HEAT) - 1, max(0, int(len(HEAT) * (value - low) / (high - low))))


def heat_range(values: pd.Series) -> tuple[float, float]:
    """Round ends of the scale that all maps of a figure share."""
    low = float(np.floor(10 * values.min()) / 10)
    return (low if low < 1 else 0.9), 1.0


def heat_key(axes: Axes, low: float, high: float) -> None:
    """The scale, in a row of its own."""
    axes.set_axis_off()
    axes.set_xlim(0, axes.get_window_extent().width * 72 / 100)
    axes.set_ylim(0, 1)
    axes.text(0, 0.5, f"{low:.1f}", fontsize=9, va="center", color=INK)
    for step, colour in enumerate(HEAT):
        axes.add_patch(Rectangle((20 + 14 * step, 0.2), 14, 0.6, fc=colour, lw=0))
    axes.text(24 + 14 * len(HEAT), 0.5, f"{high:.1f}  recall", fontsize=9, va="center", color=INK)
