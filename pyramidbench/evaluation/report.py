"""The report of an evaluation: a table on the terminal, and summary.md with figures and the rows as CSV."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table

from pyramidbench.errors import UserError
from pyramidbench.evaluation.figures import draw_all
from pyramidbench.evaluation.journal import Evaluation
from pyramidbench.evaluation.summary import MOSTLY_DENSE, summarise
from pyramidbench.units import integer, is_missing, share, significant, tokens

Row = dict[Any, Any]
ROOMY = 130
"""Characters of a terminal line from which all columns are shown."""


@dataclass(frozen=True)
class Column:
    """A column of the table: its header, what it means, and how a row's value is written. A narrow terminal has no room
    for those that are `is_wide`."""

    header: str
    meaning: str
    write: Callable[[Row], str]
    is_text: bool = False
    is_wide: bool = False


def _score(row: Row) -> str:
    if is_missing(row["low"]):
        return significant(row["score"], 4)
    return f"{row['score']:.2f} ({row['low']:.2f}–{row['high']:.2f})"


def _difference(row: Row) -> str:
    return "–" if is_missing(row["difference"]) else f"{row['difference']:+.3f}"


def _choice(row: Row) -> str:
    if is_missing(row["choice_share"]):
        return "–"
    return share(row["choice_share"]) + (" dense in disguise" if row["choice_share"] < MOSTLY_DENSE else "")


def _at(row: Row) -> str:
    if not is_missing(row["shots"]):
        given = "" if is_missing(row["shots_given"]) else f" ({integer(row['shots_given'])})"
        return f"{tokens(row['shots'])} shots{given}" if row["shots"] else "zero-shot"
    return tokens(row["length"])


COLUMNS = (
    Column("task", "what was asked", lambda row: row["task"], True),
    Column(
        "text", "what the prompts are made of", lambda row: "–" if is_missing(row["text"]) else row["text"], True, True
    ),
    Column("at", "length of the prompt, or tokens of worked examples (how many)", _at),
    Column("method", "attention", lambda row: row["method"], True),
    Column("K", "blocks kept by rank, besides those that are always kept", lambda row: integer(row["top_k"])),
    Column("n", "samples", lambda row: integer(row["samples"])),
    Column("score", "loss in nats per token, or the share that was right with its 95 % interval (Wilson)", _score),
    Column("− dense", "mean difference to dense attention on the same samples", _difference),
    Column("some", "mean share of several answers that were right", lambda row: share(row["partial"]), is_wide=True),
    Column("choice", f"share of queries with more blocks than K; marked under {MOSTLY_DENSE:g}", _choice),
    Column("density", "attended ÷ visible pairs", lambda row: share(row["density"]), is_wide=True),
    Column("s", "median wall time of a sample, seconds", lambda row: significant(row["seconds"])),
)


def show(console: Console, evaluation: Evaluation) -> None:
    """Print the table, and a line for each reason why rows have no number."""
    table = Table(title="Evaluation")
    shown = [column for column in COLUMNS if not column.is_wide or console.width >= ROOMY]
    for column in shown:
        table.add_column(column.header, justify="left" if column.is_text else "right")
    for row in _rows(evaluation.frame):
        table.add_row(*(column.write(row) for column in shown))
    console.print(table)
    for line in _gaps(evaluation.frame):
        console.print(line, markup=False, soft_wrap=True)


def write_report(evaluation: Evaluation, folder: Path | None = None) -> Path:
    """Write summary.md, the figures and results.csv into reports/<name of the evaluation>; returns summary.md.

    Raises:
        UserError: the folder cannot be written.
    """
    folder = folder or Path("reports") / evaluation.path.resolve().name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        pictures = draw_all(evaluation.frame, folder)
        evaluation.frame.to_csv(folder / "results.csv", index=False)
        (folder / "summary.md").write_text(_summary(evaluation, pictures), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write the report to '{folder}': {error.strerror or error}.") from None
    return folder / "summary.md"


def _rows(frame: pd.DataFrame) -> list[Row]:
    return summarise(frame).to_dict("records")


def _gaps(frame: pd.DataFrame) -> list[str]:
    """Why rows have no number, each reason once."""
    lost = frame[frame["status"] != "ok"]
    counts = Counter(zip(lost["method"], lost["reason"]))
    return [f"{count} rows of {method}: {why}" for (method, why), count in counts.items()]


def _summary(evaluation: Evaluation, pictures: dict[str, str]) -> str:
    manifest, rows = evaluation.manifest, _rows(evaluation.frame)
    done, planned = len(evaluation.records), len(manifest.cells)
    lines = [f"# {manifest.model}: what is lost with the attention swapped", ""]
    lines += [f"{done} of {planned} planned rows are measured."] if done < planned else []
    lines += [f"![{text}]({name})" for name, text in pictures.items()]
    lines += ["", "| " + " | ".join(column.header for column in COLUMNS) + " |"]
    lines += ["|" + "|".join(" --- " if column.is_text else " ---: " for column in COLUMNS) + "|"]
    lines += ["| " + " | ".join(column.write(row) for column in COLUMNS) + " |" for row in rows]
    lines += ["", *_gaps(evaluation.frame), *(f"- {column.header}: {column.meaning}" for column in COLUMNS), ""]
    lines += [
        f"- model: {manifest.model}, SHA-256 of its weights {manifest.model_sha256}",
        *(f"- text: {label}, SHA-256 {digest}" for label, digest in manifest.texts.items()),
        f"- device: {evaluation.device.name}, torch {evaluation.device.torch}",
        f"- command: `pyramidbench {' '.join(manifest.argv)}`",
    ]
    return "\n".join(lines) + "\n"
