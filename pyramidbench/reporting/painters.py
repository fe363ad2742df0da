"""What is drawn inside a pair of axes: lines, points of a trade-off or under a roof, dots in a column."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter

from pyramidbench.reporting.figure import END, Guide, Ticks
from pyramidbench.reporting.labels import Label, Point, along, place, spread, text_size, to_points
from pyramidbench.reporting.palette import INK, MUTED, PAPER, SHADE, Series
from pyramidbench.units import one_line, significant

Guides = Sequence[Guide]
Looks = dict[str, Series]
CROWD = 9
"""Up to so many methods have their names beside their points; more have them right of the axes, and no word at a point."""


def paint_lines(axes: Axes, data: pd.DataFrame, series: Looks, guides: Guides) -> None:  # noqa: ARG001 - painters agree
    """A line per series with its intervals; a name at each end: right of the axes, or beside the point where a line ends before
    others do; and a cross where a method gave no more numbers."""
    ends: list[tuple[Point, Series, str]] = []
    early: list[Label] = []
    longest = data.loc[data["y"].notna(), "x"].max()
    lines = [(shown, line[line["part"] != END], line[line["part"] == END]) for shown, line in _by_name(data)]
    for shown, line, stops in lines:
        look = series[line["series"].iloc[0]]
        if line["x"].isna().all():
            axes.axhline(line["y"].iloc[0], color=look.colour, lw=1.3, ls="--", zorder=2)
            ends.append(((axes.get_xlim()[1], line["y"].iloc[0]), look, shown))
            continue
        _line(axes, line, look)
        axes.plot(stops["x"], stops["y"], "X", color=look.colour, ms=10, mec=PAPER, mew=0.8, zorder=5)
        last = line[line["y"].notna()].iloc[-1]
        named = {(x, y): f"{one_line(shown)}: {note}" for x, y, note in zip(stops["x"], stops["y"], stops["note"])}
        early += [Label(text, at, INK) for at, text in named.items()]
        at = (last["x"], last["y"])
        if at not in named and last["x"] < longest:
            early.append(Label(one_line(shown), at, MUTED if look.muted else INK))
        elif at not in named:
            ends.append((at, look, shown))
    early.sort(key=lambda label: -label.at[1])
    place(axes, early, [point for _, line, _ in lines for point in along(axes, line["x"], line["y"])])
    _names_at_right(axes, ends)


def _by_name(data: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    return [(str(shown), line) for shown, line in data.groupby("shown", sort=False)]


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


def _names_at_right(axes: Axes, ends: list[tuple[Point, Series, str]], *, leaders: bool = True) -> None:
    """A marker and a name for each line end, right of the axes at about its height, and a thin line from one to the other."""
    frame = axes.get_window_extent().get_points() * 0.72
    low, high, left = frame[0, 1], frame[1, 1], frame[1, 0] + 14
    heights = spread([to_points(axes, end)[1] for end, _, _ in ends], 13.5, low, high)
    for (end, look, shown), height in zip(ends, heights):
        if leaders:
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


def paint_tradeoff(axes: Axes, data: pd.DataFrame, series: Looks, guides: Guides) -> None:
    """Points to the upper right are better; the frontier as a step line; the losing region shaded."""
    axes.axhspan(axes.get_ylim()[0], 1, color=SHADE, zorder=0, lw=0)
    axes.axhline(1, color=MUTED, lw=1, zorder=1)
    axes.text(0.008, 0.02, "slower than dense", transform=axes.transAxes, color=MUTED, fontsize=9.5, va="bottom")
    obstacles = [*_guides(axes, guides), *along(axes, axes.get_xlim(), (1, 1))]
    if not is_crowded(data):
        _named_points(axes, data, series, obstacles)
        return
    _crowd(axes, data, series)
    best = data[data["frontier"]].drop_duplicates("shown")
    named = [Label(one_line(row["shown"]), (row["x"], row["y"]), INK) for row in best.to_dict("records")]
    place(axes, named, [*obstacles, *zip(data["x"], data["y"])])


def _crowd(axes: Axes, data: pd.DataFrame, series: Looks) -> None:
    """Points of many methods, whose names and markers stand right of the axes by the height of the highest one: a thin line to
    each would hide the points."""
    ends = []
    for shown, line in _by_name(data):
        look = series[line["series"].iloc[0]]
        _line(axes, line, look)
        ends.append(((line["x"].iloc[-1], line["y"].max()), look, shown))
    _names_at_right(axes, ends, leaders=False)


def is_crowded(data: pd.DataFrame) -> bool:
    """Whether a panel's points are of too many methods for names beside them."""
    return bool(data["shown"].nunique() > CROWD)


def paint_roofline(axes: Axes, data: pd.DataFrame, series: Looks, guides: Guides) -> None:
    """Points under the roofs of copying and of arithmetic; a line follows a method from short to long."""
    obstacles = _guides(axes, guides)
    points = [to_points(axes, point) for point in zip(data["x"], data["y"])]
    for guide in guides:
        obstacles += _along_roof(axes, guide, points)
    if is_crowded(data):
        _crowd(axes, data, series)
    else:
        _named_points(axes, data, series, obstacles)


