"""Loss by position: where in a long text a method loses what dense attention has."""

from __future__ import annotations

import pandas as pd

from pyramidbench.evaluation.figure_quality import Drawn
from pyramidbench.evaluation.sheet import Grid, head, looks, marker, same_y, sheet, shown
from pyramidbench.evaluation.summary import by_position
from pyramidbench.reporting.palette import INK
from pyramidbench.units import tokens

LEFT_OUT = "random_blocks"
"""It lies so far above the others that these could not be told apart."""


def positions(frame: pd.DataFrame) -> Drawn:
    """Loss above dense attention's over the position, a row of panels per text and a panel per budget."""
    long = by_position(frame)
    long = long[long["top_k"].notna() & long["difference"].notna() & (long["method"] != LEFT_OUT)]
    if long.empty:
        return {}
    long = long[long["length"] == long["length"].max()]
    texts, budgets = list(long["text"].unique()), sorted(long["top_k"].unique())
    series = looks(long)
    grid = Grid(len(texts), len(budgets), 1.7, shown(long, series))
    length = tokens(int(long["length"].iloc[0]))
    about = f"loss above dense attention's in a window of {length} tokens, means of 1 024 positions"
    canvas, panels = sheet("Where the loss comes from", f"{about}; {LEFT_OUT} is left out: it is far above", grid)
    for number, axes in enumerate(panels):
        row, column = divmod(number, grid.columns)
        part = long[(long["text"] == texts[row]) & (long["top_k"] == budgets[column])]
        for method, line in part.groupby("method", sort=False):
            look = series[str(method)]
            axes.plot(line["position"] + 0.5, line["difference"], color=look.colour, ls=look.line, **marker(look))
        axes.axhline(0, color=INK, ls="--", lw=1.2)
        budget = str(part["budget"].iloc[0]).removeprefix("keep=") if len(part) else ""
        head(axes, f"{budget} (K {int(budgets[column])})", "" if column else str(texts[row]))
        # No tick at the ends, where the numbers of neighbours would touch.
        ticks = range(2, int(long["position"].max()) + 1, 2)
        axes.set_xticks(ticks, [tokens(1024 * tick) if row == grid.rows - 1 else "" for tick in ticks])
        if row == grid.rows - 1:
            axes.set_xlabel("position")
    for start in range(0, len(panels), grid.columns):
        same_y(panels[start : start + grid.columns], grid.columns)
        panels[start].set_ylabel("nats per token")
    return {"positions": (canvas, "Loss above that of dense attention by position.")}
