"""The report of an evaluation: a table on the terminal, and summary.md with figures and the rows as CSV."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table

from pyramidbench.errors import UserError
from pyramidbench.evaluation.claims import COMPARABLE, DENSE_CAN, Judgement, judge
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
    Column(
        "s",
        "median wall time of a sample, seconds; it says little where other work shared the device",
        lambda row: significant(row["seconds"]),
    ),
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


def write_report(
    evaluations: Sequence[Evaluation], folder: Path | None = None, times: Evaluation | None = None
) -> Path:
    """Write summary.md, the figures and results.csv of one or several evaluations; returns summary.md.

    folder: reports/<name of the first evaluation> without it. times: an evaluation that had the device to itself, whose times
    stand beside the quality; without it figures have no times, since evaluations may share a device.

    Raises:
        UserError: the folder cannot be written, or the evaluations are of different models or devices.
    """
    models = {(one.manifest.model, one.manifest.model_sha256, one.device.name) for one in evaluations}
    if len(models) > 1:
        told = ", ".join(f"{model} on {device}" for model, _, device in sorted(models, key=str))
        raise UserError(f"one report is of one model on one device; these are of {told}: write one for each.")
    folder = folder or Path("reports") / evaluations[0].path.resolve().name
    frame = pd.concat([one.frame for one in evaluations], ignore_index=True)
    frame = frame.drop_duplicates("cell", ignore_index=True) if len(evaluations) > 1 else evaluations[0].frame
    try:
        folder.mkdir(parents=True, exist_ok=True)
        pictures = draw_all(frame, folder, None if times is None else times.frame)
        frame.to_csv(folder / "results.csv", index=False)
        (folder / "summary.md").write_text(_summary(evaluations, frame, pictures, times), encoding="utf-8")
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


def _summary(
    evaluations: Sequence[Evaluation], frame: pd.DataFrame, pictures: dict[str, str], times: Evaluation | None
) -> str:
    manifest, device = evaluations[0].manifest, evaluations[0].device
    planned, missing = sum(len(one.manifest.cells) for one in evaluations), sum(one.missing for one in evaluations)
    lines = [f"# {manifest.model}: what is lost with the attention swapped", ""]
    lines += [f"{planned - missing} of {planned} planned rows are measured.", ""] if missing else []
    lines += [part for name, text in pictures.items() for part in (f"![{text}]({name})", "")]
    lines += [*_claims(frame), "## Every task, length and attention", ""]
    lines += ["| " + " | ".join(column.header for column in COLUMNS) + " |"]
    lines += ["|" + "|".join(" --- " if column.is_text else " ---: " for column in COLUMNS) + "|"]
    lines += ["| " + " | ".join(column.write(row) for column in COLUMNS) + " |" for row in _rows(frame)]
    lines += ["", *_gaps(frame), *(f"- {column.header}: {column.meaning}" for column in COLUMNS), ""]
    texts = {label: digest for one in evaluations for label, digest in one.manifest.texts.items()}
    lines += [
        f"- model: {manifest.model}, SHA-256 of its weights {manifest.model_sha256}",
        *(f"- text: {label}, SHA-256 {digest}" for label, digest in texts.items()),
        f"- device: {device.name}, torch {device.torch}",
        *_ran(frame),
        *(f"- command: `{_command(one)}`" for one in evaluations),
        *([] if times is None else [f"- times of the figures: `{_command(times)}`, alone on {times.device.name}"]),
    ]
    return "\n".join(lines) + "\n"


def _command(evaluation: Evaluation) -> str:
    return "pyramidbench " + " ".join(evaluation.manifest.argv)


def _ran(frame: pd.DataFrame) -> list[str]:
    """What ran each method, and in which dtype."""
    known = frame.dropna(subset=["backend"])
    runs: dict[tuple[str, str], dict[str, None]] = {}
    for dtype, backend, method in known[["dtype", "backend", "method"]].itertuples(index=False):
        runs.setdefault((dtype, backend), {})[method] = None
    return [f"- {backend} in {dtype} ran {', '.join(methods)}" for (dtype, backend), methods in runs.items()]


def _claims(frame: pd.DataFrame) -> list[str]:
    """The paper's claims and ours, with what the rows say."""
    judged = judge(frame)
    if not judged:
        return []
    lines = [
        "## Claims", "",
        "The same samples under both attentions at one budget, where at least half of the queries had a choice; of several "
        "answers the share that was right counts. Mean of the differences with its 95 % interval (Student's t); above 0 the "
        f"pyramid is better. Confirmed: the interval lies above 0, or, for \"comparable\", within {COMPARABLE:g}. Not "
        "confirmed: it lies below 0. Not testable: the prompts fit into the blocks that are kept. Retrieval and recall count "
        f"at those lengths where dense attention gets {DENSE_CAN:.0%} right or more, sets with choices where it does better "
        "than a guess (the interval of all its answers, Wilson, lies above chance).", "",
        "| claim | by | method | against | budget | pairs | difference | choice | verdict |",
        "| --- | --- | --- | --- | --- | ---: | ---: | ---: | --- |",
    ]  # fmt: skip
    return [*lines, *map(_claim_row, judged), ""]


def _claim_row(one: Judgement) -> str:
    size = "–" if one.mean is None else f"{one.mean:+.3f} ({one.low:+.3f} to {one.high:+.3f})"
    cells = [
        one.claim.text, one.claim.source, one.method, one.claim.rival, one.budget.removeprefix("keep="), str(one.pairs), size,
        share(one.choice_share), one.verdict,
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"