def _along_roof(axes: Axes, guide: Guide, points: list[Point]) -> list[Point]:
    """The name of a roof, written along it: at the end of a flat one, on a slope where the fewest points are; returns the
    places that it takes."""
    (x0, y0), (x1, y1) = (to_points(axes, corner) for corner in guide.corners)
    length, width = math.dist((x0, y0), (x1, y1)), text_size(axes, guide.label, 9)[0]
    tries = [1 - width / length] if y0 == y1 else [0.02, 0.3, 0.55]
    middles = [share + width / length / 2 for share in tries]
    near = [
        sum(math.dist(point, (x0 + at * (x1 - x0), y0 + at * (y1 - y0))) < width / 2 + 8 for point in points)
        for at in middles
    ]
    start = tries[near.index(min(near))]
    place_at = (x0 + start * (x1 - x0), y0 + start * (y1 - y0))
    axes.annotate(
        guide.label, place_at, (0, 3), xycoords="figure points", textcoords="offset points", ha="left", va="bottom",
        rotation=math.degrees(math.atan2(y1 - y0, x1 - x0)), rotation_mode="anchor", color=MUTED, fontsize=9,
    )  # fmt: skip
    back = axes.transData.inverted()
    dpi = axes.get_figure(root=True).dpi  # type: ignore[union-attr]  # drawn axes have a figure
    shares = [start + part * width / length for part in (0.0, 0.25, 0.5, 0.75, 1.0)]
    return [
        tuple(back.transform(((x0 + at * (x1 - x0)) * dpi / 72, (y0 + 8 + at * (y1 - y0)) * dpi / 72))) for at in shares
    ]


def _guides(axes: Axes, guides: Guides) -> list[Point]:
    """Draw the guides; returns points along them, which labels keep off."""
    taken: list[Point] = []
    for guide in guides:
        xs, ys = zip(*guide.corners) if guide.corners else ((), ())
        axes.plot(xs, ys, color=MUTED, lw=1.1, ls=(0, (4, 2)) if guide.dashed else "-", zorder=1)
        taken += along(axes, xs, ys)
    return taken


def _named_points(axes: Axes, data: pd.DataFrame, series: Looks, obstacles: list[Point]) -> None:
    """Each series as points with its name beside one of them, and with the notes of the points."""
    names: list[Label] = []
    notes: list[Label] = []
    for shown, line in _by_name(data):
        look = series[line["series"].iloc[0]]
        _line(axes, line, look)
        obstacles += along(axes, line["x"], line["y"])
        points = list(zip(line["x"], line["y"]))
        names.append(Label(one_line(shown), points[len(points) // 2], MUTED if look.muted else INK))
        notes += [Label(note, point, MUTED, 8.5) for note, point in zip(line["note"], points) if note]
    place(axes, names + notes, obstacles)


def paint_dot_column(
    axes: Axes, data: pd.DataFrame, names: list[str], series: Looks, ticks: Ticks, most: float
) -> None:
    """A dot and its number for each name, a tick for what it is held against (then the numbers stand in a column of their
    own), and a status where there is no number; `most` is the largest value that the axis must hold."""
    texts = [f"{x:.3f}" if ticks == "share" else significant(x) for x in data["x"].dropna()]
    axes.set_xlim(0, most * with_room(axes, texts, 14))
    axes.locator_params(axis="x", nbins=4)
    axes.set_ylim(len(names) - 0.4, -0.7)
    axes.yaxis.set_major_locator(FixedLocator(range(len(names))))
    axes.set_yticklabels([one_line(name) for name in names])
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.grid(visible=False, axis="x")
    for dot in data.to_dict("records"):
        look, y = series[dot["series"]], names.index(dot["shown"])
        if pd.isna(dot["x"]):
            _beside(axes, (0.0, y), str(dot["status"]), MUTED, 4)
            continue
        if pd.notna(dot["y"]):
            axes.plot([dot["y"]] * 2, [y - 0.32, y + 0.32], color=MUTED, lw=1.6, zorder=2, solid_capstyle="butt")
        axes.plot(dot["x"], y, color=look.colour, ms=7.5, zorder=3, **_marker(look))
        text = f"{dot['x']:.3f}" if ticks == "share" else significant(dot["x"])
        at_end = pd.notna(data["y"]).any()
        _beside(
            axes,
            (axes.get_xlim()[1] if at_end else dot["x"], y),
            text,
            MUTED if look.muted else INK,
            0 if at_end else 7,
        )


def with_room(axes: Axes, texts: list[str], distance: float) -> float:
    """By how much an axis must be longer than its longest mark for texts of 9 points to fit behind that, so many points off."""
    width = axes.get_window_extent().width * 72 / axes.get_figure(root=True).dpi  # type: ignore[union-attr]  # drawn axes have a figure
    taken = distance + max([0.0, *(text_size(axes, text, 9)[0] for text in texts)])
    return 1 / max(0.4, 1 - taken / width)


def _beside(axes: Axes, at: Point, text: str, colour: str, distance: float) -> None:
    """Text right of a point; at distance 0 it ends there."""
    axes.annotate(
        text, at, (distance, 0), textcoords="offset points", va="center_baseline", fontsize=9, color=colour, zorder=4,
        ha="left" if distance else "right",
        bbox={"fc": PAPER, "ec": "none", "pad": 0.8},
    )  # fmt: skip
