"""What a figure is before it is drawn: a tidy dataframe with its meaning. Renderers only draw what they are given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd

from pyramidbench.frame import Setting
from pyramidbench.reporting.palette import Series
from pyramidbench.units import integer, is_missing, one_line, ratio, share, significant, tokens

Kind = Literal["lines", "tradeoff", "dots", "bars", "heat", "roofline"]
Topic = Literal["tradeoff", "time", "stages", "memory", "recall", "roofline"]
Ticks = Literal["tokens", "ms", "ratio", "share", "kept", "count", "plain", "rate"]
COLUMNS = [
    "row", "panel", "series", "shown", "part", "x", "y", "low", "high", "value", "status", "reason", "frontier", "note",
    "cell",
]  # fmt: skip
END = "end"
"""Marks a row (column `part`) that stands at a line's last number before a length that gave none."""
MOST_PANELS = 4
"""Lengths that are shown side by side."""


@dataclass(frozen=True)
class Axis:
    """What an axis shows, with its unit, and how its values are spaced and written."""

    label: str
    ticks: Ticks
    log: bool = False

    @property
    def unit(self) -> str:
        """What stands in brackets at the end of its label."""
        return self.label.rpartition("(")[2].rstrip(")") if self.label.endswith(")") else ""


@dataclass(frozen=True)
class TimeUnit:
    """The unit that times are shown in, and what seconds are multiplied by."""

    name: str
    scale: float


def unit_of(seconds: pd.Series[float]) -> TimeUnit:
    """Milliseconds, or microseconds where no time reaches one."""
    return TimeUnit("µs", 1e6) if seconds.max() < 1e-3 else TimeUnit("ms", 1e3)


@dataclass(frozen=True)
class Panel:
    """One pair of axes: its `name` in the data's column `panel`, and the axis of the measured value."""

    name: str
    axis: Axis


@dataclass(frozen=True)
class Guide:
    """A line that is no series, such as a frontier or a roof: its corners in data coordinates of one panel."""

    panel: str
    label: str
    corners: tuple[tuple[float, float], ...]
    dashed: bool = False


@dataclass(frozen=True)
class Table:
    """Numbers that belong to a figure, as text: the first column names the row."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Figure:
    """A figure before it is drawn. `name` is a file's stem; `x` is the axis that the panels share (dots and bars have none).

    `data` has COLUMNS; `cell` is the row of the summary that a mark stands for, `reason` why it has no number. By kind:

    - lines: y over x, low and high its interval; y is missing where `status` says why, x is missing for a constant, which goes
      across; `part` END marks the last number before a gap, and `note` says what stopped the method.
    - tradeoff: points, those of one `shown` joined; `frontier` marks those that no other beats, `note` is a word beside.
    - roofline: points, those of one `shown` joined by length, under the roofs in `guides`.
    - dots: x is the value and y, where there is one, what it is held against; one line of the chart per `shown`, one block
      per `row`.
    - bars: x is the length of the stage `part`, stacked in the order of the rows; y is the whole that was measured.
    - heat: a cell at x and y (whole numbers) with its `value`.
    """

    name: str
    topic: Topic
    kind: Kind
    title: str
    subtitle: str
    alt: str
    x: Axis | None
    panels: tuple[Panel, ...]
    series: dict[str, Series]
    data: pd.DataFrame
    notes: tuple[str, ...] = ()
    guides: tuple[Guide, ...] = ()
    table: Table | None = None


@dataclass(frozen=True)
class NoFigure:
    """A figure that this run has no data for, and why."""

    name: str
    topic: Topic
    title: str
    reason: str


@dataclass(frozen=True)
class Subject:
    """What a figure is defined from: the summary's rows of one setting, the cells behind them, every method's look, and what
    is known of the device. `suffix` makes a file's stem unique."""

    setting: Setting
    cells: pd.DataFrame
    looks: dict[str, Series]
    device: Mapping[str, Any]
    suffix: str = ""

    @property
    def rows(self) -> pd.DataFrame:
        return self.setting.rows

    def titled(self, title: str) -> str:
        """The title, with the run's name where several runs are side by side."""
        run = self.rows["run"].iloc[0]
        return title if is_missing(run) else f"{title}: {one_line(run)}"


