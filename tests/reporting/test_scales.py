"""Axes of figures: shares on a scale of nines."""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas

from pyramidbench.reporting.figure_speed import MASS
from pyramidbench.reporting.scales import Nines, scale


def test_nines_go_there_and_back() -> None:
    nines, shares = Nines(0.004), np.array([0.3, 0.9, 0.99, 0.999, 1.0, 1.002])
    assert nines.shares(nines.decades(shares)) == pytest.approx(shares)


@pytest.mark.parametrize(
    ("shares", "ticks"),
    [((0.66, 0.95, 0.996, 1.0), ["1", "0.99", "0.98", "0.95", "0.9", "0.8", "0.7", "0.6"]), ((0.8, 0.88), ["0.8"])],
)
def test_shares_near_one_are_kept_apart(shares: tuple[float, ...], ticks: list[str]) -> None:
    canvas = Canvas()
    FigureCanvasAgg(canvas)
    axes = canvas.add_subplot()
    scale(axes, "x", MASS, pd.DataFrame({"x": shares, "y": 1.0, "low": 1.0, "high": 1.0}))
    low, high = axes.get_xlim()
    assert low < min(shares) <= max(shares) < high
    canvas.draw_without_rendering()
    assert [label.get_text() for label in axes.get_xticklabels()] == ticks
    at = [axes.transData.transform((share, 1))[0] for share in shares]
    assert all(later - earlier > 10 for earlier, later in itertools.pairwise(at))
