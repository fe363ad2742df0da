"""Heat maps of retrieval: depth × length, a panel per method."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure as Canvas

from pyramidbench.evaluation.figure_quality import Drawn
from pyramidbench.evaluation.sheet import Grid, sheet
from pyramidbench.evaluation.summary import heat_map
from pyramidbench.reporting.palette import HEAT, INK, PAPER
from pyramidbench.units import tokens

COLOURS = LinearSegmentedColormap.from_list("heat", HEAT)
IN_A_ROW = 5
CELL = 0.24


def heat_maps(frame: pd.DataFrame) -> Drawn:
    """One figure for each task with depths at each budget."""
    deep = frame[(frame["status"] == "ok") & frame["depth"].notna()]
    drawn: Drawn = {}
    for task in deep["task"].unique():
        of_task = deep[deep["task"] == task]
        for budget in of_task["budget"].dropna().unique():
            shown = of_task[of_task["budget"].isna() | (of_task["budget"] == budget)]
            name = f"heat-{task}-{budget}".replace("%", "").replace("=", "-").replace(":", "-")
            share = str(budget).removeprefix("keep=")
            drawn[name] = (
                _figure(shown, str(task), str(budget), share),
                f"{task} at {share}: share right by depth and length.",
            )
    return drawn


def _figure(rows: pd.DataFrame, task: str, budget: str, share: str) -> Canvas:
    methods = list(rows["method"].unique())
    columns = min(IN_A_ROW, max(3, len(methods)))
    lengths, depths = sorted(rows["length"].unique()), sorted(rows["depth"].unique())
    grid = Grid(-(-len(methods) // columns), columns, max(0.7, CELL * len(depths)), column_gap=0.14)
    cells = rows.groupby(["method", "length", "depth"]).size()
    samples = f"{cells.min()}" if cells.min() == cells.max() else f"{cells.min()} to {cells.max()}"
    about = (
        "share of exact answers by where the answer stands (0 % is the start of the text) and the prompt's length; "
        f"samples a cell: {samples}"
    )
    if len(cells) < len(methods) * len(lengths) * len(depths):
        about += "; empty: not measured"
    canvas, panels = sheet(
        f"{task.replace('_', ' ').capitalize()}, {share} of the blocks of 8k tokens kept by rank", about, grid
    )
    for number, axes in enumerate(panels):
        if number >= len(methods):
            axes.remove()
            continue
        own = rows[rows["method"] == methods[number]]
        part = heat_map(rows, task, methods[number], None if own["budget"].isna().all() else budget)
        _panel(axes, part.reindex(index=depths, columns=lengths), str(methods[number]))
        if number % columns:
            axes.set_yticklabels([])
        else:
            axes.set_ylabel("depth")
        if number + columns >= len(methods):
            axes.set_xlabel("length")
        else:
            axes.set_xticklabels([])
    return canvas


def _panel(axes: Axes, part: pd.DataFrame, title: str) -> None:
    values = part.to_numpy(dtype=float)
    axes.imshow(values, vmin=0, vmax=1, cmap=COLOURS, aspect="auto")
    axes.grid(visible=False)
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.set_title(title, loc="left", fontsize=9, fontweight="bold", pad=4)
    axes.set_xticks(range(len(part.columns)), [tokens(int(float(str(length)))) for length in part.columns])
    axes.set_yticks(range(len(part.index)), [f"{float(str(depth)):.0%}" for depth in part.index])
    for row, line in enumerate(values):
        for column, value in enumerate(line):
            if value == value:
                colour = PAPER if value < 0.6 else INK
                axes.text(column, row, f"{value:.2g}", ha="center", va="center", fontsize=8, color=colour)
