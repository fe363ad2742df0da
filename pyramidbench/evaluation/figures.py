"""Figures of an evaluation, in the look of all reports: quality against budget, loss by position, retrieval heat maps."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import pandas as pd

from pyramidbench.evaluation.figure_heat import heat_maps
from pyramidbench.evaluation.figure_positions import positions
from pyramidbench.evaluation.figure_quality import quality
from pyramidbench.evaluation.sheet import LOOK, save


def draw_all(frame: pd.DataFrame, folder: Path, times: pd.DataFrame | None = None) -> dict[str, str]:
    """Write every figure that the rows allow as PNG; their file names with a line that says what each shows.

    times: rows that were measured with the device to themselves.
    """
    told: dict[str, str] = {}
    with mpl.rc_context(LOOK):
        for drawn in (quality(frame, times), positions(frame), heat_maps(frame)):
            for name, (canvas, text) in drawn.items():
                save(canvas, folder, name)
                told[f"{name}.png"] = text
    return told
