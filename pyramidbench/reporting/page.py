"""report.html: one self-contained page. Everything from a run is escaped; data goes in as JSON, never as markup."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import jinja2
import vl_convert
from markupsafe import Markup

from pyramidbench.frame import Row
from pyramidbench.reporting.chart_looks import SHAPES, css_variable
from pyramidbench.reporting.charts import Chart, charts
from pyramidbench.reporting.evidence import Evidence
from pyramidbench.reporting.facts import how_measured
from pyramidbench.reporting.figure import Figure, NoFigure, Topic
from pyramidbench.reporting.figures import TOPICS
from pyramidbench.reporting.hover import COLUMNS, cell_texts
from pyramidbench.reporting.painters_areas import heat_range
from pyramidbench.reporting.palette import DARK, HEAT, OTHER_STAGE, STAGES
from pyramidbench.tables import Column, failure_columns, failures, groups
from pyramidbench.units import is_missing, one_line


def page(evidence: Evidence, drawn: Sequence[Figure | NoFigure]) -> str:
    """The whole page as text."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("pyramidbench.reporting"), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    pictures = [figure for figure in drawn if isinstance(figure, Figure)]
    made = {figure.name: charts(figure) for figure in pictures}
    data = {
        "charts": {name: [chart.spec for chart in parts] for name, parts in made.items()},
        "cells": [asdict(text) for text in cell_texts(evidence)],
    }
    return environment.get_template("report.html.j2").render(
        title=evidence.title,
        runs=evidence.runs,
        verdicts=evidence.verdicts,
        sections=[_section(topic, title, drawn) for topic, title in TOPICS.items()],
        chart_rows={name: _by_row(parts) for name, parts in made.items()},
        legend=legend,
        columns=COLUMNS,
        tables=_tables(evidence),
        failures=_failures(evidence),
        failure_columns=failure_columns(evidence.summary),
        facts={name: how_measured(source) for name, source in evidence.runs.items()},
        colours=[(css_variable(light)[4:-1], light, dark) for light, dark in DARK.items()],
        data=embedded(data) if pictures else None,
        library=library() if pictures else None,
    )


def _by_row(parts: Sequence[Chart]) -> list[tuple[str, list[tuple[int, str]]]]:
    """The charts of a figure row by row: the number and the title of each."""
    numbered = list(enumerate(parts))
    rows = dict.fromkeys(chart.row for chart in parts)
    return [(row, [(number, chart.title) for number, chart in numbered if chart.row == row]) for row in rows]


def _section(topic: Topic, title: str, drawn: Sequence[Figure | NoFigure]) -> dict[str, Any]:
    """A topic with its figures, and those that there is no data for."""
    own = [figure for figure in drawn if figure.topic == topic]
    shown = [figure for figure in own if isinstance(figure, Figure)]
    left = {(figure.title, figure.reason): figure for figure in own if isinstance(figure, NoFigure)}
    return {"topic": topic, "title": title, "figures": shown, "left_out": list(left.values())}


def legend(figure: Figure) -> list[dict[str, Any]]:
    """The key of a figure: methods with marker and colour, which can be picked; or stages, or the steps of a scale."""
    if figure.kind == "heat":
        low, high = heat_range(figure.data["value"])
        step = (high - low) / len(HEAT)
        return [{"kind": "step", "name": f"{low + i * step:.2f}", "colour": colour} for i, colour in enumerate(HEAT)]
    if figure.kind == "bars":
        stages = dict.fromkeys(filter(None, figure.data["part"]))
        return [
            {"kind": "stage", "name": stage, "colour": css_variable(STAGES.get(stage, OTHER_STAGE)[0])}
            for stage in stages
        ]
    named = dict(zip(figure.data["shown"], figure.data["series"]))
    looks = {shown: figure.series[label] for shown, label in named.items()}
    return [
        {
            "kind": "method",
            "name": shown,
            "colour": css_variable(look.colour),
            "path": PATHS[look.marker],
            "line": look.line,
        }
        for shown, look in looks.items()
    ]


_NAMED = {
    "circle": "M-.9 0a.9.9 0 1 0 1.8 0a.9.9 0 1 0-1.8 0Z", "square": "M-.8-.8H.8V.8H-.8Z", "diamond": "M0-1 1 0 0 1-1 0Z",
    "triangle-up": "M0-.8 .9.75H-.9Z", "triangle-down": "M0 .8 .9-.75H-.9Z", "triangle-left": "M-.8 0 .75-.9V.9Z",
    "triangle-right": "M.8 0-.75-.9V.9Z", "cross": "M-.33-1H.33V-.33H1V.33H.33V1H-.33V.33H-1V-.33H-.33Z",
}  # fmt: skip
PATHS = {marker: _NAMED.get(shape, shape) for marker, shape in SHAPES.items()}
"""Each marker as an SVG path in a square from -1 to 1."""


@dataclass(frozen=True)
class ResultTable:
    """The rows of one setting: the columns in which some row has a value, and the rows group by group. A row is its kind, and
    for each column the text and the value that it sorts by."""

    text: str
    columns: tuple[Column, ...]
    groups: list[list[tuple[str, list[tuple[str, object]]]]]


def _tables(evidence: Evidence) -> list[ResultTable]:
    tables = []
    for setting in evidence.settings:
        rows = [group.rows for group in groups(setting)]
        known = tuple(
            column for column in COLUMNS if any(not is_missing(row[column.key]) for group in rows for row in group)
        )
        if rows:
            tables.append(ResultTable(setting.text, known, [_cells(group, known) for group in rows]))
    return tables


def _cells(rows: list[Row], columns: Sequence[Column]) -> list[tuple[str, list[tuple[str, object]]]]:
    return [
        (str(row["kind"]), [(one_line(column.write(row)), _sort_value(column, row)) for column in columns])
        for row in rows
    ]


def _sort_value(column: Column, row: Row) -> object:
    value = row[column.key]
    return "" if is_missing(value) else value


def _failures(evidence: Evidence) -> list[tuple[list[str], str | None]]:
    """The cells without a number as texts, each with the end of its log."""
    columns = failure_columns(evidence.summary)
    return [
        ([one_line(column.write(row)) for column in columns], evidence.source_of(row["run"]).log_tail(row["cell"]))
        for row in failures(evidence.summary)
    ]


def embedded(data: object) -> Markup:
    """JSON that can stand inside a script element: nothing in it can end that."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(text)


@lru_cache
def library() -> str:
    """Vega, Vega-Lite and Vega-Embed, deflated (a third of the size), in base64. Bundling takes a second or two, outside of
    Python's lock."""
    bundle = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return base64.b64encode(zlib.compress(bundle.encode(), 9)).decode()
