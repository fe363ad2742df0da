"""Draws curves.csv as curves.png: accuracy over training steps, a panel per layout, a line per attention.

python docs/training/draw_curves.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MultipleLocator, PercentFormatter

from pyramidbench.reporting.draw import RC
from pyramidbench.reporting.labels import spread
from pyramidbench.reporting.palette import INK, MUTED, PAPER, SHADE, Series, series_of

HERE = Path(__file__).parent
CHANCE = 1 / 16
METHODS = {
    "dense": "dense",
    "pyramid": "pyramid",
    "pyramid, all exact": "flat:exact",
    "pyramid tile 16": "pyramid:fast",
    "pyramid tile 16, all exact": "pyramid:paper",
    "sliding_window": "sliding_window",
}
"""Whose look each attention has in the palette; the variants have those of methods that this figure does not show."""
SHORT = {"pyramid tile 16, all exact": "tile 16, all exact", "sliding_window": "sliding window"}
SUBTITLE = (
    "Accuracy on held-out sequences. Each question keeps 4 of 22 to 29 eligible blocks by rank; "
    "a tile of 16 shares its 4. Thin: a second seed."
)
TITLES = {
    "topics": ("Questions ask about passages", "pairs grouped by topic, 16 questions on two of them"),
    "scattered": ("Questions ask anywhere", "pairs and questions in any order"),
}
WIDTH, HEIGHT = 11.0, 4.3
"""Inches."""
LINE_POINTS = 14.0
"""Height of a name beside a line's end."""


def draw(curves: pd.DataFrame) -> Figure:
    """A figure of the columns layout, attention, step and accuracy."""
    summary = pd.DataFrame({"label": list(METHODS.values()), "kind": ["dense"] + ["selection"] * (len(METHODS) - 1)})
    looks = series_of(summary)
    figure = Figure(figsize=(WIDTH, HEIGHT))
    panels = figure.subplots(1, len(TITLES), sharey=True)
    figure.subplots_adjust(left=0.065, right=0.825, top=0.745, bottom=0.135, wspace=0.7)
    figure.text(0.012, 0.945, "Associative recall: does the attention train?", size=13.5, weight="bold", color=INK)
    figure.text(0.012, 0.893, SUBTITLE, size=9.5, color=MUTED)
    for axes, (layout, (title, about)) in zip(panels, TITLES.items()):
        axes.text(0, 1.105, title, transform=axes.transAxes, size=10.5, weight="bold", color=INK)
        axes.text(0, 1.035, about, transform=axes.transAxes, size=8.5, color=MUTED)
        draw_layout(axes, curves[curves["layout"] == layout], {name: looks[METHODS[name]] for name in METHODS})
        axes.set_xlabel("training steps")
    panels[0].set_ylabel("accuracy")
    return figure


def draw_layout(axes: Axes, curves: pd.DataFrame, looks: dict[str, Series]) -> None:
    """The lines of one layout, those of seeds besides 0 thin; at each end the name and the last accuracy of seed 0."""
    end = curves["step"].max()
    axes.set(xlim=(0, end), ylim=(0, 1))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.tick_params(labelleft=True)
    axes.xaxis.set_major_locator(MultipleLocator(100))
    axes.axhspan(0, CHANCE, color=SHADE, zorder=0, lw=0)
    axes.text(end * 0.99, CHANCE / 2 - 0.004, "guessing", ha="right", va="center", size=8, color=MUTED)
    names = [name for name in looks if (curves["attention"] == name).any()]
    last = {}
    for front, name in enumerate(names):
        look = looks[name]
        for seed, line in curves[curves["attention"] == name].groupby("seed"):
            shape = (
                {"lw": 1.8, "marker": look.marker, "ms": 5.5, "mec": PAPER, "mew": 0.5} if seed == 0 else {"lw": 0.9}
            )
            axes.plot(line["step"], line["accuracy"], color=look.colour, clip_on=False, zorder=10 - front, **shape)
            last.setdefault(name, line["accuracy"].iloc[-1])
    height = axes.get_position().height * HEIGHT * 72
    order = sorted(names, key=lambda name: -last[name])
    # The place of a tie's first name is the higher one.
    wanted = [last[name] * height - 1e-3 * rank for rank, name in enumerate(order)]
    places = spread(wanted, LINE_POINTS, 0, height)
    for name, place in zip(order, places):
        axes.annotate(
            f"{last[name]:.1%}  {SHORT.get(name, name)}", (end, last[name]), (12, place - last[name] * height),
            textcoords="offset points", va="center", size=9, color=INK, annotation_clip=False,
            arrowprops={
                "arrowstyle": "-", "color": looks[name].colour, "lw": 1.0, "shrinkA": 1, "shrinkB": 4, "relpos": (0, 0.5),
            },
        )  # fmt: skip


if __name__ == "__main__":
    with mpl.rc_context(RC):
        drawn = draw(pd.read_csv(HERE / "curves.csv"))
        drawn.savefig(HERE / "curves.png", dpi=160, facecolor=PAPER, metadata={"Software": None})
