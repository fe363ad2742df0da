"""Quality against budget: rows of tasks, columns of lengths or shots, and what each costs in time beside it."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import NullLocator

from pyramidbench.evaluation.sheet import Grid, guess_line, head, looks, marker, sheet, shown
from pyramidbench.evaluation.summary import MOSTLY_DENSE, summarise
from pyramidbench.reporting.palette import INK, MUTED, SHADE, Series
from pyramidbench.units import is_missing, tokens

Drawn = dict[str, tuple[Canvas, str]]
ALL_RIGHT = "exact match of all"
"""The metric of tasks with several answers: its interval is not one of the share that is drawn."""
TITLES = {
    "perplexity": "Perplexity: loss above dense attention",
    "retrieval": "Retrieval: share of the answers that are right",
    "recall": "Associative recall: share of the answers that are right",
    "commonsense": "Commonsense: accuracy, alone and after worked examples",
}


def quality(frame: pd.DataFrame, times: pd.DataFrame | None = None) -> Drawn:
    """A figure for each group of tasks that was asked at some budget.

    times: rows that were measured with the device to themselves; what a long prompt takes stands beside the quality then.
    """
    summary = summarise(frame)
    drawn: Drawn = {}
    for group, rows in summary.groupby("group", sort=False):
        if rows["top_k"].notna().any():
            canvas = _figure(str(group), rows, None if times is None else summarise(times))
            drawn[f"quality-{group}"] = (canvas, f"{TITLES[str(group)]}, by budget.")
    return drawn


def _figure(group: str, rows: pd.DataFrame, times: pd.DataFrame | None) -> Canvas:
    lines, columns = _lines(group, rows), _columns(rows)
    series = looks(rows)
    timed, height = int(times is not None), 1.9 if len(lines) < 3 else 1.35
    grid = Grid(len(lines), len(columns) + timed, height, shown(rows, series), right=0.42 if timed else 0.14)
    canvas, panels = sheet(TITLES[group], _about(rows), grid)
    for number, axes in enumerate(panels):
        row, column = divmod(number, grid.columns)
        name, own = lines[row]
        if column < len(columns):
            _panel(axes, own[_at(own) == columns[column]], series, group)
            head(axes, columns[column], "" if column else name)
            _budgets(axes, rows[rows["top_k"].notna()])
        elif row or times is None:
            axes.set_visible(False)
        else:
            _speed(axes, times, series)
        axes.tick_params(labelbottom=row == grid.rows - 1 or column == len(columns))
        axes.set_xlabel("budget" if row == grid.rows - 1 else "")
        if column < len(columns) and not axes.lines:
            _empty(axes)
    for row in range(grid.rows):
        _scale(panels[row * grid.columns : row * grid.columns + len(columns)], group)
    return canvas


def _empty(axes: Axes) -> None:
    """Say that a panel has no rows."""
    axes.grid(visible=False)
    axes.set_yticks([])
    axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", va="center", fontsize=8.5, color=MUTED)


def _scale(row: list[Axes], group: str) -> None:
    """One range for the panels of a row."""
    limits = [axes.get_ylim() for axes in row if axes.has_data()]
    for number, axes in enumerate(row):
        if group in ("retrieval", "recall"):
            axes.set_ylim(-0.05, 1.05)
            axes.set_yticks([0, 0.5, 1], ["0", "0.5", "1"])
        elif limits and axes.lines:
            axes.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
        if number:
            axes.tick_params(labelleft=False, left=False)
    row[0].set_ylabel("nats per token" if group == "perplexity" else "share")


def _lines(group: str, rows: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """A row of panels for each task, and for each text where losses of several texts would not compare."""
    by = ["task", "text"] if group == "perplexity" else ["task"]
    return [(" on ".join(map(str, key)), part) for key, part in rows.groupby(by, sort=False)]


def _columns(rows: pd.DataFrame) -> list[str]:
    order = rows.sort_values(["shots", "length"])
    return list(dict.fromkeys(_at(order)))


def _at(rows: pd.DataFrame) -> pd.Series:
    """Where a row stands: its length, or how many tokens of worked examples came before the question."""

    def words(row: pd.Series) -> str:
        if is_missing(row["shots"]):
            return f"{tokens(int(row['length']))} tokens"
        return f"{tokens(int(row['shots']))} tokens of shots" if row["shots"] else "zero-shot"

    return rows.apply(words, axis=1) if len(rows) else pd.Series(dtype=str)


def _about(rows: pd.DataFrame) -> str:
    counts = sorted({int(count) for count in rows["samples"]})
    samples = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    words = [f"samples a point: {samples}", "budget: blocks kept by rank, as a share of those of 8k tokens"]
    if _has_bars(rows).any():
        words.append("bars: 95 % (Wilson)")
    if (rows["choice_share"] < MOSTLY_DENSE).any():
        words.append("grey: under half of the queries had a choice, so that sparse is mostly dense")
    return "; ".join(words)


def _panel(axes: Axes, rows: pd.DataFrame, series: dict[str, Series], group: str) -> None:
    sparse = rows[rows["top_k"].notna()]
    for top_k, share in sparse.groupby("top_k")["choice_share"].mean().items():
        if share < MOSTLY_DENSE:
            axes.axvspan(float(str(top_k)) / 2**0.5, float(str(top_k)) * 2**0.5, color=SHADE, lw=0, zorder=0)
    for method, line, at in _by_method(sparse):
        look = series[method]
        offset = _spread(method, series) if group != "perplexity" else 0.0
        axes.plot(
            at * 2**offset,
            _value(line, group),
            color=look.colour,
            ls=look.line,
            zorder=2 if look.muted else 3,
            **marker(look),
        )
        known = _has_bars(line)
        if known.any():
            axes.vlines(
                at[known] * 2**offset, line["low"][known], line["high"][known], color=look.colour, lw=0.7, alpha=0.55
            )
    dense = rows[rows["top_k"].isna()]
    if group == "perplexity":
        axes.axhline(0, color=INK, ls="--", lw=1.2)
    elif len(dense):
        axes.axhline(float(_value(dense, group).iloc[0]), color=INK, ls="--", lw=1.2, zorder=2)
    if rows["chance"].notna().any():
        guess_line(axes, float(rows["chance"].mean()))


def _value(rows: pd.DataFrame, group: str) -> pd.Series:
    """What is drawn: a difference of losses, or the share of the answers that were right, of several that were asked for."""
    if group == "perplexity":
        return rows["difference"]
    return rows["partial"].fillna(rows["score"])


def _has_bars(rows: pd.DataFrame) -> pd.Series:
    """Where the interval of the score is one of what is drawn: in tasks that ask for a single answer."""
    return rows["low"].notna() & (rows["metric"] != ALL_RIGHT)


def _spread(method: str, series: dict[str, Series]) -> float:
    """A little room between the bars of methods, in halvings of the budget."""
    names = [name for name in series if name != "dense"]
    return 0.07 * (names.index(method) - (len(names) - 1) / 2)


def _speed(axes: Axes, times: pd.DataFrame, series: dict[str, Series]) -> None:
    """Time of a window over dense attention's; only methods that the figure has."""
    dense = times[times["top_k"].isna()]["seconds"].median()
    sparse = times[times["top_k"].notna() & times["method"].isin(list(series))]
    for method, line, at in _by_method(sparse):
        look = series[method]
        axes.plot(
            at, line["seconds"] / dense, color=look.colour, ls=look.line, zorder=2 if look.muted else 3, **marker(look)
        )
    axes.axhline(1, color=INK, ls="--", lw=1.2)
    axes.set_yscale("log", base=2)
    low, high = min(0.45, axes.get_ylim()[0]), max(2.2, axes.get_ylim()[1])
    axes.set_ylim(low, high)
    ticks = [2.0**power for power in range(-6, 7) if low <= 2.0**power <= high]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.tick_right()
    axes.tick_params(right=False)
    _budgets(axes, sparse)
    length = tokens(int(times["tokens"].max()))
    axes.set_title(f"time of {length} tokens\n÷ dense's", loc="left", fontsize=9, color=MUTED, pad=4)


def _by_method(rows: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame, pd.Series]]:
    """Each method's rows from small budgets to large ones, with where they stand on the axis."""
    for method, line in rows.groupby("method", sort=False):
        ordered = line.sort_values("top_k")
        yield str(method), ordered, ordered["top_k"].astype(float)


def _budgets(axes: Axes, rows: pd.DataFrame) -> None:
    axes.set_xscale("log", base=2)
    ticks = dict(sorted(zip(rows["top_k"], rows["budget"])))
    if ticks:
        axes.set_xticks(
            list(ticks), [str(text).removeprefix("keep=").replace("top_k=", "K ") for text in ticks.values()]
        )
        axes.set_xlim(min(ticks) / 1.5, max(ticks) * 1.5)
    axes.xaxis.set_minor_locator(NullLocator())
