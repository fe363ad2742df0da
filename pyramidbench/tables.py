"""The result table, defined once: its columns, what each means, and the order of its rows. Renderers only lay it out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pandas as pd

from pyramidbench.frame import Row, Setting, failed, measured
from pyramidbench.units import integer, interval, is_missing, mebibytes, ratio_interval, share, tokens


@dataclass(frozen=True)
class Column:
    """A column of a table: where its value stands in a summary's row, and how people read it.

    `priority`: columns with a higher number go first where there is no room for all.
    """

    key: str
    header: str
    meaning: str
    write: Callable[[Row], str]
    priority: int = 0

    @property
    def is_text(self) -> bool:
        return self.key in ("label", "status", "reason", "pass")


@dataclass(frozen=True)
class TextColumn(Column):
    """A column of words, which stand at the left whatever its key."""

    @property
    def is_text(self) -> bool:
        return True


def _text(key: str) -> Callable[[Row], str]:
    return lambda row: str(row[key])


def _plain(key: str, write: Callable[[float | None], str]) -> Callable[[Row], str]:
    return lambda row: write(row[key])


def _method(row: Row) -> str:
    return f"{row['label']} (bound)" if row["kind"] == "bound" else str(row["label"])


def _time(row: Row) -> str:
    text = interval(row["latency_s"], row["latency_low_s"], row["latency_high_s"])
    return _weak(row) + text


def _speedup(row: Row) -> str:
    return _weak(row) + ratio_interval(row["speedup"], row["speedup_low"], row["speedup_high"])


def _replay(row: Row) -> str:
    return interval(row["graph_latency_s"], row["graph_latency_low_s"], row["graph_latency_high_s"])


def _replay_speedup(row: Row) -> str:
    return ratio_interval(row["graph_speedup"], row["graph_speedup_low"], row["graph_speedup_high"])


def _memory(row: Row) -> str:
    over = "!" if not is_missing(row["memory_flagged"]) and row["memory_flagged"] else ""
    return over + mebibytes(row["peak_memory_bytes"])


def _weak(row: Row) -> str:
    """The mark of a time that rests on few samples, or was taken while the device held itself back."""
    mark = {"low_n": "~", "throttled": "!"}.get(str(row["status"]), "")
    return "" if is_missing(row["latency_s"]) else mark


METHOD = Column("label", "method", "name, or name:preset; a bound is an oracle or a floor, not a rival", _method)
LENGTH = Column("seq_len_kv", "N", "keys, in tokens (k = 1024)", _plain("seq_len_kv", tokens))
TILE = Column(
    "query_tile", "tile", "queries that share one set of blocks; 1 is token level", _plain("query_tile", integer)
)
TOP_K = Column("top_k", "K", "blocks kept by rank, besides those that are always kept", _plain("top_k", integer))
LEVELS = Column("levels", "levels", "levels walked; 1 is a single pass over all blocks", _plain("levels", integer), 2)
MASS_RATIO = Column("mass_ratio", "÷ oracle", "mass kept ÷ what exact Top-K keeps", _plain("mass_ratio", share), 3)
RECALL = Column("recall", "recall", "share of the exact Top-K blocks that was chosen", _plain("recall", share))
MASS = Column("mass_kept", "mass kept", "share of the exact attention that the blocks hold", _plain("mass_kept", share))
OUTSIDE = Column(
    "mass_outside_forced", "outside forced", "the same, of the attention outside the blocks that are always kept",
    _plain("mass_outside_forced", share), 1,
)  # fmt: skip
ERROR = Column(
    "output_error", "error", "relative L2 error of the output against dense fp32", _plain("output_error", share)
)
RESULTS = (
    METHOD, LENGTH, TILE, TOP_K, LEVELS,
    Column("density", "density", "attended pairs ÷ pairs of dense attention", _plain("density", share), 4),
    Column("latency_s", "time, ms", "median of a whole call, ± half its 95 % interval; ~ under 20 samples, ! throttled", _time),
    Column(
        "speedup", "speed-up", "time of the fastest dense method ÷ this time, call by call, ± half its 95 % interval",
        _speedup,
    ),
    Column(
        "graph_latency_s", "replay, ms",
        "the same call replayed as a CUDA graph, without the host's time; of calls that the host bounds", _replay, 2,
    ),
    Column(
        "graph_speedup", "replay speed-up", "replay of the fastest dense method ÷ this replay, pair by pair", _replay_speedup, 2
    ),
    Column(
        "peak_memory_bytes", "MiB", "peak memory of a call above its inputs; ! over 1.5 times the formula", _memory, 3
    ),
    RECALL, MASS, OUTSIDE, ERROR,
)  # fmt: skip
FAILURES = (
    METHOD, LENGTH, TILE, TOP_K,
    Column("status", "status", "how the cell ended", lambda row: str(row["status"])),
    Column("cells", "cells", "cells that ended so", _plain("cells", integer), 1),
    Column("reason", "reason", "why", lambda row: str(row["reason"]) if row["reason"] else "no reason was recorded"),
)  # fmt: skip
METHODS = (
    TextColumn("name", "method", "as --method takes it; `pyramidbench list methods NAME` shows one in full", _text("name")),
    TextColumn("kind", "kind", "dense, selection, or bound (an oracle or a floor, not a rival)", _text("kind"), 2),
    TextColumn(
        "granularity", "tile × block", "queries that share a set × keys of its blocks; 128s: multiples of 128",
        _text("granularity"), 1,
    ),
    TextColumn(
        "selection_cost", "choosing", "how its cost grows with N tokens, in blocks of C keys",
        _text("selection_cost"), 3,
    ),
    TextColumn("passes", "passes", "F forward, B backward, D decode (one query at the end of its keys)", _text("passes")),
    TextColumn("here", "here", "whether it can run on this machine; the reasons are below", _text("here")),
    TextColumn("text", "what it is", "the first line of its description", _text("text"), 4),
)  # fmt: skip
PASS = Column("pass", "pass", "forward, backward (the gradients alone), or train (both)", lambda row: str(row["pass"]))


def result_columns(summary: pd.DataFrame) -> tuple[Column, ...]:
    """RESULTS, those of replays only where a row has one."""
    replayed = bool(summary["graph_latency_s"].notna().any())
    return tuple(column for column in RESULTS if replayed or not column.key.startswith("graph_"))


def failure_columns(summary: pd.DataFrame) -> tuple[Column, ...]:
    """FAILURES, with the pass of each row where a run has more than one: other tables hold a single one."""
    several = summary["pass"].nunique() > 1
    return (FAILURES[0], PASS, *FAILURES[1:]) if several else FAILURES


@dataclass(frozen=True)
class Group:
    """Rows that one looks at together: one length, one tile, one budget."""

    length: float
    rows: list[Row]


def groups(setting: Setting) -> Iterator[Group]:
    """The measured rows of a setting by length, tile and K: dense first, then by falling mass kept. Dense rows, which
    have neither tile nor K, stand in every group of their length."""
    rows = measured(setting.rows)
    for length, here in rows.groupby("seq_len_kv"):
        dense = here[here["query_tile"].isna()].sort_values("latency_s")
        chosen = here[here["query_tile"].notna()].sort_values("mass_kept", ascending=False)
        parts = [part for _, part in chosen.groupby(["query_tile", "top_k"], dropna=False)] or [chosen]
        for part in parts:
            yield Group(float(str(length)), rows_of(pd.concat([dense, part])))


def failures(summary: pd.DataFrame) -> list[Row]:
    """The rows that gave no number, by method and length."""
    return rows_of(failed(summary).sort_values(["label", "seq_len_kv", "query_tile"]))


def rows_of(summary: pd.DataFrame) -> list[Row]:
    return summary.to_dict("records")
