"""Labels beside points and line ends, placed so that they do not cover one another. Distances in points (1/72 inch)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke
from matplotlib.transforms import Bbox
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression

from pyramidbench.reporting.palette import PAPER

Point = tuple[float, float]
Side = tuple[float, float, Literal["left", "center", "right"], Literal["bottom", "center", "top"]]
SIDES: list[Side] = [
    (1.0, 0.0, "left", "center"), (0.7, 0.7, "left", "bottom"), (0.7, -0.7, "left", "top"), (-1.0, 0.0, "right", "center"),
    (0.0, 1.0, "center", "bottom"), (0.0, -1.0, "center", "top"), (-0.7, 0.7, "right", "bottom"),
    (-0.7, -0.7, "right", "top"),
]  # fmt: skip
"""Where a label may stand beside its point, the preferred side first: direction and alignment."""
DISTANCES = (7.0, 16.0, 27.0, 40.0)


@dataclass(frozen=True)
class Label:
    """Text that belongs to a point, in data coordinates of its axes."""

    text: str
    at: Point
    colour: str
    size: float = 9.5


def place(axes: Axes, labels: Sequence[Label], obstacles: Iterable[Point]) -> None:
    """Write each label beside its point, on the side where it covers the fewest points (in data coordinates), other
    labels and edges; a label that has to stand far off gets a thin line to its point."""
    marks = [_square(axes, point, 3.0) for point in [*obstacles, *(label.at for label in labels)]]
    tries = [(side, distance) for distance in DISTANCES for side in SIDES]
    taken: list[Bbox] = []
    for label in labels:
        size = text_size(axes, label.text, label.size)
        boxes = [_box(to_points(axes, label.at), size, side, distance) for side, distance in tries]
        costs = [_cost(axes, box, marks, taken) + 0.05 * index for index, box in enumerate(boxes)]
        best = int(np.argmin(costs))
        taken.append(boxes[best])
        _write(axes, label, *tries[best])


def along(axes: Axes, xs: Iterable[float], ys: Iterable[float], step: float = 5.0) -> list[Point]:
    """Data points all along a line, every `step` points: obstacles that make labels keep off it."""
    corners = [to_points(axes, (x, y)) for x, y in zip(xs, ys) if math.isfinite(x) and math.isfinite(y)]
    dense = [
        point
        for one, other in itertools.pairwise(corners)
        for point in np.linspace(one, other, 2 + int(math.dist(one, other) / step))
    ]
    back = axes.transData.inverted()
    return [(float(x), float(y)) for x, y in (back.transform(point * _dpi(axes) / 72) for point in dense)]


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions as near to the wanted ones as can be, in their order, at least `gap` apart and within low and high as
    long as all fit."""
    order = np.argsort(wanted, kind="stable")
    steps = gap * np.arange(len(wanted))
    fitted = isotonic_regression(np.asarray(wanted, dtype=float)[order] - steps).x
    highest = max(low, high - steps[-1]) if len(wanted) else low
    placed: NDArray[np.float64] = np.empty(len(wanted))
    placed[order] = np.clip(fitted, low, highest) + steps
    return [float(value) for value in placed]


def text_size(axes: Axes, text: str, size: float) -> Point:
    """Width and height of a text."""
    drawn = axes.text(0, 0, text, fontsize=size)
    extent = drawn.get_window_extent()
    drawn.remove()
    scale = 72 / _dpi(axes)
    return extent.width * scale, extent.height * scale


def to_points(axes: Axes, point: Point) -> Point:
    """A data point in points from the figure's lower left corner."""
    x, y = axes.transData.transform(point) * 72 / _dpi(axes)
    return float(x), float(y)


def _dpi(axes: Axes) -> float:
    figure = axes.get_figure(root=True)
    assert figure is not None
    return figure.dpi


def _square(axes: Axes, point: Point, half: float) -> Bbox:
    x, y = to_points(axes, point)
    return Bbox.from_extents(x - half, y - half, x + half, y + half)


def _box(at: Point, size: Point, side: Side, distance: float) -> Bbox:
    """Where a text of that size would stand beside a point."""
    width, height = size
    x, y = at[0] + side[0] * distance, at[1] + side[1] * distance
    left = x - {"left": 0.0, "center": 0.5, "right": 1.0}[side[2]] * width
    bottom = y - {"bottom": 0.0, "center": 0.5, "top": 1.0}[side[3]] * height
    return Bbox.from_bounds(left - 1, bottom - 0.5, width + 2, height + 1)


def _cost(axes: Axes, box: Bbox, marks: list[Bbox], taken: list[Bbox]) -> float:
    """What a place costs: another label covered is worst, then the axes' edge passed, then a mark covered."""
    frame = Bbox(axes.get_window_extent().get_points() * 72 / _dpi(axes))
    outside = box.x0 < frame.x0 or box.x1 > frame.x1 or box.y0 < frame.y0 or box.y1 > frame.y1
    return 60.0 * float(box.count_overlaps(taken)) + 100.0 * outside + float(box.count_overlaps(marks))


def _write(axes: Axes, label: Label, side: Side, distance: float) -> None:
    far = distance > DISTANCES[0]
    axes.annotate(
        label.text,
        label.at,
        xytext=(side[0] * distance, side[1] * distance),
        textcoords="offset points",
        ha=side[2],
        va=side[3],
        color=label.colour,
        fontsize=label.size,
        zorder=6,
        path_effects=[withStroke(linewidth=2.5, foreground=PAPER)],
        arrowprops={"arrowstyle": "-", "color": label.colour, "lw": 0.6, "shrinkA": 1, "shrinkB": 4} if far else None,
    )
