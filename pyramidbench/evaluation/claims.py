"""Claims: what the source paper says of a model with pyramid attention, judged by the rows of an evaluation.

A verdict rests on pairs: the same sample under both attentions, at one budget, where the sparse one had a choice. The mean of
the differences has a 95 % interval (Student's t), and the verdict follows from where that lies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd
from scipy import stats

from pyramidbench.evaluation.summary import MOSTLY_DENSE, sample_key, wilson
from pyramidbench.units import is_missing

COMPARABLE = 0.05
"""Accuracies whose difference lies within so much are called comparable: twice the standard error of 400 questions."""
FEWEST = 4
"""Pairs below which no interval is told."""
DENSE_CAN = 0.5
"""Share of right answers from which on dense attention can do a retrieval task at a length: below it nothing can be lost."""
PYRAMIDS = ("pyramid", "pyramid:paper", "pyramid:fast")
Verdict = Literal["confirmed", "not confirmed", "undecided", "too few", "not testable"]


@dataclass(frozen=True)
class Claim:
    """What is said: `wanted` of `group` against `rival`, "same" (within COMPARABLE) or "better". `source`: who says so."""

    text: str
    source: str
    group: str
    rival: str
    wanted: Literal["same", "better"]


CLAIMS = (
    Claim("comparable to dense attention on commonsense", "paper", "commonsense", "dense", "same"),
    Claim("better than a single pass on retrieval", "paper", "retrieval", "flat", "better"),
    Claim("better than a single pass on retrieval", "paper", "retrieval", "flat:exact", "better"),
    Claim("better than a single pass on in-context recall", "ours", "recall", "flat", "better"),
    Claim("better than a single pass on in-context recall", "ours", "recall", "flat:exact", "better"),
    Claim("better than a single pass in perplexity", "ours", "perplexity", "flat", "better"),
    Claim("better than a single pass in perplexity", "ours", "perplexity", "flat:exact", "better"),
)


@dataclass(frozen=True)
class Judgement:
    """A claim about one method at one budget. mean, low, high: of score − rival's score, in favour of the method where
    positive; None without pairs. choice_share: mean over the pairs."""

    claim: Claim
    method: str
    budget: str
    pairs: int
    mean: float | None
    low: float | None
    high: float | None
    choice_share: float | None
    verdict: Verdict


def judge(frame: pd.DataFrame) -> list[Judgement]:
    """Every claim for every pyramid and budget that the rows have."""
    measured = frame[frame["status"] == "ok"]
    shares, guessed = _dense_shares(measured), _guessed(measured)
    can = [_can(row, shares) and row["task"] not in guessed for row in measured.to_dict("records")]
    measured = measured[pd.Series(can, index=measured.index, dtype=bool)]
    return [one for claim in CLAIMS for one in _judged(claim, measured[measured["group"] == claim.group])]


def _dense_shares(rows: pd.DataFrame) -> dict[tuple[object, object], float]:
    """What dense attention gets right of each retrieval task and length."""
    dense = rows[(rows["method"] == "dense") & rows["group"].isin(["retrieval", "recall"])]
    right = dense["partial"].astype(float).fillna(dense["score"])
    return {
        (task, length): float(part.mean()) for (task, length), part in right.groupby([dense["task"], dense["length"]])
    }


def _guessed(rows: pd.DataFrame) -> set[object]:
    """Sets with choices on which dense attention is not shown to be better than a guess, after worked examples or without:
    the 95 % interval (Wilson) of all its questions reaches down to chance. What only guesses has nothing to lose."""
    dense = rows[(rows["method"] == "dense") & (rows["group"] == "commonsense") & rows["chance"].notna()]
    return {
        task
        for task, part in dense.groupby("task")
        if wilson(int(part["score"].sum()), len(part))[0] <= float(part["chance"].mean())
    }


def _can(row: dict[Any, Any], dense_shares: dict[tuple[object, object], float]) -> bool:
    return dense_shares.get((row["task"], row["length"]), 1.0) >= DENSE_CAN


def _judged(claim: Claim, rows: pd.DataFrame) -> Iterator[Judgement]:
    rivals = rows[rows["method"] == claim.rival]
    for (budget, method), own in rows[rows["method"].isin(PYRAMIDS)].groupby(["budget", "method"], sort=False):
        others = rivals if claim.rival == "dense" else rivals[rivals["budget"] == budget]
        pairs = _pairs(own, others)
        if len(pairs):
            yield _judgement(claim, str(method), str(budget), pairs)


def _pairs(own: pd.DataFrame, others: pd.DataFrame) -> pd.DataFrame:
    """Difference and choice share of each sample that both did; a lower loss is a better score."""
    scores = {sample_key(row): _score(row) for row in others.to_dict("records")}
    both = [(row, scores[sample_key(row)]) for row in own.to_dict("records") if sample_key(row) in scores]
    found = [{"difference": _score(row) - other, "choice_share": row["choice_share"]} for row, other in both]
    return pd.DataFrame(found, columns=["difference", "choice_share"])


def _score(row: dict[Any, Any]) -> float:
    score, partial = row["score"], row["partial"]
    if row["group"] == "perplexity":
        return -float(score)
    return float(score if is_missing(partial) else partial)


def _judgement(claim: Claim, method: str, budget: str, pairs: pd.DataFrame) -> Judgement:
    chosen = pairs[pairs["choice_share"] >= MOSTLY_DENSE]["difference"]
    share = float(pairs["choice_share"].mean())
    if len(chosen) < FEWEST:
        verdict: Verdict = "too few" if share >= MOSTLY_DENSE else "not testable"
        return Judgement(claim, method, budget, len(chosen), None, None, None, share, verdict)
    mean, half = float(chosen.mean()), 0.0
    if chosen.std() > 0:
        half = float(stats.t.ppf(0.975, len(chosen) - 1)) * float(chosen.std()) / math.sqrt(len(chosen))
    low, high = mean - half, mean + half
    share = float(pairs[pairs["choice_share"] >= MOSTLY_DENSE]["choice_share"].mean())
    return Judgement(claim, method, budget, len(chosen), mean, low, high, share, _verdict(claim, low, high))


def _verdict(claim: Claim, low: float, high: float) -> Verdict:
    if claim.wanted == "same":
        if low >= -COMPARABLE and high <= COMPARABLE:
            return "confirmed"
        return "not confirmed" if high < 0 else "undecided"
    if low > 0:
        return "confirmed"
    return "not confirmed" if high < 0 or (low == high == 0) else "undecided"
