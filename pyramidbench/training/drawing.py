"""The report of a training: summary.md with loss curves, and with what the probes found by length and by depth."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import NullLocator

from pyramidbench.errors import UserError
from pyramidbench.evaluation.sheet import LOOK, Grid, guess_line, marker, same_y, save, sheet
from pyramidbench.reporting.palette import FAVOURED, INK, Series
from pyramidbench.training.corpus import VOCABULARY
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
    with mpl.rc_context(LOOK):
        save(_curves(logs, probes), out, "curves")
        save(_pairs(probes), out, "pairs")
    (out / "summary.md").write_text(_summary(json.loads(plan.read_text()), logs, probes), encoding="utf-8")
    return out / "summary.md"


def _curves(logs: pd.DataFrame, probes: pd.DataFrame) -> Canvas:
    """Training loss and the asked values' loss over steps, and held-out loss by length, each arm with its own attention."""
    looks = _looks(logs)
    steps_done, length = int(logs["step"].max()), int(probes["length"].max()) // 2
    about = (
        f"{steps_done} steps from the same weights on the same batches; means of {SMOOTHED_ROWS} logged losses; held-out text "
        f"after the last step, in windows of up to twice the {tokens(length)} tokens that were trained on"
    )
    canvas, panels = sheet(
        "Loss of a small decoder, trained with each attention", about, Grid(1, 3, 2.3, tuple(looks.values()), 0.5)
    )
    for arm, rows in logs.groupby(["method", "seed"], sort=False):
        for axes, column in zip(panels, ("loss", "pair_loss")):
            smooth = rows[column].rolling(SMOOTHED_ROWS, min_periods=1).mean()
            axes.plot(rows["step"], smooth, color=looks[arm].colour, ls=looks[arm].line, lw=1.2)
    own = probes[(probes["used"] == probes["method"]) & (probes["what"] == "loss") & (probes["part"] == 0)]
    for arm, rows in own.groupby(["method", "seed"], sort=False):
        panels[2].plot(rows["length"], rows["value"], color=looks[arm].colour, ls=looks[arm].line, **marker(looks[arm]))
    for axes, title in zip(
        panels, ("training text, nats per token", "asked values, nats", "held-out text, nats per token")
    ):
        axes.set_title(title, loc="left", fontsize=9, fontweight="bold", pad=4)
        axes.set_xlabel("step")
    guess = math.log(VOCABULARY)
    guess_line(panels[1], guess)
    panels[1].set_ylim(bottom=min(guess, float(logs["pair_loss"].min())) - 0.12)
    panels[0].set_ylim(top=float(logs["loss"].quantile(0.9)) + 0.3)
    panels[2].set_xscale("log", base=2)
    ticks = sorted(own["length"].unique())
    panels[2].set_xticks(ticks, [tokens(int(tick)) for tick in ticks])
    panels[2].set_xlabel("window, tokens")
    panels[2].xaxis.set_minor_locator(NullLocator())
    return canvas


def _pairs(probes: pd.DataFrame) -> Canvas:
    """Share of pairs found by the quarter that they were hidden in, one panel per length, each arm with its own attention."""
    own = probes[(probes["used"] == probes["method"]) & (probes["what"] == "pairs") & (probes["part"] > 0)]
    looks, lengths = _looks(own), sorted(own["length"].unique())
    about = (
        "share of hidden values that come out likeliest, by the quarter of the window that they stand in; each arm with the "
        f"attention that it was trained with; the highest is {own['value'].max():.1%}"
    )
    canvas, panels = sheet("Pairs found again", about, Grid(1, len(lengths), 1.9, tuple(looks.values())))
    for axes, length in zip(panels, lengths):
        for arm, rows in own[own["length"] == length].groupby(["method", "seed"], sort=False):
            axes.plot(rows["part"], rows["value"], color=looks[arm].colour, ls=looks[arm].line, **marker(looks[arm]))
        axes.set(xlabel="quarter", ylim=(-0.04, 1.04), xticks=(1, 2, 3, 4))
        axes.set_title(f"{tokens(int(length))} tokens", loc="left", fontsize=9, fontweight="bold", pad=4)
    same_y(panels, len(panels))
    panels[0].set_ylabel("share")
    return canvas


def _looks(rows: pd.DataFrame) -> dict[Any, Series]:
    """The look of every arm: its method's colour, and a line that tells the seeds apart."""
    found = {}
    for method, seed in rows[["method", "seed"]].drop_duplicates().itertuples(index=False):
        colour, shape = FAVOURED.get(method, (INK, "o"))
        found[method, seed] = Series(f"{method}, seed {seed}", colour, shape, "-" if seed == 0 else ":")
    return found


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
