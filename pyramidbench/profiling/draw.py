"""The figures of a profile as PNG: horizontal bars of the stages, and points below the roofline."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from pyramidbench.profiling.figures import ProfileFigure
from pyramidbench.reporting.draw import RC
from pyramidbench.reporting.labels import Label, along, place, text_size
from pyramidbench.reporting.palette import BLUE, INK, MUTED, ORANGE, PAPER, SKY
from pyramidbench.units import one_line, significant

WIDTH, TOP, FOOT = 8.0, 0.42, 0.62
BAR = 0.2
LEGEND: dict[str, Any] = {
    "loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "frameon": False, "fontsize": 9.5, "borderpad": 0,
}  # fmt: skip
COLOURS = {"wall": BLUE, "device": SKY, "kernels": ORANGE, "operators": ORANGE}


def save_figure(figure: ProfileFigure, folder: Path, *, dpi: int = 160) -> Path:
    """Draw a figure on white into a folder; returns the file."""
    path = folder / f"{figure.name}.png"
    with mpl.rc_context(RC):
        canvas = _stages(figure) if figure.name == "stages" else _roofline(figure)
        canvas.savefig(path, dpi=dpi, facecolor=PAPER, metadata={"Software": None})
    return path


def _canvas(figure: ProfileFigure, height: float, left: float, right: float) -> tuple[Canvas, Axes]:
    """A figure with its titles and notes, and axes of that height in inches."""
    subtitle, notes = (
        textwrap.wrap(figure.subtitle, 108),
        [line for n in figure.notes for line in textwrap.wrap(n, 112)],
    )
    top, foot = TOP + 0.19 * len(subtitle) + 0.25, FOOT + 0.19 * len(notes)
    total = top + height + foot
    canvas = Canvas(figsize=(WIDTH, total))
    for index, (line, size, colour, weight) in enumerate(
        [(figure.title, 13.5, INK, "bold"), *((line, 9, MUTED, "normal") for line in subtitle)]
    ):
        at = 0.30 if index == 0 else 0.34 + 0.19 * index
        canvas.text(0.12 / WIDTH, 1 - at / total, one_line(line), fontsize=size, color=colour, fontweight=weight)
    for index, line in enumerate(reversed(notes)):
        canvas.text(0.12 / WIDTH, (0.1 + 0.19 * index) / total, line, fontsize=9, color=MUTED)
    return canvas, canvas.add_axes((left / WIDTH, foot / total, (WIDTH - left - right) / WIDTH, height / total))


def _stages(figure: ProfileFigure) -> Canvas:
    data = figure.data
    names = list(dict.fromkeys(data["stage"]))
    measures = list(dict.fromkeys(data["measure"]))
    shown = {name: f"– {name.split('/', 1)[1]}" if "/" in name else name for name in names}
    probe = Canvas(figsize=(1, 1)).add_axes((0, 0, 1, 1))
    left = 0.3 + max(text_size(probe, text, 9.5)[0] for text in shown.values()) / 72
    band = BAR * len(measures) + 0.14
    canvas, axes = _canvas(figure, band * len(names), left, 0.75)
    for index, measure in enumerate(measures):
        part = data[data["measure"] == measure].set_index("stage")["ms"].reindex(names)
        places = np.arange(len(names)) * band + BAR * (index - (len(measures) - 1) / 2)
        bars = axes.barh(places, part, height=0.82 * BAR, color=COLOURS[measure], label=measure)
        for bar, name in zip(bars, names):
            bar.set_alpha(0.5 if "/" in name else 1.0)
        for place_, value in zip(places, part):
            if pd.notna(value):
                axes.annotate(
                    significant(value), (value, place_), (4, 0), textcoords="offset points", va="center", fontsize=8.5
                )
    axes.set_ylim(band * (len(names) - 0.5), -band / 2)
    axes.set_yticks(np.arange(len(names)) * band, [shown[name] for name in names])
    axes.tick_params(left=False)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("time per call (ms)")
    axes.legend(
        loc="lower right", frameon=False, fontsize=9.5, ncols=len(measures), bbox_to_anchor=(1.0, 1.0), borderpad=0
    )
    return canvas


def _roofline(figure: ProfileFigure) -> Canvas:
    assert figure.peaks is not None
    (flops, bandwidth), data = figure.peaks, figure.data
    canvas, axes = _canvas(figure, 4.0, 1.1, 0.35)
    ridge = flops / bandwidth
    low = min(data["intensity"].min(), ridge) / 3
    high = max(data["intensity"].max(), ridge) * 4
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(min(data["flops_per_s"].min() / 3, low * bandwidth), 2.2 * max(flops, data["flops_per_s"].max()))
    axes.plot([low, ridge, high], [low * bandwidth, flops, flops], color=INK, lw=1.4, zorder=2)
    for kind, colour, size in (("stage", BLUE, 8.5), ("kernel", ORANGE, 6.0)):
        at = data.loc[data["kind"] == kind, ["intensity", "flops_per_s"]].to_numpy().T
        axes.plot(*at, "o", color=colour, ms=size, mec=PAPER, mew=0.7, zorder=3, label=kind)
    _label_roofline(axes, figure, ridge, high)
    axes.set_xlabel("operations per byte")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(10))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _flops(value)))
    axes.legend(ncols=2, **LEGEND)
    return canvas


def _label_roofline(axes: Axes, figure: ProfileFigure, ridge: float, high: float) -> None:
    assert figure.peaks is not None
    (flops, bandwidth), data = figure.peaks, figure.data
    low = axes.get_xlim()[0]
    roof = along(axes, [low, ridge, high], [low * bandwidth, flops, flops])
    axes.annotate(
        f"{_flops(flops)} measured", (high, flops), (-4, 5), textcoords="offset points", ha="right", fontsize=9, color=MUTED
    )  # fmt: skip
    middle = (low * ridge) ** 0.5
    angle = np.degrees(
        np.arctan2(*np.flip(np.diff(axes.transData.transform([(low, low * bandwidth), (ridge, flops)]), axis=0)[0]))
    )
    axes.annotate(
        f"{significant(bandwidth / 1e9)} GB/s measured", (middle, middle * bandwidth), (-3, 5), textcoords="offset points",
        ha="center", va="bottom", rotation=angle, rotation_mode="anchor", fontsize=9, color=MUTED,
    )  # fmt: skip
    ordered = data.sort_values("kind", ascending=False)
    names = [
        Label(one_line(_short(row["name"])), (row["intensity"], row["flops_per_s"]), INK if row["kind"] == "stage" else MUTED,
              9.5 if row["kind"] == "stage" else 8.5)
        for _, row in ordered.iterrows()
    ]  # fmt: skip
    place(axes, names, roof)


def _short(name: str) -> str:
    bare = name.removeprefix("aten::")
    return bare if len(bare) <= 34 else f"{bare[:33]}…"


def _flops(value: float) -> str:
    for unit, size in (("PFLOP/s", 1e15), ("TFLOP/s", 1e12), ("GFLOP/s", 1e9), ("MFLOP/s", 1e6)):
        if value >= 0.9999 * size:
            return f"{significant(value / size) if value / size != round(value / size) else round(value / size)} {unit}"
    return f"{value:g} FLOP/s"
