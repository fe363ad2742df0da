"""Which rows may share a line of a figure: one budget, one tile, one row per point. The rest is in the table."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from pyramidbench.units import integer

IN_TORCH = "These choose in plain torch here, so that their times say nothing of their authors' kernels"


def usual_budget(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows at the run's most frequent K, and the rows that have no K."""
    budgeted = rows["top_k"].dropna()
    if budgeted.empty:
        return rows
    return rows[rows["top_k"].isna() | (rows["top_k"] == most_frequent(budgeted))]


def usual_tile(rows: pd.DataFrame) -> float:
    """The tile at which the most methods have a row; of equal ones the one with the most rows, then the largest."""
    tiles = rows.dropna(subset=["query_tile"]).groupby("query_tile")["label"]
    ranks = zip(tiles.nunique(), tiles.size(), tiles.nunique().index)
    return float(max(ranks)[2])


def by_tile(rows: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Token level and tile level, where there are selections of that kind, each with its name; rows without tiles, such
    as dense ones, are in both, or alone where nothing has tiles.

    At tile level a label keeps the usual tile, or its own usual one where it has no rows at that; the added column
    `shown` then says which.
    """
    untiled = rows[rows["query_tile"].isna()]
    untiled = untiled.assign(shown=untiled["label"])
    if len(untiled) == len(rows):
        yield "no query tiles", untiled
    for level, chosen in (("token level", rows["query_tile"] == 1), ("tile level", rows["query_tile"] > 1)):
        part = rows[chosen]
        if part.empty:
            continue
        usual = most_frequent(part["query_tile"])
        tiles = {label: _tile_of(own, usual) for label, own in part.groupby("label")["query_tile"]}
        part = part[part["query_tile"] == part["label"].map(tiles)]
        note = (" (tile " + part["query_tile"].map(integer) + ")").where(part["query_tile"] != usual, "")
        name = level if usual == 1 else f"{level}: {integer(usual)} queries share their blocks"
        yield name, pd.concat([untiled, part.assign(shown=part["label"] + note)])


def _tile_of(tiles: pd.Series, usual: float) -> float:
    return usual if (tiles == usual).any() else most_frequent(tiles)


def one_per_point(rows: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """One row for each combination of `keys`: of rows that differ in their level count, the one with the most levels."""
    return rows.sort_values("levels", kind="stable").drop_duplicates(keys, keep="last").sort_index()


def chosen_in_torch(rows: pd.DataFrame) -> list[str]:
    """Methods, whatever their presets, that attend by a kernel and choose in plain torch, where choosing is most of the time.

    Such a time is that of dozens of small launches. It says nothing of a rule's cost in kernels of its own.
    """
    mixed = (rows["kind"] == "selection") & (rows["backend"] == "reference+triton")
    attending = rows[["attend_s", "backward_s"]].astype(float).fillna(0).sum(axis=1)
    mostly = mixed & (attending < 0.5 * rows["latency_s"])
    return sorted({str(method).partition(":")[0] for method in rows.loc[mostly, "method"]})


def fullest_length(rows: pd.DataFrame) -> float:
    """The length at which the most methods have a row; of equal ones the longest."""
    counts = rows.groupby("seq_len_kv")["label"].nunique()
    return float(max(counts[counts == counts.max()].index))


def most_frequent(values: pd.Series) -> float:
    """The most frequent number; of equally frequent ones the smallest."""
    counts = values.value_counts()
    return float(min(counts[counts == counts.max()].index))
