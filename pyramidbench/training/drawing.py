"""The report of a training: summary.md with loss curves, and with what the probes found by length and by depth."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

from pyramidbench.errors import UserError
from pyramidbench.evaluation.figures import STYLE, look
from pyramidbench.units import significant, tokens

SMOOTHED_ROWS = 5


def write_training_report(folder: Path, out: Path) -> Path:
    """Write summary.md, curves.png and pairs.png of a training's folder; returns summary.md.

    Raises:
        UserError: the folder holds no training, or one of which no arm has finished.
    """
    plan = folder / "plan.json"
    probed = sorted(folder.glob("*-evaluations.csv"))
    if not plan.is_file() or not probed:
        raise UserError(
            f"'{folder}' holds no finished training; give the --out of `python -m pyramidbench.training run`."
        )
    logs = pd.concat([pd.read_csv(folder / f"{path.stem.removesuffix('-evaluations')}.csv") for path in probed])
    probes = pd.concat(map(pd.read_csv, probed))
    out.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        _curves(logs, probes).savefig(out / "curves.png", dpi=140, facecolor="white", metadata={"Software": None})
        _pairs(probes).savefig(out / "pairs.png", dpi=140, facecolor="white", metadata={"Software": None})
    (out / "summary.md").write_text(_summary(json.loads(plan.read_text()), logs, probes), encoding="utf-8")
    return out / "summary.md"


def _curves(logs: pd.DataFrame, probes: pd.DataFrame) -> Figure:
    """Training loss over steps, and held-out loss by length, each arm with its own attention."""
    canvas = Figure(figsize=(11.5, 3.4), layout="constrained")
    steps, pairs, lengths = canvas.subplots(1, 3)
    for (method, seed), rows in logs.groupby(["method", "seed"]):
        colour, _ = look(str(method))
        style = "-" if seed == 0 else "--"
        for axes, column in ((steps, "loss"), (pairs, "pair_loss")):
            smooth = rows[column].rolling(SMOOTHED_ROWS, min_periods=1).mean()
            axes.plot(rows["step"], smooth, color=colour, ls=style, lw=1.3, label=f"{method}, seed {seed}")
    own = probes[(probes["used"] == probes["method"]) & (probes["what"] == "loss") & (probes["part"] == 0)]
    for (method, seed), rows in own.groupby(["method", "seed"]):
        colour, marker = look(str(method))
        lengths.plot(rows["length"], rows["value"], color=colour, marker=marker, ls="-" if seed == 0 else "--")
    steps.set(xlabel="step", ylabel="training loss, nats per token")
    pairs.set(xlabel="step", ylabel="loss of asked values, nats")
    steps.set_ylim(top=float(logs["loss"].quantile(0.9)) + 0.3)
    lengths.set_xscale("log", base=2)
    ticks = sorted(own["length"].unique())
    lengths.set_xticks(ticks, [tokens(int(tick)) for tick in ticks])
    lengths.set(xlabel="window (trained: half the longest)", ylabel="held-out loss, nats per token")
    canvas.legend(*steps.get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=9)
    return canvas


def _pairs(probes: pd.DataFrame) -> Figure:
    """Share of pairs found by the quarter that they were hidden in, one panel per length, each arm with its own attention."""
    own = probes[(probes["used"] == probes["method"]) & (probes["what"] == "pairs") & (probes["part"] > 0)]
    lengths = sorted(own["length"].unique())
    canvas = Figure(figsize=(2.4 * len(lengths) + 1.8, 2.8), layout="constrained")
    for number, length in enumerate(lengths, 1):
        axes = canvas.add_subplot(1, len(lengths), number)
        for (method, seed), rows in own[own["length"] == length].groupby(["method", "seed"]):
            colour, marker = look(str(method))
            style = "-" if seed == 0 else "--"
            axes.plot(
                rows["part"], rows["value"], color=colour, marker=marker, ls=style, label=f"{method}, seed {seed}"
            )
        axes.set(title=tokens(int(length)), xlabel="quarter of the window", ylim=(-0.03, 1.03), xticks=(1, 2, 3, 4))
    canvas.axes[0].set_ylabel("pairs found, share")
    canvas.legend(*canvas.axes[0].get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=9)
    return canvas


def _summary(plan: dict[str, dict[str, object]], logs: pd.DataFrame, probes: pd.DataFrame) -> str:
    recipe, device = plan["recipe"], plan["device"]
    whole = probes[probes["part"] == 0]
    lengths = sorted(whole["length"].unique())
    lines = [
        "# A small decoder, trained with each attention", "",
        "![Loss over steps, and by length](curves.png)", "",
        "![Pairs found, by length and depth](pairs.png)", "",
        "Loss of held-out text in nats per token, then the share of pairs found, by window. The first row of an arm has the "
        "attention that it was trained with; the others were swapped in afterwards.", "",
        "| trained with | seed | used | " + " | ".join(f"loss {tokens(int(n))}" for n in lengths) + " | "
        + " | ".join(f"pairs {tokens(int(n))}" for n in lengths) + " |",
        "| --- | ---: | --- |" + " ---: |" * (2 * len(lengths)),
    ]  # fmt: skip
    for (method, seed), arm in whole.groupby(["method", "seed"], sort=False):
        for used, rows in arm.groupby("used", sort=False):
            values = {(what, n): value for what, n, value in zip(rows["what"], rows["length"], rows["value"])}
            cells = [f"{values['loss', n]:.3f}" for n in lengths] + [f"{values['pairs', n]:.3f}" for n in lengths]
            lines.append(f"| {method} | {seed} | {used} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "| arm | seed | steps | tokens | seconds | tokens/s | backend |",
        "| --- |" + " ---: |" * 5 + " --- |",
    ]
    for (method, seed), rows in logs.groupby(["method", "seed"], sort=False):
        last = rows.iloc[-1]
        numbers = f"{last['step']} | {last['tokens']} | {significant(last['seconds'])} | {last['tokens_per_s']}"
        lines.append(f"| {method} | {seed} | {numbers} | {last['backend']} |")
    lines += [
        "",
        f"- recipe: `{json.dumps(recipe)}`",
        f"- device: {device['name']}, torch {device['torch']}, triton {device['triton']}",
        f"- command: `python -m pyramidbench.training {' '.join(map(str, plan['argv']))}`",
    ]
    return "\n".join(lines) + "\n"
