"""Reports: a run as a folder that one can read and pass on: report.html (one file), PNG, summary.md, results.csv."""

from __future__ import annotations

import html
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import jinja2
import pandas as pd
from markupsafe import Markup

from pyramidbench.comparable import fullest_length
from pyramidbench.draw import css_variable, save_png, to_svg
from pyramidbench.errors import UserError
from pyramidbench.figures import Figure, NoFigure, figures
from pyramidbench.frame import Row, Setting, measured, settings, summarise, with_speedups
from pyramidbench.palette import DARK
from pyramidbench.scaling import scalings
from pyramidbench.scaling_table import HEADERS, MEANING, scaling_rows
from pyramidbench.tables import MASS_RATIO, RESULTS, Column, failure_columns, failures, groups
from pyramidbench.units import is_missing, one_line, significant
from pyramidbench.verdict import Verdict, verdict

COLUMNS = (*RESULTS, MASS_RATIO)
UNITS = (
    ("_bytes_per_s", " bandwidth", 1e9, "GB/s"),
    ("_flops_per_s", " arithmetic", 1e12, "TFLOP/s"),
    ("_bytes", "", 2**30, "GiB"),
)
"""Suffix of a device's fact, what stands for it, and the unit that people read."""


def write_report(
    run_frame: pd.DataFrame, manifest: Mapping[str, Any], device: Mapping[str, Any], out: Path
) -> list[Path]:
    """Write the report of a run into the folder `out`, which is made if need be; returns the files written.

    `run_frame` has the columns of `record.columns()`; `manifest` and `device` are those of the run's folder.

    Raises:
        UserError: the folder cannot be written.
    """
    frame = with_speedups(run_frame)
    summary = summarise(frame)
    drawn = figures(summary)
    pictures = [figure for figure in drawn if isinstance(figure, Figure)]
    judged = verdict(summary)
    facts = how_measured(frame, manifest, device)
    texts = {
        "report.html": _page(summary, drawn, judged, facts, str(manifest.get("name", "run"))),
        "summary.md": _markdown(summary, pictures, judged, facts, str(manifest.get("name", "run"))),
        "results.csv": _csv(frame),
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (out / name).write_text(text, encoding="utf-8")
        for figure in pictures:
            save_png(figure, out / f"{figure.name}.png")
    except OSError as error:
        raise UserError(f"cannot write the report to '{out}': {error.strerror}; give another folder.") from None
    return [out / name for name in [*texts, *(f"{figure.name}.png" for figure in pictures)]]


def how_measured(frame: pd.DataFrame, manifest: Mapping[str, Any], device: Mapping[str, Any]) -> dict[str, str]:
    """What one must know to repeat a run: command, versions, device, seeds, inputs, clock. Names to text."""
    facts = {"command": command(manifest.get("argv", []))}
    for name in ("created", "version", "git"):
        if not is_missing(manifest.get(name)):
            facts["pyramidbench" if name == "version" else name] = str(manifest[name])
    for column, name in (("input", "input"), ("layer", "layers"), ("seed", "seeds"), ("clock", "clock")):
        values = list(frame[column].dropna().unique())
        if values:
            facts[name] = ", ".join(str(int(v) if isinstance(v, float) else v) for v in sorted(values))
    backends = sorted(
        {f"{row['method']}: {row['backend']}" for row in measured(frame).to_dict("records") if row["backend"]}
    )
    if backends:
        facts["implementations"] = ", ".join(backends)
    facts |= {f"device {name}": text for name, text in _flat(device)}
    return {name: one_line(text) for name, text in facts.items()}


def command(argv: Sequence[str]) -> str:
    """The command line that repeats a run."""
    if not argv:
        return "not recorded"
    first, *rest = argv
    is_program = PurePath(first).name.startswith("pyramidbench") or first.endswith("__main__.py")
    return shlex.join(["pyramidbench", *(rest if is_program else argv)])


def _flat(facts: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """Facts of the device, nested ones too, with a name and a value in the units that people read."""
    for key, value in facts.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key} ")
        elif not is_missing(value):
            name, text = _fact(key, value)
            yield f"{prefix}{name}".replace("_", " "), text


def _fact(key: str, value: object) -> tuple[str, str]:
    if isinstance(value, int | float):
        for suffix, name, size, unit in UNITS:
            if key.endswith(suffix):
                return key.removesuffix(suffix) + name, f"{significant(value / size)} {unit}"
    return key, str(value)


def _page(
    summary: pd.DataFrame, drawn: list[Figure | NoFigure], judged: Verdict, facts: dict[str, str], name: str
) -> str:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("pyramidbench"), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    lost_columns = failure_columns(summary)
    return environment.get_template("report.html.j2").render(
        name=name,
        verdict=judged,
        figures=[(figure, Markup(to_svg(figure))) for figure in drawn if isinstance(figure, Figure)],
        left_out=[figure for figure in drawn if isinstance(figure, NoFigure)],
        columns=COLUMNS,
        tables=[(setting.text, [_cells(group.rows) for group in groups(setting)]) for setting in settings(summary)],
        failure_columns=lost_columns,
        failures=[[one_line(column.write(row)) for column in lost_columns] for row in failures(summary)],
        facts=facts,
        colours=[(css_variable(light)[4:-1], light, dark) for light, dark in DARK.items()],
    )


def _cells(rows: list[Row]) -> list[tuple[str, list[tuple[str, object]]]]:
    """For each row its kind, and each cell as text with the value that it sorts by ("" where it is missing)."""
    return [
        (str(row["kind"]), [(one_line(column.write(row)), _sort_value(column, row)) for column in COLUMNS])
        for row in rows
    ]


def _sort_value(column: Column, row: Row) -> object:
    value = row[column.key]
    return "" if is_missing(value) else value


def _markdown(summary: pd.DataFrame, pictures: list[Figure], judged: Verdict, facts: dict[str, str], name: str) -> str:
    """For a README or a pull request: the verdict, the rows at the length that most selections reached, the figures, what
    failed, and the command."""
    lines = [f"# {_escaped(name)}", "", _escaped(judged.text)]
    lines += ["", *(f"- {_escaped(note)}" for note in judged.caveats)] if judged.caveats else []
    for setting in settings(summary):
        rows = measured(setting.rows)
        rivals = rows[rows["kind"] == "selection"]
        length = fullest_length(rivals if len(rivals) else rows) if len(rows) else None
        shown = [group for group in groups(setting) if group.length == length]
        table = [[column.write(row) for column in RESULTS] for group in shown for row in group.rows]
        if table:
            lines += ["", f"## {_escaped(setting.text)}", "", *_markdown_table(RESULTS, table), *_scaling(setting)]
    lines += [line for figure in pictures for line in ("", f"![{_escaped(figure.title)}]({figure.name}.png)")]
    columns = failure_columns(summary)
    lost = [[column.write(row) for column in columns] for row in failures(summary)]
    if lost:
        lines += ["", "## Cells without a number", "", *_markdown_table(columns, lost)]
    lines += ["", "## How it was measured", ""]
    lines += [
        f"- {_escaped(fact)}: {_code(text) if fact == 'command' else _escaped(text)}" for fact, text in facts.items()
    ]
    return "\n".join(lines) + "\n"


def _scaling(setting: Setting) -> list[str]:
    """How time grows with the length, where there are several."""
    rows = scaling_rows(scalings(setting))
    if not rows:
        return []
    kept = [i for i in range(len(HEADERS)) if any(row[i] for row in rows)]
    table = [[HEADERS[i] for i in kept], ["---"] * len(kept), *([_escaped(row[i]) for i in kept] for row in rows)]
    return ["", MEANING, "", *("| " + " | ".join(line) + " |" for line in table)]


def _markdown_table(columns: Sequence[Column], rows: list[list[str]]) -> list[str]:
    return [
        "| " + " | ".join(column.header for column in columns) + " |",
        "|" + "|".join(" --- " if column.is_text else " ---: " for column in columns) + "|",
        *("| " + " | ".join(_escaped(cell) for cell in row) + " |" for row in rows),
    ]


def _escaped(text: str) -> str:
    """Text from a run as Markdown that shows it letter by letter."""
    marked = "".join(f"\\{c}" if c in "\\`*[]|#~" else c for c in one_line(text))
    return html.escape(marked, quote=False)


def _code(text: str) -> str:
    fence = "``" if "`" in text else "`"
    return f"{fence}{text}{fence}"


def _csv(frame: pd.DataFrame) -> str:
    """One row per cell, whole numbers as such and lists as JSON, missing values empty; `backward_s` only where some row has
    it."""
    lists = ["recall_by_head", "mass_kept_by_head"]
    written = frame.drop(columns=lists).convert_dtypes()
    for name in lists:
        written[name] = [None if is_missing(value) else json.dumps(list(value)) for value in frame[name]]
    kept = [name for name in frame.columns if name != "backward_s" or frame[name].notna().any()]
    return str(written[kept].to_csv(index=False))
