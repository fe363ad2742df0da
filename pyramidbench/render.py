"""What a person sees in a terminal: the only module that prints. Not a terminal: plain aligned ASCII, nothing cut off."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import pandas as pd
from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from pyramidbench.cell import Cell
from pyramidbench.facts import Facts
from pyramidbench.frame import Row, Setting, measured, settings, summarise
from pyramidbench.recall_table import recall_tables
from pyramidbench.scaling import scalings
from pyramidbench.scaling_table import HEADERS, MEANING, scaling_rows
from pyramidbench.tables import METHODS, Column, failure_columns, failures, groups, result_columns
from pyramidbench.units import MISSING, duration, mebibytes, one_line, tokens
from pyramidbench.verdict import caveats

ASCII = str.maketrans({"±": "+-", "×": "x", "÷": "/", "–": "-", "…": "...", "²": "^2", "≥": ">="})


class Planned(Protocol):
    """What a plan says about one cell."""

    @property
    def cell(self) -> Cell: ...
    @property
    def verdict(self) -> str: ...
    @property
    def reason(self) -> str | None: ...
    @property
    def seconds(self) -> float | None: ...
    @property
    def memory_bytes(self) -> float | None: ...


def show_results(console: Console, frame: pd.DataFrame) -> None:
    """Print a run's rows (columns of `record.columns()`), averaged over layers and seeds: a table for each setting,
    then what failed, and what the columns mean."""
    summary = summarise(frame)
    columns = result_columns(summary)
    for setting in settings(summary):
        blocks = [group.rows for group in groups(setting)]
        if blocks:
            show_columns(console, setting.text, columns, blocks)
            print_line(console, _reference(setting))
            cells = int(measured(setting.rows)["cells"].max())
            if cells > 1:
                print_line(console, f"A row is the mean over layers and seeds: up to {cells} cells.")
            _show_scaling(console, setting)
    if summary.empty:
        print_line(console, "This run holds no cell.")
    elif measured(summary).empty:
        print_line(console, "No cell gave a number.")
    else:
        explain(console, columns)
    for note in caveats(summary):
        print_line(console, f"! {note}", "yellow")
    if lost := failures(summary):
        show_columns(console, "Cells without a number", failure_columns(summary), [lost])


def _show_scaling(console: Console, setting: Setting) -> None:
    """How time grows with the length, where there are several."""
    rows = scaling_rows(scalings(setting))
    if rows:
        show_table(console, "How time grows with the length", rows, HEADERS)
        print_line(console, MEANING, "dim")


def show_recall(console: Console, frame: pd.DataFrame, by: Sequence[str]) -> None:
    """Print quality only, broken down by any of `recall_table.BREAKDOWNS`; nothing is averaged but layers, seeds and
    heads that are not asked for.

    Raises:
        UserError: an unknown breakdown.
    """
    tables = recall_tables(frame, by)
    for title, columns, blocks in tables:
        show_columns(console, title, columns, blocks)
    if not tables:
        print_line(console, "No row has a recall.")
        return
    explain(console, tables[0][1])


def show_plan(console: Console, planned: Iterable[Planned]) -> None:
    """Print what a sweep would do: every cell with its verdict, its estimate, or the reason why it does not run."""
    cells = list(planned)
    several = {plan.cell.direction for plan in cells} != {"forward"}
    rows = [
        [
            plan.cell.method,
            ", ".join(f"{name}={value}" for name, value in plan.cell.parameters.items()),
            tokens(plan.cell.seq_len_kv),
            plan.cell.direction if several else "",
            str(plan.cell.layer) if plan.cell.layer is not None else MISSING,
            plan.cell.input,
            plan.verdict,
            duration(plan.seconds),
            mebibytes(plan.memory_bytes),
            plan.reason or "",
        ]
        for plan in cells
    ]
    names = ["method", "parameters", "N", "pass", "layer", "input", "verdict", "time", "MiB", "reason"]
    show_table(console, "Plan", rows, names)
    running = [plan for plan in cells if plan.verdict == "run"]
    total = sum(plan.seconds or 0.0 for plan in running)
    counts = pd.Series([plan.verdict for plan in cells], dtype=object).value_counts()
    others = "".join(f", {count} {verdict}" for verdict, count in counts.items() if verdict != "run")
    print_line(console, f"{len(running)} of {len(cells)} cells run, in about {duration(total)}{others}.")


def show_methods(console: Console, methods: Sequence[Facts]) -> None:
    """Print what there is to know of methods before one tries them, and then why some cannot run here."""
    rows: list[Row] = [
        {
            **method.model_dump(),
            "passes": method.passes,
            "here": "no" if method.unavailable else "yes",
            "text": method.summary,
        }
        for method in methods
    ]
    show_columns(console, "Methods", METHODS, [rows], "`pyramidbench list methods --json`")
    explain(console, METHODS)
    for method in methods:
        if method.unavailable:
            print_line(console, f"{method.name}: {method.unavailable}", "yellow")


def show_table(console: Console, title: str, rows: Sequence[Sequence[str]], columns: Sequence[str]) -> None:
    """Print a table of texts under the names of its columns; columns that are empty in every row are left out."""
    kept = [i for i in range(len(columns)) if not rows or any(row[i] for row in rows)]
    heads = [(columns[i], not all(_is_number(row[i]) for row in rows)) for i in kept]
    _show(console, title, heads, [[[row[i] for i in kept] for row in rows]], [[Style()] * len(rows)])


def _is_number(text: str) -> bool:
    """Whether a cell stands at the right: a number with or without its unit, or nothing."""
    return not text or text == MISSING or text[0].isdigit()


def show_columns(
    console: Console,
    title: str,
    columns: Sequence[Column],
    blocks: list[list[Row]],
    elsewhere: str = "results.csv and the report",
) -> None:
    """A table of defined columns; where a terminal has no room for all, the least important ones are left out, and a line says
    what has them."""
    shown = list(columns)
    while True:
        texts = [[[column.write(row) for column in shown] for row in rows] for rows in blocks]
        least = max(shown, key=lambda column: column.priority)
        needed = _width([column.header for column in shown if column.key != "reason"], texts)
        if not console.is_terminal or needed <= console.width or least.priority == 0:
            break
        shown.remove(least)
    styles = [[_style(row) for row in rows] for rows in blocks]
    _show(console, title, [(column.header, column.is_text) for column in shown], texts, styles)
    if len(shown) < len(columns):
        hidden = ", ".join(column.header for column in columns if column not in shown)
        print_line(
            console,
            f"Left out for want of width: {hidden}. A wider terminal, {elsewhere} have them.",
            "dim",
        )


def _style(row: Row) -> Style:
    return {"bound": Style(dim=True), "dense": Style(bold=True)}.get(str(row["kind"]), Style())


def _show(
    console: Console,
    title: str,
    heads: list[tuple[str, bool]],
    blocks: list[list[list[str]]],
    styles: list[list[Style]],
) -> None:
    """Lay out texts: with rich in a terminal, as plain columns elsewhere. `heads`: names, and whether text is under
    them."""
    if not console.is_terminal:
        _show_plain(console, title, heads, [row for block in blocks for row in block])
        return
    table = Table(title=Text(one_line(title)), title_justify="left", title_style="bold", header_style="bold")
    for name, is_text in heads:
        foldable = name in ("reason", "what it is", "parameters", "unavailable")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=not foldable, overflow="fold")
    for block, looks in zip(blocks, styles):
        for row, look in zip(block, looks):
            table.add_row(*(Text(one_line(cell)) for cell in row), style=look)
        table.add_section()
    console.print(table)


def _show_plain(console: Console, title: str, heads: list[tuple[str, bool]], rows: list[list[str]]) -> None:
    lines = [[name for name, _ in heads], *([one_line(cell) for cell in row] for row in rows)]
    lines = [[cell.translate(ASCII) for cell in line] for line in lines]
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
    print_line(console, f"# {title}")
    for line in lines:
        padded = [
            cell.ljust(width) if is_text else cell.rjust(width)
            for cell, width, (_, is_text) in zip(line, widths, heads)
        ]
        print_line(console, "  ".join(padded).rstrip(), squeeze=False)


def _width(heads: list[str], blocks: list[list[list[str]]]) -> int:
    """Columns that a rich table of these texts takes: its cells with their padding, and its lines."""
    rows = [row for block in blocks for row in block]
    cells = [max([len(head), *(len(row[i]) for row in rows)]) for i, head in enumerate(heads)]
    return sum(cells) + 3 * len(cells) + 1


def print_line(console: Console, text: str, style: str = "", *, squeeze: bool = True) -> None:
    """One line of plain text: no markup, no highlighting; not wrapped where no one has set a width."""
    text = one_line(text) if squeeze else text
    plain = not console.is_terminal
    console.print(
        Text(text.translate(ASCII) if plain else text, style="" if plain else style), soft_wrap=plain, highlight=False
    )


def explain(console: Console, columns: Sequence[Column]) -> None:
    for column in columns:
        print_line(console, f"{column.header}: {column.meaning}", "dim")


def _reference(setting: Setting) -> str:
    """Which dense methods the speed-ups of a setting refer to, and where there are none."""
    rows = measured(setting.rows)
    device = "an unknown device" if rows["device"].dropna().empty else rows["device"].dropna().iloc[0]
    dense = rows[rows["kind"] == "dense"].to_dict("records")
    ran = {(row["method"], row["seq_len_kv"]): row["backend"] for row in dense}
    names: dict[str, list[Any]] = {}
    for row in rows.dropna(subset=["dense_method"]).to_dict("records"):
        by = ran.get((row["dense_method"], row["seq_len_kv"]))
        names.setdefault(f"{row['dense_method']} by {by}" if by else row["dense_method"], []).append(row["seq_len_kv"])
    if not names:
        return f"No speed-up: no dense method was timed beside these rows. Device: {device}."
    parts = [f"{name} ({', '.join(tokens(n) for n in sorted(set(lengths)))})" for name, lengths in names.items()]
    return f"Speed-up is against the fastest dense method: {'; '.join(parts)}. Device: {device}."
