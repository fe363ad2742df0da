"""summary.md: the report in short, for a README or a pull request."""

from __future__ import annotations

import html
from collections.abc import Sequence

import pandas as pd

from pyramidbench.comparable import fullest_length
from pyramidbench.frame import Setting, measured
from pyramidbench.reporting.evidence import Evidence
from pyramidbench.reporting.facts import how_measured
from pyramidbench.reporting.figure import Figure, Table
from pyramidbench.tables import RESULTS, Column, failure_columns, failures, groups
from pyramidbench.units import one_line


def summary_markdown(evidence: Evidence, pictures: Sequence[Figure]) -> str:
    """The verdict, the rows at the length that most selections reached, the figures, what failed, and the commands."""
    lines = [f"# {_escaped(evidence.title)}"]
    for name, judged in evidence.verdicts:
        lines += [] if name is None else ["", f"## {_escaped(name)}"]
        lines += ["", _escaped(judged.text)]
        lines += ["", *(f"- {_escaped(note)}" for note in judged.caveats)] if judged.caveats else []
    for setting in evidence.settings:
        lines += _setting(setting)
    lines += [line for figure in pictures for line in ("", f"![{_escaped(figure.title)}]({figure.name}.png)")]
    for figure in pictures:
        lines += [] if figure.table is None else _typed_table(figure.table)
    columns = failure_columns(evidence.summary)
    lost = [[column.write(row) for column in columns] for row in failures(evidence.summary)]
    if lost:
        header = [column.header for column in columns]
        lines += ["", "## Cells without a number", "", *_table(header, lost, [column.is_text for column in columns])]
    return "\n".join([*lines, *_facts(evidence)]) + "\n"


def _setting(setting: Setting) -> list[str]:
    rows = measured(setting.rows)
    rivals = rows[rows["kind"] == "selection"]
    length = fullest_length(rivals if len(rivals) else rows) if len(rows) else None
    shown = [group for group in groups(setting) if group.length == length]
    table = [[column.write(row) for column in RESULTS] for group in shown for row in group.rows]
    if not table:
        return []
    known = [i for i, column in enumerate(RESULTS) if _has_values(column, rows)]
    header, texts = [RESULTS[i].header for i in known], [RESULTS[i].is_text for i in known]
    kept = [[row[i] for i in known] for row in dict.fromkeys(map(tuple, table))]
    return ["", f"## {_escaped(setting.text)}", "", *_table(header, kept, texts)]


def _has_values(column: Column, rows: pd.DataFrame) -> bool:
    return bool(rows[column.key].notna().any())


def _typed_table(table: Table) -> list[str]:
    texts = [True, *(False for _ in table.header[1:])]
    notes = [line for note in table.notes for line in ("", _escaped(note))]
    return [
        "",
        f"## {_escaped(table.title)}",
        "",
        *_table(table.header, [list(row) for row in table.rows], texts),
        *notes,
    ]


def _facts(evidence: Evidence) -> list[str]:
    lines = ["", "## How it was measured"]
    for name, source in evidence.runs.items():
        lines += ["", *([] if name is None else [f"### {_escaped(name)}", ""])]
        lines += [
            f"- {_escaped(fact)}: {_code(text) if fact == 'command' else _escaped(text)}"
            for fact, text in how_measured(source).items()
        ]
    return lines


def _table(header: Sequence[str], rows: list[list[str]], is_text: Sequence[bool]) -> list[str]:
    return [
        "| " + " | ".join(header) + " |",
        "|" + "|".join(" --- " if text else " ---: " for text in is_text) + "|",
        *("| " + " | ".join(_escaped(cell) for cell in row) + " |" for row in rows),
    ]


def _escaped(text: str) -> str:
    """Text from a run as Markdown that shows it letter by letter."""
    marked = "".join(f"\\{c}" if c in "\\`*[]|#~" else c for c in one_line(text))
    return html.escape(marked, quote=False)


def _code(text: str) -> str:
    fence = "``" if "`" in text else "`"
    return f"{fence}{text}{fence}"
