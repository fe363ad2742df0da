"""Verdicts on the paper's claims follow from pairs of rows, and only from those where the method had a choice."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from pyramidbench.evaluation.claims import Judgement, judge
from pyramidbench.evaluation.record import columns


def rows(method: str, scores: list[float], **changes: Any) -> list[dict[str, Any]]:
    base = {
        "status": "ok", "task": "single_needle", "group": "retrieval", "method": method, "seed": 0, "length": 4096,
        "budget": None if method == "dense" else "keep=5%", "choice_share": None if method == "dense" else 0.8, **changes,
    }  # fmt: skip
    return [{**base, "index": index, "score": score} for index, score in enumerate(scores)]


def judged(*parts: list[dict[str, Any]]) -> list[Judgement]:
    return judge(pd.DataFrame([row for part in parts for row in part], columns=columns()))


def test_better_and_worse_on_the_same_samples() -> None:
    right, half = [1.0] * 20, [1.0, 0.0] * 10
    (one,) = judged(rows("dense", right), rows("pyramid", right), rows("flat", half))
    assert (one.claim.rival, one.method, one.budget, one.pairs) == ("flat", "pyramid", "keep=5%", 20)
    assert one.mean == pytest.approx(0.5)
    assert one.verdict == "confirmed"
    assert one.low is not None
    assert 0 < one.low < 0.5
    (other,) = judged(rows("dense", right), rows("pyramid", half), rows("flat:exact", right))
    assert (other.claim.rival, other.verdict) == ("flat:exact", "not confirmed")
    (even,) = judged(rows("dense", right), rows("pyramid", half), rows("flat", half[::-1]))
    assert even.verdict == "undecided"


def test_comparable_is_a_margin() -> None:
    same = {"group": "commonsense", "task": "quartz", "length": None, "shots": 4096}
    dense = [1.0, 0.0] * 200
    (near,) = judged(rows("dense", dense, **same), rows("pyramid", [*dense[:-2], 0.0, 1.0], **same))
    assert near.verdict == "confirmed"
    (far,) = judged(rows("dense", dense, **same), rows("pyramid", [0.0] * 400, **same))
    assert far.verdict == "not confirmed"
    (few,) = judged(rows("dense", dense[:20], **same), rows("pyramid", [0.0, 1.0, *dense[2:20]], **same))
    assert few.verdict == "undecided"


def test_a_prompt_that_fits_the_budget_tests_nothing() -> None:
    scores = [1.0] * 10
    (one,) = judged(rows("dense", scores), rows("pyramid", scores, choice_share=0.0), rows("flat", scores))
    assert (one.verdict, one.pairs, one.mean) == ("not testable", 0, None)
    (few,) = judged(rows("dense", scores[:3]), rows("pyramid", scores[:3]), rows("flat", scores[:3]))
    assert few.verdict == "too few"


def test_what_dense_attention_cannot_do_is_left_out() -> None:
    assert judged(rows("dense", [0.0] * 10), rows("pyramid", [1.0] * 10), rows("flat", [0.0] * 10)) == []


def test_a_set_that_dense_attention_guesses_is_left_out() -> None:
    guessed = {"group": "commonsense", "task": "winowhy", "length": None, "shots": 4096, "chance": 0.5}
    known = {**guessed, "task": "quartz"}
    half, most = [1.0, 0.0] * 50, [1.0, 1.0, 0.0, 1.0] * 25
    assert judged(rows("dense", half, **guessed), rows("pyramid", half, **guessed)) == []
    (one,) = judged(
        rows("dense", half, **guessed), rows("pyramid", half, **guessed),
        rows("dense", most, **known), rows("pyramid", [0.0] * 100, **known),
    )  # fmt: skip
    assert (one.pairs, one.verdict) == (100, "not confirmed")
    assert one.mean == pytest.approx(-0.75)


def test_a_lower_loss_is_better() -> None:
    text = {"group": "perplexity", "task": "perplexity", "text": "emma"}
    (one,) = judged(rows("pyramid", [3.0, 3.1, 3.2, 3.3], **text), rows("flat", [3.1, 3.2, 3.31, 3.39], **text))
    assert one.mean == pytest.approx(0.1)
    assert one.verdict == "confirmed"
