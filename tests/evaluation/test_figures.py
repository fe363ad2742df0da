"""Figures of an evaluation that the clock ended: panels without rows say so, and budgets without a choice are grey."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import pytest
from matplotlib.axes import Axes

from pyramidbench.evaluation.figure_quality import quality
from pyramidbench.evaluation.record import columns
from pyramidbench.training.drawing import _curves


@pytest.fixture(scope="module")
def panels() -> list[Axes]:
    """single_needle and multi_key at 1k and 2k; the latter at 1k alone."""
    asked = (("single_needle", 1024), ("single_needle", 2048), ("multi_key", 1024))
    frame = pd.DataFrame([row for task, length in asked for row in rows(task, length)], columns=columns())
    canvas, _ = quality(frame)["quality-retrieval"]
    return canvas.axes


def rows(task: str, length: int) -> list[dict[str, Any]]:
    base = {"status": "ok", "task": task, "group": "retrieval", "length": length, "index": 0, "seed": 0, "score": 1.0}
    kept = [("keep=5%", 6, length / 2500), ("keep=10%", 13, length / 5000)]
    sparse = [
        {"method": "pyramid", "kind": "selection", "budget": b, "top_k": k, "choice_share": c} for b, k, c in kept
    ]
    return [{**base, **one} for one in [{"method": "dense", "kind": "dense"}, *sparse]]


def test_a_panel_without_rows_says_so(panels: list[Axes]) -> None:
    said = [[text.get_text() for text in axes.texts if text.get_text() == "not measured"] for axes in panels]
    assert said == [[], [], [], ["not measured"]]
    assert [label.get_text() for label in panels[3].get_xticklabels()] == ["5%", "10%"]


def test_only_budgets_without_a_choice_are_grey(panels: list[Axes]) -> None:
    assert [len(axes.patches) for axes in panels] == [2, 1, 2, 0]
    grey = panels[1].patches[0].get_extents().transformed(panels[1].transData.inverted())
    assert grey.x0 < 13 < grey.x1
    assert grey.x0 > 6


def test_a_row_of_panels_is_named_once(panels: list[Axes]) -> None:
    names = [[text.get_text() for text in axes.texts if "_" in text.get_text()] for axes in panels]
    assert names == [["single_needle"], [], ["multi_key"], []]


def test_of_several_answers_the_share_is_drawn_without_the_interval_of_another_score() -> None:
    several = [
        {**row, "partial": 0.0, "score": 0.0, "metric": "exact match of all"} for row in rows("multi_value", 1024)
    ]
    single = [{**row, "metric": "exact match"} for row in rows("single_needle", 1024)]
    canvas, _ = quality(pd.DataFrame(several + single, columns=columns()))["quality-retrieval"]
    assert [len(axes.collections) for axes in canvas.axes] == [0, 1]


def test_the_time_of_a_long_prompt_stands_beside_the_quality() -> None:
    told = [{**row, "group": "perplexity", "task": "perplexity", "text": "emma"} for row in rows("perplexity", 8192)]
    frame = pd.DataFrame(told, columns=columns())
    seconds = {"dense": 2.0, "pyramid": 0.5}
    times = frame.assign(seconds=frame["method"].map(seconds), tokens=8192)
    canvas, _ = quality(frame, times)["quality-perplexity"]
    _, speed = canvas.axes
    assert speed.get_title(loc="left") == "time of 8k tokens\n÷ dense's"
    assert list(speed.lines[0].get_ydata()) == [0.25, 0.25]


def test_losses_of_asked_values_are_shown_with_a_guess_s() -> None:
    logs = pd.DataFrame(
        [{"method": "dense", "seed": 0, "step": step, "loss": 8.0, "pair_loss": 9.0} for step in (10, 20)]
    )
    probes = pd.DataFrame(
        [
            {"method": "dense", "used": "dense", "seed": 0, "what": "loss", "part": 0, "length": n, "value": 4.0}
            for n in (64, 128)
        ]
    )
    asked = _curves(logs, probes).axes[1]
    assert [text.get_text() for text in asked.texts] == ["guess"]
    assert asked.get_ylim()[0] < math.log(4096) - 0.1 < asked.get_ylim()[1]
