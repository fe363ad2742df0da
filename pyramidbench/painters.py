"""What is drawn inside a pair of axes: lines over a length or budget, points of a trade-off, dots in a column."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter

from pyramidbench.labels import Label, Point, along, place, spread, to_points
from pyramidbench.palette import INK, MUTED, PAPER, SHADE, Series
from pyramidbench.units import one_line, tokens


def paint_lines(axes: Axes, data: pd.DataFrame, series: dict[str, Series]) -> None:
    """A line per series with its intervals; a name at each end, and a cross where a method gave no more numbers."""
    ends: list[tuple[Point, Series, str]] = []
    stopped: list[Label] = []
    lines = list(data.groupby("shown", sort=False))
    for shown, line in lines:
        look = series[line["series"].iloc[0]]
        if line["x"].isna().all():
            axes.axhline(line["y"].iloc[0], color=look.colour, lw=1.3, ls="--", zorder=2)
            ends.append(((axes.get_xlim()[1], line["y"].iloc[0]), look, str(shown)))
            continue
        _line(axes, line, look)
        last = line[line["y"].notna()].iloc[-1]
        after = line[line["x"] > last["x"]]
        if after.empty:
            ends.append(((last["x"], last["y"]), look, str(shown)))
            continue
        axes.plot(last["x"], last["y"], "X", color=look.colour, ms=10, mec=PAPER, mew=0.8, zorder=5)
        text = f"{one_line(shown)}: {after['status'].iloc[0]} at {tokens(after['x'].iloc[0])}"
        stopped.append(Label(text, (last["x"], last["y"]), INK))
    stopped.sort(key=lambda label: -label.at[1])
    place(axes, stopped, [point for _, line in lines for point in along(axes, line["x"], line["y"])])
    _names_at_right(axes, ends)


def _line(axes: Axes, line: pd.DataFrame, look: Series) -> None:
    front = 2 if look.muted else 3
    axes.plot(line["x"], line["y"], color=look.colour, ls=look.line, zorder=front, **_marker(look))
    known = line.dropna(subset=["low", "high"])
    if len(known):
        axes.vlines(known["x"], known["low"], known["high"], color=look.colour, lw=1.2, zorder=front)


def _marker(look: Series) -> dict[str, Any]:
    """Filled markers get a thin edge that keeps neighbours apart; stroked ones have their own colour."""
    stroked = look.marker in "x+1"
    return {"marker": look.marker, "mec": look.colour if stroked else PAPER, "mew": 1.4 if stroked else 0.4}


def _names_at_right(axes: Axes, ends: list[tuple[Point, Series, str]]) -> None:
    """A marker and a name for each line end, right of the axes, with a thin line to the end."""
    frame = axes.get_window_extent().get_points() * 0.72
    low, high, left = frame[0, 1], frame[1, 1], frame[1, 0] + 14
    heights = spread([to_points(axes, end)[1] for end, _, _ in ends], 13.5, low, high)
    for (end, look, shown), height in zip(ends, heights):
        axes.annotate(
            "", end, xytext=(left, height), textcoords="figure points", annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": look.colour, "lw": 0.7, "shrinkA": 0, "shrinkB": 3},
        )  # fmt: skip
        canvas = axes.get_figure(root=True)
        assert canvas is not None
        at = canvas.transFigure.inverted().transform((left / 0.72 + 4, height / 0.72))
        canvas.add_artist(Line2D([at[0]], [at[1]], color=look.colour, **_marker(look)))
        colour = MUTED if look.muted else INK
        axes.annotate(
            one_line(shown),
            (left + 8, height),
            xycoords="figure points",
            va="center_baseline",
            fontsize=9.5,
            color=colour,
        )


def paint_tradeoff(axes: Axes, data: pd.DataFrame, series: dict[str, Series]) -> None:
    """Points to the upper right are better; the frontier as a step line; the losing region shaded."""
    axes.axhspan(axes.get_ylim()[0], 1, color=SHADE, zorder=0, lw=0)
    axes.axhline(1, color=MUTED, lw=1, zorder=1)
    best = data[data["frontier"]].sort_values("x")
    corners = np.repeat(best["x"].to_numpy(), 2)[:-1], np.repeat(best["y"].to_numpy(), 2)[1:]
    axes.plot(*corners, color=MUTED, lw=1.1, ls=(0, (4, 2)), zorder=1)
    names: list[Label] = []
    notes: list[Label] = []
    obstacles = [*along(axes, *corners), *along(axes, axes.get_xlim(), (1, 1))]
    for shown, line in data.groupby("shown", sort=False):
        look = series[line["series"].iloc[0]]
        _line(axes, line, look)
        obstacles += along(axes, line["x"], line["y"])
        points = list(zip(line["x"], line["y"]))
        names.append(Label(one_line(shown), points[len(points) // 2], MUTED if look.muted else INK))
        notes += [Label(note, point, MUTED, 8.5) for note, point in zip(line["note"], points) if note]
    axes.text(
        0.992, 0.02, "slower than dense", transform=axes.transAxes, color=MUTED, fontsize=9.5, ha="right", va="bottom"
    )
    place(axes, names + notes, obstacles)


def paint_dot_column(axes: Axes, data: pd.DataFrame, names: list[str], series: dict[str, Series]) -> None:
    axes.set_ylim(len(names) - 0.4, -0.7)
    axes.yaxis.set_major_locator(FixedLocator(range(len(names))))
    axes.set_yticklabels([one_line(name) for name in names])
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    axes.grid(visible=False, axis="x")
    for _, dot in data.iterrows():
        look, y = series[dot["series"]], names.index(dot["shown"])
        axes.plot(dot["x"], y, color=look.colour, ms=7.5, zorder=3, **_marker(look))
        colour = MUTED if look.muted else INK
        axes.annotate(
            f"{dot['x']:.3f}", (dot["x"], y), (7, 0), textcoords="offset points", va="center_baseline",
            fontsize=9, color=colour, zorder=4, bbox={"fc": PAPER, "ec": "none", "pad": 0.8},
        )  # fmt: skip
