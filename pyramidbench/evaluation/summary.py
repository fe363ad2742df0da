"""Summaries: what is computed from an evaluation's rows before anything is shown."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from pyramidbench.units import is_missing

WHERE = ["task", "text", "length", "shots"]
SAME_SAMPLE = [*WHERE, "depth", "index", "seed"]
ATTENTION = ["method", "kind", "budget", "top_k", "query_tile", "dense_layers"]
MOSTLY_DENSE = 0.5
"""Under this share of queries with a choice a row says little about a selection, and the report marks it."""


def summarise(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per task, text, length or shots, and attention, with means over its samples.

    difference: mean of score − dense score over the samples that dense attention did too (`paired` of them); missing
    without any. low, high: a 95 % interval of the score (Wilson, for shares; missing for losses).
    """
    measured = frame[frame["status"] == "ok"].copy()
    if measured.empty:
        return pd.DataFrame(columns=COLUMNS)
    measured["dense_score"] = _dense_scores(measured)
    rows = []
    for _, part in measured.groupby([*WHERE, *ATTENTION], dropna=False, sort=False):
        rows.append(_row(part))
    return pd.DataFrame(rows, columns=COLUMNS)


COLUMNS = [
    *WHERE, "group", "metric", *ATTENTION, "samples", "score", "low", "high", "partial", "chance", "paired", "difference",
    "choice_share", "density", "seconds", "tokens", "shots_given",
]  # fmt: skip


def _row(part: pd.DataFrame) -> dict[str, Any]:
    first = part.iloc[0]
    share = first["group"] != "perplexity" and bool(part["score"].isin([0.0, 1.0]).all())
    low, high = wilson(int(part["score"].sum()), len(part)) if share else (None, None)
    paired = part.dropna(subset=["dense_score"])
    means = {
        name: part[name].mean() for name in ("partial", "chance", "choice_share", "density", "tokens", "shots_given")
    }
    return {
        **{name: None if is_missing(first[name]) else first[name] for name in (*WHERE, "group", "metric", *ATTENTION)},
        "samples": len(part), "score": part["score"].mean(), "low": low, "high": high, **means, "paired": len(paired),
        "difference": (paired["score"] - paired["dense_score"]).mean() if len(paired) else None,
        "seconds": part["seconds"].median(),
    }  # fmt: skip


def _dense_scores(frame: pd.DataFrame) -> pd.Series:
    """The score of the method `dense` on each row's sample."""
    dense = frame[frame["method"].str.partition(":")[0] == "dense"]
    scores = {sample_key(row): row["score"] for row in dense.to_dict("records")}
    return pd.Series([scores.get(sample_key(row)) for row in frame.to_dict("records")], index=frame.index, dtype=float)


def sample_key(row: dict[Any, Any]) -> tuple[object, ...]:
    """What two attentions' rows of one sample have in common."""
    return tuple(None if is_missing(row[name]) else row[name] for name in SAME_SAMPLE)


def wilson(right: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """A 95 % interval of a share from `right` of `count` (Wilson 1927): honest for few samples, and at 0 and 1."""
    middle = (right + z * z / 2) / (count + z * z)
    half = z / (count + z * z) * math.sqrt(right * (count - right) / count + z * z / 4)
    return max(0.0, middle - half), min(1.0, middle + half)


def by_position(frame: pd.DataFrame) -> pd.DataFrame:
    """Loss by position: one row per attention, text, length and bucket, mean over samples, and the difference to dense."""
    rows = []
    for row in frame[frame["position_loss"].notna()].to_dict("records"):
        shared = {name: row[name] for name in (*SAME_SAMPLE, *ATTENTION)}
        rows += [{**shared, "position": i, "loss": loss} for i, loss in enumerate(row["position_loss"])]
    if not rows:
        return pd.DataFrame(columns=[*WHERE, *ATTENTION, "position", "loss", "difference"])
    long = pd.DataFrame(rows)
    dense = {_at(row): row["loss"] for row in rows if row["method"] == "dense"}
    long["difference"] = [row["loss"] - dense.get(_at(row), math.nan) for row in rows]
    groups = [*WHERE, *ATTENTION, "position"]
    return long.groupby(groups, dropna=False, sort=False)[["loss", "difference"]].mean().reset_index()


def _at(row: dict[Any, Any]) -> tuple[object, ...]:
    return (*sample_key(row), row["position"])


def heat_map(frame: pd.DataFrame, task: str, method: str, budget: str | None) -> pd.DataFrame:
    """Mean score of a retrieval task by depth (rows) and length (columns)."""
    rows = frame[(frame["task"] == task) & (frame["method"] == method) & frame["depth"].notna()]
    rows = rows[rows["budget"].isna() if budget is None else rows["budget"] == budget]
    return rows.pivot_table(index="depth", columns="length", values="score", aggfunc="mean")