@dataclass(frozen=True)
class Heading:
    """What a figure is called and where it belongs, before it is known whether there is data for it."""

    name: str
    topic: Topic
    title: str

    def missing(self, subject: Subject, reason: str) -> NoFigure:
        return NoFigure(self.name + subject.suffix, self.topic, subject.titled(self.title), reason)

    def figure(
        self, subject: Subject, kind: Kind, about: str, x: Axis | None, axes: Mapping[str, Axis],
        parts: list[pd.DataFrame], *, notes: tuple[str, ...] = (), guides: tuple[Guide, ...] = (),
        table: Table | None = None,
    ) -> Figure:  # fmt: skip
        """The figure of some tidy parts; `axes` has a panel's name and the axis of its values."""
        data = pd.concat(parts, ignore_index=True)
        panels = tuple(Panel(panel, axis) for panel, axis in axes.items())
        series = {label: subject.looks[label] for label in data["series"].unique()}
        subtitle = f"{about}. {subject.setting.text}"
        title = subject.titled(self.title)
        alt = f"{title}. {subtitle}. {said(kind, panels, data)}"
        return Figure(
            self.name + subject.suffix, self.topic, kind, title, subtitle, alt, x, panels, series, data, notes, guides,
            table,
        )  # fmt: skip


def tidy(rows: pd.DataFrame, **columns: pd.Series | str) -> pd.DataFrame:
    """COLUMNS for rows of a summary that `comparable` has chosen."""
    missing = dict.fromkeys(("x", "y", "low", "high", "value"), float("nan"))
    blank = dict.fromkeys(("row", "part", "note"), "")
    empty = rows[["shown", "status", "reason"]].assign(
        series=rows["label"], cell=rows.index, frontier=False, **missing, **blank
    )
    return empty.assign(**columns).reindex(columns=COLUMNS)


def names(parts: list[pd.DataFrame]) -> list[str]:
    """The panel of each part."""
    return [part["panel"].iloc[0] for part in parts]


def budgets(rows: pd.DataFrame) -> str:
    """The budgets of some rows: 'K 8', 'K 4 to 16'."""
    values = sorted(rows["top_k"].dropna().unique())
    if not values:
        return "no block budget"
    return f"K {integer(values[0])}" + (f" to {integer(values[-1])}" if len(values) > 1 else "")


def some(values: list[float], most: int = MOST_PANELS) -> list[float]:
    """The shortest and the longest, and what lies evenly between, where there are more than can be shown."""
    ordered = sorted(set(values))
    if len(ordered) <= most:
        return ordered
    return [ordered[round(i * (len(ordered) - 1) / (most - 1))] for i in range(most)]


def at_length(length: float) -> str:
    return f"{tokens(length)} tokens"


def said(kind: Kind, panels: tuple[Panel, ...], data: pd.DataFrame) -> str:
    """The last value of each series in words, panel by panel, for those who cannot see the picture."""
    value = {"dots": "x", "bars": "y", "heat": "value"}.get(kind, "y")
    sentences = []
    for row in data["row"].unique():
        for panel in panels:
            part = data[(data["panel"] == panel.name) & (data["row"] == row)].dropna(subset=[value])
            last = part.drop_duplicates("shown", keep="last")
            if kind == "heat":
                last = part.groupby("shown", as_index=False, sort=False)["value"].mean()
            write = {"share": share, "ratio": ratio}.get(panel.axis.ticks, significant)
            values = ", ".join(f"{shown} {write(number)}" for shown, number in zip(last["shown"], last[value]))
            where = ", ".join(text for text in (row, panel.name) if text and text != panel.axis.label)
            sentences.append(f"{panel.axis.label}, {where}: {values or 'no number'}.".replace("\n", " "))
    return " ".join(sentences)
