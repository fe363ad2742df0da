"""Figures of quality: what is found at an equal budget, and recall by length, budget, levels, layer and head."""

from __future__ import annotations

import pandas as pd

from pyramidbench.comparable import by_tile, fullest_length, one_per_point, usual_budget, usual_tile
from pyramidbench.frame import failed, measured
from pyramidbench.reporting.figure import (
    Axis,
    Figure,
    Heading,
    NoFigure,
    Subject,
    at_length,
    budgets,
    names,
    tidy,
)
from pyramidbench.reporting.figure_speed import LENGTH, MASS, with_ends
from pyramidbench.units import integer

QUALITY = Heading("quality", "recall", "What each method finds at an equal budget")
BY_LENGTH = Heading("recall-length", "recall", "Recall of important blocks by length")
BY_BUDGET = Heading("budget", "recall", "Recall and attention mass by budget")
BY_LEVELS = Heading("levels", "recall", "Recall of important blocks by level count")
BY_HEAD = Heading("heads", "recall", "Recall of important blocks by layer and head")
RECALL = Axis("recall of exact Top-K (share)", "share")
MEASURES = {
    "recall": Axis("recall of the exact\nTop-K blocks (share)", "share"),
    "mass_outside_forced": Axis("attention kept outside\nthe forced blocks (share)", "share"),
    "output_error": Axis("output error (relative L2),\nlower is better", "share"),
}
MOST_MAPS = 6


def quality(subject: Subject) -> Figure | NoFigure:
    rows = measured(subject.rows)
    rows = rows[(rows["kind"] != "dense") & rows["recall"].notna()]
    if rows.empty:
        return QUALITY.missing(subject, "no row has a recall")
    length = fullest_length(rows)
    rows = usual_budget(rows[rows["seq_len_kv"] == length])
    parts = []
    for level, part in by_tile(rows):
        part = one_per_point(part, ["label"]).sort_values("recall", ascending=False)
        parts += [tidy(part, row=level, panel=axis.label, x=part[measure]) for measure, axis in MEASURES.items()]
    parts = [part for part in (part.dropna(subset=["x"]) for part in parts) if len(part)]
    axes = {axis.label: axis for measure, axis in MEASURES.items() if rows[measure].notna().any()}
    return QUALITY.figure(subject, "dots", f"{at_length(length)}, {budgets(rows)}", None, axes, parts)


def by_length(subject: Subject) -> Figure | NoFigure:
    rows = subject.rows[subject.rows["kind"] == "selection"]
    if measured(rows).dropna(subset=["recall"])["seq_len_kv"].nunique() < 2:
        return BY_LENGTH.missing(subject, "no row has a recall at two lengths")
    rows = usual_budget(rows)
    rows = pd.concat([rows[rows["recall"].notna()], failed(rows)])
    parts = []
    for level, part in by_tile(rows):
        part = one_per_point(part, ["label", "seq_len_kv"]).sort_values("seq_len_kv")
        part = part[part["label"].isin(part.loc[part["recall"].notna(), "label"])]
        if part["seq_len_kv"].nunique() > 1:
            parts.append(with_ends(tidy(part, panel=level, x=part["seq_len_kv"], y=part["recall"])))
    if not parts:
        return BY_LENGTH.missing(subject, "no budget and tile has a recall at two lengths")
    return BY_LENGTH.figure(subject, "lines", budgets(rows), LENGTH, dict.fromkeys(names(parts), RECALL), parts)


