"""A comparison as people read it: the columns of its table, its sentences, and Markdown for a pull request."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pandas as pd

from pyramidbench.comparing.changes import QUALITY
from pyramidbench.comparing.comparison import Comparison
from pyramidbench.comparing.thresholds import Threshold
from pyramidbench.comparing.verdicts import Difference
from pyramidbench.frame import Row
from pyramidbench.record import Record
from pyramidbench.tables import Column, TextColumn
from pyramidbench.units import (
    MISSING,
    integer,
    is_missing,
    mebibytes,
    milliseconds,
    one_line,
    percent,
    significant,
    tokens,
)

ORDER = ("faster", "slower", "less", "more", "better", "worse", "same", "unclear", "lost", "gained")
WORSE = ("slower", "more", "worse", "lost")
WORDS = {"recall": "recall", "mass_kept": "mass", "output_error": "error"}
HOW = {
    "paired": "median of paired ratios, as the two were measured in turns",
    "bootstrap": "raw samples of both, resampled; they were not taken in turns, so drift between the two is not in it",
    "intervals": "the two cells' own intervals, as no raw samples are kept; drift between the two is not in it",
}


def columns(comparison: Comparison) -> tuple[Column, ...]:
    """The columns of the table: what tells its rows apart, then time, memory and quality of B against A."""
    frame = comparison.frame
    varied = [
        Column(key, header, meaning, _plain(key), priority)
        for key, header, meaning, priority in VARYING
        if frame[key].astype(str).nunique() > 1
    ]
    texts = [
        TextColumn(key, key.replace("_", " "), "", _text(key), 3)
        for key in ("dtype", "pass", "input")
        if frame[key].nunique() > 1
    ]
    return (
        TextColumn("label", "method", f"of B, {one_line(comparison.b)}; A is {one_line(comparison.a)}", _text("label")),
        Column("seq_len_kv", "N", "keys, in tokens (k = 1024)", lambda row: tokens(row["seq_len_kv"])),
        *varied,
        *texts,
        *MEASURES,
    )


def _plain(key: str) -> Callable[[Row], str]:
    return lambda row: integer(row[key])


def _text(key: str) -> Callable[[Row], str]:
    return lambda row: MISSING if is_missing(row[key]) else str(row[key])


def _interval(row: Row) -> str:
    if is_missing(row["time_ratio"]):
        return MISSING
    low, high = row["time_ratio_low"], row["time_ratio_high"]
    mark = "~" if "low_n" in (row["status_a"], row["status_b"]) else ""
    return f"{mark}{_ratio(row['time_ratio'])} [{_ratio(low)}, {_ratio(high)}]"


def _ratio(value: float) -> str:
    return f"{value:.3f}" if value < 10 else significant(value, 4)


def _memory(row: Row) -> str:
    verdict, ratio = _verdict(row["memory_verdict"]), row["memory_ratio"]
    return verdict if is_missing(ratio) or verdict not in ("more", "less") else f"{verdict} ×{significant(ratio)}"


def _quality(row: Row) -> str:
    """The verdict, and the column that moved most where one did."""
    verdict = _verdict(row["quality_verdict"])
    known = {name: row[f"{name}_change"] for name in QUALITY if not is_missing(row[f"{name}_change"])}
    if not known or verdict not in ("better", "worse", "unclear"):
        return verdict
    sign = 1.0 if verdict == "better" else -1.0
    name = max(known, key=lambda name: sign * QUALITY[name] * known[name])
    return f"{verdict}: {WORDS[name]} {known[name]:+.3f}"


def _verdict(verdict: str) -> str:
    return MISSING if verdict == "none" else verdict


VARYING = (
    ("query_tile", "tile", "queries that share one set of blocks", 1),
    ("top_k", "K", "blocks kept by rank", 1),
    ("levels", "levels", "levels walked", 2),
    ("layer", "layer", "layer of the captured model", 1),
    ("batch", "batch", "sequences in the call", 2),
    ("heads", "heads", "query heads", 2),
    ("kv_heads", "kv heads", "key/value heads", 2),
    ("head_dim", "head dim", "dimension of a head", 2),
    ("seed", "seed", "seed of the inputs", 3),
)
MEASURES = (
    Column("latency_a_s", "A, ms", "median time of a call", lambda row: milliseconds(row["latency_a_s"]), 4),
    Column("latency_b_s", "B, ms", "the same of B", lambda row: milliseconds(row["latency_b_s"]), 4),
    Column("time_ratio", "B ÷ A", "ratio of times with its 95 % interval; ~ under 20 samples of one", _interval),
    TextColumn("time_verdict", "time", "B is faster or slower than A by more than the margin, the same, or unclear",
               lambda row: _verdict(row["time_verdict"])),
    TextColumn("memory_verdict", "memory", "B needs more, less or the same; × peak of B ÷ peak of A", _memory, 2),
    TextColumn("quality_verdict", "quality", "B is better or worse in recall, attention mass or output error", _quality),
    TextColumn("interval_by", "by", "what the interval is made of", _text("interval_by"), 5),
)  # fmt: skip


def sentences(comparison: Comparison) -> list[str]:
    """What the comparison comes to, and what a reader must bear in mind."""
    frame = comparison.frame
    lines = [f"A: {comparison.a}. B: {comparison.b}. {_cells(len(frame))} compared, B against A."]
    lines += [line for line in (_time_line(frame, comparison), *_other_lines(frame, comparison)) if line]
    hows = [how for how in HOW if (frame["interval_by"] == how).any()]
    lines += [f"Interval by {how}: {HOW[how]}." for how in hows]
    lines += [
        f"Only in {side}: {_cells(len(records))} ({_briefly(records)})."
        for side, records in (("A", comparison.only_a), ("B", comparison.only_b))
        if records
    ]
    noted = frame["notes"].dropna()
    lines += [f"{_cells(count)}: {note}." for note, count in noted.value_counts().items()]
    throttled = int(((frame["status_a"] == "throttled") | (frame["status_b"] == "throttled")).sum())
    lines += [f"{_cells(throttled)} with a throttled device on one side."] if throttled else []
    return lines + [f"{note}." for note in comparison.notes]


def _time_line(frame: pd.DataFrame, comparison: Comparison) -> str:
    ratios = frame["time_ratio"].dropna()
    mean = f"; ratio of times {_ratio(float(np.exp(np.log(ratios).mean())))} (geometric mean)" if len(ratios) else ""
    counts = _counts(frame["time_verdict"])
    return (
        f"Time, margin {percent(comparison.margins.time)}: {counts}{mean}." if counts else "No cell has a time in both."
    )


def _other_lines(frame: pd.DataFrame, comparison: Comparison) -> list[str]:
    memory, quality = _counts(frame["memory_verdict"]), _counts(frame["quality_verdict"])
    return [
        f"Memory: {memory}." if memory else "",
        f"Quality, margin {comparison.margins.quality:g}: {quality}." if quality else "",
    ]


def _counts(verdicts: pd.Series) -> str:
    counts = verdicts.value_counts()
    return ", ".join(f"{counts[word]} {word}" for word in ORDER if word in counts)


def _cells(count: int) -> str:
    return "1 cell" if count == 1 else f"{count} cells"


def _briefly(records: Sequence[Record]) -> str:
    names = list(dict.fromkeys(f"{record.method} at {tokens(record.seq_len_kv)}" for record in records))
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def regression(threshold: Threshold, difference: Difference) -> str:
    """One cell that a threshold calls a regression, as a line."""
    a, b = difference.pair.a, difference.pair.b
    where = f"{b.method} at {tokens(b.seq_len_kv)}" + ("" if b.layer is None else f", layer {b.layer}")
    if difference.presence == "lost":
        return f"{where}: no number any more, {b.status}" + (f" ({b.reason})" if b.reason else "")
    if threshold.measure == "slower":
        assert difference.time is not None
        return f"{threshold}: {where} takes {_ratio(difference.time.value.median)} times as long as before"
    if threshold.measure == "memory":
        return f"{threshold}: {where} needs {mebibytes(b.peak_memory_bytes)} MiB instead of {mebibytes(a.peak_memory_bytes)}"
    moved = [
        f"{WORDS[name]} {change.value.median:+.3f}"
        for name, change in difference.quality.items()
        if change.value.median
    ]
    return f"{threshold}: {where} has {', '.join(moved)}"


def markdown(comparison: Comparison) -> str:
    """The comparison for a pull request."""
    shown = columns(comparison)
    rows = [[_marked(column.write(row)) for column in shown] for row in comparison.frame.to_dict("records")]
    about, *notes = sentences(comparison)
    lines = [_escaped(about), "", *_table(shown, rows), "", *(f"- {_escaped(note)}" for note in notes)]
    return "\n".join(lines) + "\n"


def _table(shown: Iterable[Column], rows: Iterable[Sequence[str]]) -> list[str]:
    shown = list(shown)
    return [
        "| " + " | ".join(column.header for column in shown) + " |",
        "|" + "|".join(" --- " if column.is_text else " ---: " for column in shown) + "|",
        *("| " + " | ".join(row) + " |" for row in rows),
    ]


def _marked(text: str) -> str:
    """A cell of the table; what got worse is bold."""
    return f"**{_escaped(text)}**" if text.split(" ")[0].rstrip(":") in WORSE else _escaped(text)


def _escaped(text: str) -> str:
    """Text as Markdown that shows it letter by letter."""
    marked = "".join(f"\\{c}" if c in "\\`*[]|#~_" else c for c in one_line(text))
    return html.escape(marked, quote=False)
