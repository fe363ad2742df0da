"""What a mark of a chart says when it is pointed at: the cell's numbers, why it has none, and the command that repeats it."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass

from pyramidbench.errors import UserError
from pyramidbench.frame import BUDGET, Row, measured
from pyramidbench.registry import create
from pyramidbench.reporting.evidence import Evidence
from pyramidbench.tables import MASS_RATIO, RESULTS
from pyramidbench.units import MISSING, integer, is_missing, one_line

COLUMNS = (*RESULTS, MASS_RATIO)


@dataclass(frozen=True)
class CellText:
    """A row of the summary in words. `numbers` are (name, value) pairs, those that are missing left out."""

    title: str
    status: str
    reason: str
    numbers: tuple[tuple[str, str], ...]
    command: str
    remark: str


def cell_texts(evidence: Evidence) -> list[CellText]:
    """A text for each row of the summary, in its order."""
    summary = evidence.summary
    has_numbers = set(measured(summary).index)
    texts = []
    for index, row in zip(summary.index, summary.to_dict("records")):
        argv = evidence.source_of(row["run"]).manifest.get("argv", [])
        command, remark = repeat(row, list(argv))
        shown = [(column.header, one_line(column.write(row))) for column in COLUMNS[1:]]
        numbers = tuple((name, text) for name, text in shown if text != MISSING) if index in has_numbers else ()
        reason = "" if is_missing(row["reason"]) else one_line(row["reason"])
        title = one_line(COLUMNS[0].write(row))
        texts.append(CellText(title, str(row["status"]), reason, numbers, command, remark))
    return texts


def repeat(row: Row, argv: list[str]) -> tuple[str, str]:
    """The command that measures this row alone, and what it cannot say: parameters that only a suite can set.

    `argv` is the run's own command line: the file of a captured input is named there.
    """
    flags = {
        "--seq": integer(row["seq_len"]),
        "--seq-kv": "" if row["seq_len"] == row["seq_len_kv"] else integer(row["seq_len_kv"]),
        "--method": str(row["method"]),
        "--pass": "" if row["pass"] == "forward" else str(row["pass"]),
        "--top-k": _given(row["top_k"]),
        "--block-size": _given(row["block_size"]),
        "--query-tile": _given(row["query_tile"]),
        "--levels": _levels(row),
        **_tensors(row, argv),
    }
    words = [word for flag, value in flags.items() if value for word in (flag, value)]
    words += [] if row["causal"] else ["--no-causal"]
    words += [] if is_missing(row["seed"]) or not row["seed"] else ["--seed", integer(row["seed"])]
    beyond = _beyond_flags(row)
    remark = f"and in a suite: {beyond}" if beyond else ""
    return shlex.join(["pyramidbench", "sweep", *words]), remark


def _tensors(row: Row, argv: list[str]) -> dict[str, str]:
    """The flags of the input; a capture brings its own sizes."""
    if is_missing(row["layers"]):
        heads, kv_heads = integer(row["heads"]), integer(row["kv_heads"])
        return {
            "--heads": heads if heads == kv_heads else f"{heads}:{kv_heads}", "--head-dim": integer(row["head_dim"]),
            "--batch": integer(row["batch"]), "--dtype": str(row["dtype"]), "--input": one_line(row["input"]),
        }  # fmt: skip
    file = argv[argv.index("--input") + 1] if "--input" in argv[:-1] else "CAPTURE.safetensors"
    return {"--dtype": str(row["dtype"]), "--input": file, "--layers": str(row["layers"]).replace(" ", "")}


def _given(value: float | None) -> str:
    return "" if is_missing(value) else integer(value)


def _levels(row: Row) -> str:
    """The levels where they were asked for; "auto" and methods without a hierarchy need no flag."""
    asked = _parameters(row).get("levels")
    return "" if asked is None or asked == "auto" else str(asked)


def _beyond_flags(row: Row) -> str:
    """Parameters that differ from the preset's and have no flag, as a suite writes them."""
    parameters = _parameters(row)
    try:
        made = create(row["method"])
        usual = {name: getattr(made, name) for name in parameters}
    except (UserError, AttributeError):
        return ""
    own = {name: value for name, value in parameters.items() if name not in BUDGET and usual[name] != value}
    return ", ".join(f"{name} = {json.dumps(value)}" for name, value in own.items())


def _parameters(row: Row) -> Row:
    return {} if is_missing(row["parameters"]) else dict(json.loads(row["parameters"]))