def by_levels(subject: Subject) -> Figure | NoFigure:
    rows = measured(subject.rows)
    rows = usual_budget(rows[(rows["kind"] == "selection") & rows["recall"].notna()])
    varied = rows.groupby(["label", "seq_len_kv", "query_tile"])["levels"].transform("nunique") > 1
    if not varied.any():
        return BY_LEVELS.missing(subject, "no method was run with two level counts at one length and budget")
    length = rows.loc[varied, "seq_len_kv"].max()
    parts = []
    for level, part in by_tile(rows[rows["seq_len_kv"] == length]):
        part = part.drop_duplicates(["label", "levels"]).sort_values("levels")
        moves = varied.loc[part.index]
        if moves.any():
            parts.append(tidy(part, panel=level, x=part["levels"].where(moves), y=part["recall"]))
    x = Axis("levels walked (1 is a single pass)", "count")
    about = f"{at_length(length)}, {budgets(rows)}; a method with one level count goes across"
    return BY_LEVELS.figure(subject, "lines", about, x, dict.fromkeys(names(parts), RECALL), parts)


def by_budget(subject: Subject) -> Figure | NoFigure:
    rows = measured(subject.rows)
    rows = rows[(rows["kind"] != "dense") & rows["recall"].notna()]
    varied = rows[rows.groupby(["label", "seq_len_kv", "query_tile"])["top_k"].transform("nunique") > 1]
    if varied.empty:
        return BY_BUDGET.missing(subject, "no method was run with two budgets at one length")
    length = varied["seq_len_kv"].max()
    varied = varied[varied["seq_len_kv"] == length]
    tile = usual_tile(varied)
    varied = one_per_point(varied[varied["query_tile"] == tile], ["label", "top_k"]).sort_values("top_k")
    varied = varied.assign(shown=varied["label"])
    rivals = varied[varied["kind"] == "selection"]
    parts = [
        tidy(rivals, panel=RECALL.label, x=rivals["top_k"], y=rivals["recall"]),
        tidy(varied, panel=MASS.label, x=varied["top_k"], y=varied["mass_kept"]),
    ]
    x = Axis("blocks kept by rank, K", "count", log=True)
    about = f"{at_length(length)}, tile {integer(varied['query_tile'].iloc[0])}"
    axes = {axis.label: axis for axis, part in zip((RECALL, MASS), parts) if len(part)}
    return BY_BUDGET.figure(subject, "lines", about, x, axes, [part for part in parts if len(part)])


def by_head(subject: Subject) -> Figure | NoFigure:
    """A map per method, layers by heads: from the cells themselves, since a summary is a mean over them."""
    rows = measured(subject.cells)
    rows = rows[(rows["kind"] == "selection") & rows["recall_by_head"].notna()]
    if rows.empty:
        return BY_HEAD.missing(subject, "no selection's recall is known head by head")
    length = fullest_length(rows)
    rows = usual_budget(rows[rows["seq_len_kv"] == length])
    tile = usual_tile(rows)
    rows = one_per_point(rows[rows["query_tile"] == tile], ["label", "layer"])
    best = rows.groupby("label")["recall"].mean().sort_values(ascending=False)
    kept = list(best.index[:MOST_MAPS])
    parts = [_map(rows[rows["label"] == label].sort_values("layer"), label) for label in kept]
    left = [label for label in best.index if label not in kept]
    notes = (f"Not shown, of lower recall: {', '.join(left)}.",) if left else ()
    about = f"{at_length(length)}, {budgets(rows)}, tile {integer(tile)}; means over query tiles"
    x = Axis("set of blocks (key/value head, or query head)", "count")
    return BY_HEAD.figure(subject, "heat", about, x, dict.fromkeys(kept, RECALL), parts, notes=notes)


def _map(rows: pd.DataFrame, label: str) -> pd.DataFrame:
    """A row for each head of each layer; a run without layers has layer 0."""
    known = rows.assign(head=rows["recall_by_head"].map(lambda values: list(range(len(values)))), shown=rows["label"])
    cells = known.explode(["head", "recall_by_head"])
    layer = pd.to_numeric(cells["layer"]).fillna(0)
    values = {"x": pd.to_numeric(cells["head"]), "y": layer, "value": pd.to_numeric(cells["recall_by_head"])}
    return tidy(cells.assign(reason=None), panel=label, **values).assign(
        cell=cells["summary_row"].astype(int).to_numpy()
    )
