"""Axes of figures: limits with room at the ends, ticks at round places, plain numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator
from numpy.typing import NDArray

from pyramidbench.reporting.figure import Axis
from pyramidbench.units import integer, significant, tokens

LEAST_LOSS = 0.004
"""What a share of 1 lacks on a scale of nines at the least, so that it has a place."""
TICKS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 1.0)


def scale(axes: Axes, which: str, axis: Axis, data: pd.DataFrame) -> None:
    """Limits with room at the ends, ticks at round places (lengths and counts: where there is data), plain numbers."""
    columns = ["y", "low", "high"] if which == "y" else ["x"]
    values = data[columns].to_numpy(dtype=float)
    values = values[np.isfinite(values)]
    low, high = float(values.min()), float(values.max())
    if axis.ticks == "ratio":
        low, high = min(low, 0.8), max(high, 1.25)
    if axis.ticks == "kept":
        _scale_nines(axes, values)
        return
    setting, spine = (axes.set_xlim, axes.xaxis) if which == "x" else (axes.set_ylim, axes.yaxis)
    if axis.log:
        (axes.set_xscale if which == "x" else axes.set_yscale)(
            "log", base=2 if axis.ticks not in ("ms", "plain") else 10
        )
        room = (high / low) ** 0.09 if high > low else 1.4
        setting(low / room, high * room)
    else:
        room = 0.09 * (high - low) or 0.05
        setting(low - room, high + room)
    if axis.ticks in ("tokens", "count"):
        spine.set_major_locator(FixedLocator(sorted(set(data["x"].dropna()))))
    elif axis.log:
        wide = np.log10(high / low) > 1.3
        decimal = axis.ticks in ("ms", "plain")
        spine.set_major_locator(LogLocator(10, subs=(1, 3) if wide else (1, 2, 5)) if decimal else LogLocator(2))
    spine.set_minor_locator(NullLocator())
    if axis.ticks != "share":
        spine.set_major_formatter(FuncFormatter(lambda value, _: WRITERS[axis.ticks](value)))


def _scale_nines(axes: Axes, shares: NDArray[np.float64]) -> None:
    nines = Nines.of(shares)
    axes.set_xscale("function", functions=(nines.decades, nines.shares))
    low, high = nines.ends(shares)
    axes.set_xlim(*nines.shares(np.array([low, high])))
    axes.xaxis.set_major_locator(FixedLocator(nines.ticks(shares)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


@dataclass(frozen=True)
class Nines:
    """An axis of shares by what they lack, in logarithms: between 0.98 and 0.99 lies as much as between 0.8 and 0.9. 1 itself
    lacks `least`."""

    least: float

    @classmethod
    def of(cls, shares: NDArray[np.float64]) -> Nines:
        """The axis of some shares: a share of 1 stands where half of the smallest loss of the others would."""
        lost = 1 - shares[shares < 1]
        return cls(max(LEAST_LOSS, 0.5 * float(lost.min())) if len(lost) else LEAST_LOSS)

    def decades(self, share: NDArray[np.float64]) -> NDArray[np.float64]:
        """Where shares stand; rounded, since processors differ in a logarithm's last bit, and reports must not."""
        decades: NDArray[np.float64] = -np.log10(np.maximum(1 - share + self.least, 1e-9))
        return decades.round(9)

    def shares(self, decades: NDArray[np.float64]) -> NDArray[np.float64]:
        """Back again; beyond 1 where the axis goes on."""
        return 1 + self.least - 10.0**-decades

    def ends(self, shares: NDArray[np.float64]) -> tuple[float, float]:
        """Where an axis of these shares starts and ends, in decades, with room at both ends."""
        least, most = self.decades(np.array([shares.min(), shares.max()]))
        room = 0.09 * (most - least) or 0.1
        return float(least - room), float(most + room)

    def ticks(self, shares: NDArray[np.float64]) -> list[float]:
        """Round shares on that axis, no two too near to each other."""
        low, high = self.ends(shares)
        gap = 0.06 * (high - low) / 1.18
        shown: list[float] = []
        for tick in reversed(TICKS):
            at = float(self.decades(np.array(tick)))
            if low <= at <= high and (not shown or self.decades(np.array(shown[-1])) - at > gap):
                shown.append(tick)
        return shown


WRITERS: dict[str, Callable[[float], str]] = {
    "tokens": tokens,
    "count": integer,
    "ms": lambda value: significant(value, 1) if value < 1 else f"{value:g}",
    "plain": lambda value: significant(value, 1) if value < 1 else f"{value:g}",
    "ratio": lambda value: f"{value:.3g}×" if value >= 1 else f"1/{1 / value:.3g}×",
}
