"""Quality broken down: by length, budget, levels, tile, block size, layer or head."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from pyramidbench.errors import unknown
from pyramidbench.frame import Row, measured, settings, summarise
from pyramidbench.tables import (
    ERROR,
    LENGTH,
    LEVELS,
    MASS,
    MASS_RATIO,
    METHOD,
    OUTSIDE,
    RECALL,
    TILE,
    TOP_K,
    Column,
    rows_of,
)
from pyramidbench.units import integer, share

BREAKDOWNS = {
    "length": LENGTH,
    "budget": TOP_K,
    "levels": LEVELS,
    "tile": TILE,
    "block": Column("block_size", "block", "keys in a block", lambda row: integer(row["block_size"])),
    "layer": Column("layer", "layer", "layer of the captured model", lambda row: integer(row["layer"])),
    "head": Column(
        "head", "head", "set of blocks: a key/value head, or a query head", lambda row: integer(row["head"])
    ),
}
ALWAYS = ("length", "tile", "budget", "levels")
WORST = Column(
    "recall_p5", "recall p5", "5th percentile over query tiles and heads", lambda row: share(row["recall_p5"]), 2
)
WORST_HEAD = Column(
    "recall_worst_head", "worst head", "mean recall of the worst head", lambda row: share(row["recall_worst_head"]), 3
)
MEASURES = (RECALL, WORST, WORST_HEAD, MASS, MASS_RATIO, OUTSIDE, ERROR)
Titled = tuple[str, list[Column], list[list[Row]]]


def check_breakdowns(by: Sequence[str]) -> None:
    """Raise UserError if `by` has a word that is not in BREAKDOWNS."""
    for word in by:
        if word not in BREAKDOWNS:
            raise unknown("breakdown", word, BREAKDOWNS)


def recall_tables(frame: pd.DataFrame, by: Sequence[str]) -> list[Titled]:
    """A table for each setting that has a recall: its title, columns, and rows in blocks of one value of `by`.

    Rows are averaged over layers, seeds and heads unless `by` asks for them, and over nothing else. With "head" only
    what is known for each head is shown: recall and mass kept.

    Raises:
        UserError: `by` has a word that is not in BREAKDOWNS.
    """
    check_breakdowns(by)
    leading = [BREAKDOWNS[word] for word in [*by, *(word for word in ALWAYS if word not in by)]]
    measures = (RECALL, MASS) if "head" in by else MEASURES
    columns = [*leading[: len(by)], METHOD, *leading[len(by) :], *measures]
    rows = _broken_down(frame, by)
    rows = measured(rows).dropna(subset=["recall"])
    rows = rows[rows["kind"] != "dense"]
    keys = [column.key for column in leading]
    ordered = rows.sort_values([*keys[: len(by)], *keys[len(by) :], "recall"], ascending=[*[True] * len(keys), False])
    return [
        (setting.text, columns, _blocks(ordered.loc[ordered.index.isin(setting.rows.index)], keys[: max(1, len(by))]))
        for setting in settings(rows)
    ]


def _broken_down(frame: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """The summary of the frame, or of each layer of it, or of each head of each."""
    wanted = [word for word in ("layer", "head") if word in by]
    if not wanted:
        return summarise(frame)
    source = _each_head(frame) if "head" in by else frame
    parts = []
    for values, rows in source.groupby(wanted, dropna=False, sort=True):
        part = summarise(rows)
        part[wanted] = pd.DataFrame([values] * len(part), columns=wanted, index=part.index)
        parts.append(part)
    if not parts:
        return summarise(frame)
    joined = pd.concat(parts, ignore_index=True)
    return joined.assign(layers=None) if "layer" in by else joined


def _each_head(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per head, with that head's recall and mass kept; rows that hold nothing by head are left out."""
    known = frame[frame["recall_by_head"].notna()]
    known = known.assign(head=known["recall_by_head"].map(lambda values: list(range(len(values)))))
    rows = known.explode(["head", "recall_by_head", "mass_kept_by_head"], ignore_index=True)
    return rows.assign(recall=pd.to_numeric(rows["recall_by_head"]), mass_kept=pd.to_numeric(rows["mass_kept_by_head"]))


def _blocks(rows: pd.DataFrame, keys: list[str]) -> list[list[Row]]:
    return [rows_of(block) for _, block in rows.groupby(keys, dropna=False, sort=False)]
