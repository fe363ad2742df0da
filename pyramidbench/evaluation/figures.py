"""Figures of an evaluation, drawn with matplotlib: quality against budget, loss by position, retrieval heat maps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pyramidbench.evaluation.summary import by_position, heat_map, summarise
from pyramidbench.units import is_missing, tokens

INK, GRID = "#16191d", "#dfe3e7"
LOOKS = {
    "dense": (INK, "o"), "pyramid": ("#0072b2", "o"), "pyramid:fast": ("#56b4e9", "s"), "pyramid:paper": ("#cc79a7", "D"),
    "flat": ("#e69f00", "^"), "flat:exact": ("#d55e00", "v"), "sliding_window": ("#009e73", "P"),
    "exact_topk": ("#8a929b", "x"), "random_blocks": ("#8a929b", "d"),
}  # fmt: skip
"""Colours by Okabe and Ito, with a marker that says the same again."""
OTHERS = [("#009e73", "X"), ("#cc79a7", "<"), ("#e69f00", ">"), ("#56b4e9", "p"), ("#d55e00", "h"), ("#0072b2", "*")]
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans", "font.size": 10, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "grid.color": GRID, "axes.axisbelow": True, "text.parse_math": False, "lines.linewidth": 1.6,
}  # fmt: skip


def look(method: str) -> tuple[str, str]:
    """Colour and marker of a method, the same in every figure."""
    return LOOKS.get(method) or OTHERS[sum(map(ord, method)) % len(OTHERS)]


def draw_all(frame: pd.DataFrame, folder: Path) -> dict[str, str]:
    """Write every figure that the rows allow as PNG; their file names with a line that says what each shows."""
    told: dict[str, str] = {}
    with mpl.rc_context(STYLE):
        for draw in (_budgets, _positions, _heat_maps):
            for name, (canvas, text) in draw(frame).items():
                canvas.savefig(folder / f"{name}.png", dpi=140, facecolor="white", metadata={"Software": None})
                told[f"{name}.png"] = text
    return told


Drawn = dict[str, tuple[Figure, str]]


def _budgets(frame: pd.DataFrame) -> Drawn:
    """One panel per task, text and length: score over the budget, dense as a line across."""
    summary = summarise(frame)
    panels = [
        (_title(part), part)
        for _, part in summary.groupby(["task", "text", "length", "shots"], dropna=False, sort=False)
        if part["top_k"].notna().any()
    ]
    if not panels:
        return {}
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    canvas = Figure(figsize=(3.4 * columns + 1.6, 2.9 * rows), layout="constrained")
    for number, (title, part) in enumerate(panels, 1):
        axes = canvas.add_subplot(rows, columns, number)
        _budget_panel(axes, part)
        axes.set_title(title, fontsize=10, loc="left")
    handles = {line.get_label(): line for axes in canvas.axes for line in axes.get_lines()}
    canvas.legend(
        handles.values(), [str(name) for name in handles], loc="outside right upper", frameon=False, fontsize=9
    )
    return {"budgets": (canvas, "Score of each task against K, the blocks kept by rank; dense attention goes across.")}


def _budget_panel(axes: Axes, part: pd.DataFrame) -> None:
    for method, line in part.groupby("method", sort=False):
        colour, marker = look(str(method))
        if line["top_k"].isna().all():
            axes.axhline(float(line["score"].iloc[0]), color=colour, ls="--", lw=1.3, label=str(method))
            continue
        line = line.sort_values("top_k")
        axes.plot(line["top_k"], line["score"], color=colour, marker=marker, label=str(method))
    if part["chance"].notna().any():
        axes.axhline(float(part["chance"].mean()), color="#8a929b", ls=":", lw=1, label="guess")
    axes.set_xscale("log", base=2)
    ticks = sorted(part["top_k"].dropna().unique())
    axes.set_xticks(ticks, [str(int(tick)) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("K, blocks kept by rank")
    axes.set_ylabel(str(part["metric"].iloc[0]))


def _positions(frame: pd.DataFrame) -> Drawn:
    """Loss above dense by position, one panel per budget, for the longest window of each text."""
    long = by_position(frame)
    long = long[long["top_k"].notna() & long["difference"].notna()]
    if long.empty:
        return {}
    long = long[long["length"] == long["length"].max()]
    panels = list(long.groupby(["text", "top_k"], sort=True))
    columns = min(4, len(panels))
    rows = -(-len(panels) // columns)
    canvas = Figure(figsize=(2.9 * columns + 1.6, 2.7 * rows), layout="constrained")
    for number, (key, part) in enumerate(panels, 1):
        axes = canvas.add_subplot(rows, columns, number)
        for method, line in part[part["method"] != "random_blocks"].groupby("method", sort=False):
            colour, marker = look(str(method))
            axes.plot(line["position"] + 0.5, line["difference"], color=colour, marker=marker, ms=4, label=str(method))
        axes.axhline(0, color=INK, ls="--", lw=1)
        text, top_k = key if isinstance(key, tuple) else ("", key)
        axes.set_title(f"{text}, K {int(top_k)}", fontsize=10, loc="left")
        axes.set_xlabel("position, 1 024 tokens")
        axes.set_ylabel("loss − dense, nats")
    handles = {
        line.get_label(): line for axes in canvas.axes for line in axes.get_lines() if str(line.get_label())[0] != "_"
    }
    canvas.legend(
        handles.values(), [str(name) for name in handles], loc="outside right upper", frameon=False, fontsize=9
    )
    return {"positions": (canvas, "Loss above that of dense attention by position (random blocks left out).")}


def _heat_maps(frame: pd.DataFrame) -> Drawn:
    """Depth × length, one map per method, of each retrieval task with depths at each budget."""
    deep = frame[(frame["status"] == "ok") & frame["depth"].notna()]
    drawn: Drawn = {}
    for task in deep["task"].unique():
        of_task = deep[deep["task"] == task]
        for budget in of_task["budget"].dropna().unique():
            shown = of_task[of_task["budget"].isna() | (of_task["budget"] == budget)]
            methods = list(shown["method"].unique())
            canvas = Figure(figsize=(2.1 * len(methods) + 0.8, 2.7), layout="constrained")
            for number, method in enumerate(methods, 1):
                own = shown[shown["method"] == method]
                part = heat_map(shown, task, method, None if own["budget"].isna().all() else budget)
                _heat_panel(canvas.add_subplot(1, len(methods), number), part, str(method), number == 1)
            name = f"heat-{task}-{str(budget).replace('%', '').replace('=', '-')}".replace(":", "-")
            drawn[name] = (canvas, f"{task} at {budget}: share right by depth and length, {len(own)} samples a method.")
    return drawn


def _heat_panel(axes: Axes, part: pd.DataFrame, title: str, first: bool) -> None:
    axes.imshow(part.to_numpy(dtype=float), vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
    axes.grid(False)
    axes.set_title(title, fontsize=9.5)
    axes.set_xticks(range(len(part.columns)), [tokens(int(str(length))) for length in part.columns])
    axes.set_yticks(range(len(part.index)), [f"{float(str(depth)):.0%}" for depth in part.index] if first else [])
    axes.set_xlabel("length")
    if first:
        axes.set_ylabel("depth")
    for row, values in enumerate(part.to_numpy(dtype=float)):
        for column, value in enumerate(values):
            if value == value:
                axes.text(column, row, f"{value:.2g}", ha="center", va="center", fontsize=8.5, color=INK)


def _title(part: pd.DataFrame) -> str:
    first = part.iloc[0]
    words = [
        str(first["task"]),
        "" if is_missing(first["text"]) else str(first["text"]),
        "" if is_missing(first["length"]) else tokens(first["length"]),
        "" if is_missing(first["shots"]) else (f"{tokens(first['shots'])} of shots" if first["shots"] else "zero-shot"),
    ]
    return ", ".join(word for word in words if word)
