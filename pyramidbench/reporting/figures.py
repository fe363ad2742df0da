"""Every figure of a report, in the report's order."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd

from pyramidbench.frame import SETTING, Setting
from pyramidbench.reporting import figure_recall, figure_resources, figure_speed, figure_stages
from pyramidbench.reporting.evidence import Evidence
from pyramidbench.reporting.figure import Figure, NoFigure, Subject, Topic
from pyramidbench.reporting.palette import series_of
from pyramidbench.units import is_missing

Definition = Callable[[Subject], "Figure | NoFigure"]
DEFINITIONS: tuple[Definition, ...] = (
    figure_speed.tradeoff,
    figure_speed.scaling,
    figure_stages.by_length,
    figure_stages.by_levels,
    figure_resources.memory,
    figure_recall.quality,
    figure_recall.by_length,
    figure_recall.by_budget,
    figure_recall.by_levels,
    figure_recall.by_head,
    figure_resources.roofline,
)
TOPICS: dict[Topic, str] = {
    "tradeoff": "Speed against quality",
    "time": "Time by length",
    "stages": "Where the time goes",
    "memory": "Memory",
    "recall": "Recall of important blocks",
    "roofline": "Roofline",
}
MOST_SETTINGS = 4
"""Settings that get figures, the largest first: beyond these a page grows faster than what it tells."""


def figures(evidence: Evidence) -> list[Figure | NoFigure]:
    """Every figure for each setting of the runs, or the reason why one is missing; settings of one figure side by side."""
    looks = series_of(evidence.summary)
    most = max(MOST_SETTINGS, len(evidence.runs))
    subjects = [
        Subject(
            setting, cells_of(evidence, setting), looks,
            evidence.source_of(setting.rows["run"].iloc[0]).device, f"-{index + 1}" if index else "",
        )
        for index, setting in enumerate(evidence.settings[:most])
    ]  # fmt: skip
    defined = [define(subject) for define in DEFINITIONS for subject in subjects]
    reason = f"there are more than {most} settings, and the largest ones come first"
    left = [
        NoFigure(f"all-{most + 1 + index}", "roofline", f"Figures of {setting.text}", reason)
        for index, setting in enumerate(evidence.settings[most:])
    ]
    return [*defined, *left]


def cells_of(evidence: Evidence, setting: Setting) -> pd.DataFrame:
    """The cells behind a setting's rows, each with the row of the summary that it went into as `summary_row`."""
    rows = setting.rows
    keys = [*(name for name in SETTING if name != "layers"), "label", "seq_len", "seq_len_kv", "block_size", "top_k",
            "levels", "query_tile"]  # fmt: skip
    found = {_key(row, keys): index for index, row in zip(rows.index, rows.to_dict("records"))}
    frame = evidence.frame
    index = [found.get(_key(row, keys)) for row in frame.to_dict("records")]
    cells = frame.assign(summary_row=pd.Series(index, index=frame.index, dtype=float))
    return cells[cells["summary_row"].notna()]


def _key(row: dict[object, object], keys: list[str]) -> tuple[object, ...]:
    return tuple(None if is_missing(row[key]) else row[key] for key in keys)
