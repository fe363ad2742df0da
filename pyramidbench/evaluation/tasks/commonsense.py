"""Commonsense: questions with choices, alone and after as many worked examples as fill 4k or 8k tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import lru_cache

from pyramidbench.errors import UserError
from pyramidbench.evaluation.language_model import Judged, LanguageModel
from pyramidbench.evaluation.questions import Choice, read_questions
from pyramidbench.evaluation.task import Asked, Group, Outcome, Sample

ROOM_TOKENS = 256
"""Left free behind the worked examples for the question and its longest choice."""
ROUND = 50
"""Questions that are asked of one attention before the next one gets them."""


class Commonsense:
    """One set of prompts/commonsense.toml. The choice with the highest log-probability per character is the model's.

    A seed shuffles the set; the first questions are asked and the last ones are the worked examples, so none is both.
    A bare question fits into one or two blocks, where any sparse attention is dense; the worked examples make it choose.
    """

    group: Group = "commonsense"
    metric = "accuracy"

    def __init__(self, name: str) -> None:
        self.name = name

    def rounds(self, asked: Asked) -> Iterator[tuple[Sample, ...]]:
        questions = read_questions(self.name)
        if asked.samples > len(questions) // 2:
            raise UserError(
                f"{self.name} has {len(questions)} questions; ask for at most {len(questions) // 2} samples."
            )
        for start in range(0, asked.samples, ROUND):
            together = range(start, min(start + ROUND, asked.samples))
            for shots in asked.shots:
                yield tuple(Sample(self.name, index, asked.seed, shots=shots) for index in together)

    def measure(self, sample: Sample, asked: Asked, model: LanguageModel) -> Outcome:
        return self.measure_all((sample,), asked, model)[0]

    def measure_all(self, samples: Sequence[Sample], asked: Asked, model: LanguageModel) -> list[Outcome]:
        first = samples[0]
        assert first.shots is not None
        order, questions = _order(self.name, first.seed), read_questions(self.name)
        given, prefix = _worked(model, self.name, first.seed, first.shots, asked.samples)
        choices = [questions[order[sample.index]] for sample in samples]
        parts = [
            (model.ids(context), model.ids(continuation))
            for choice in choices
            for context, continuation in zip(choice.contexts, choice.continuations)
        ]
        judged = iter(model.judge_all(prefix, parts))
        return [_outcome(choice, judged, given, len(prefix), model) for choice in choices]


def _outcome(choice: Choice, judged: Iterator[Judged], given: int, before: int, model: LanguageModel) -> Outcome:
    """What a question came to; `judged` yields its choices next."""
    scores = [next(judged).log_prob / len(continuation) for continuation in choice.continuations]
    chosen = scores.index(max(scores))
    return Outcome(
        score=float(chosen == choice.right),
        tokens=before + len(model.ids(choice.contexts[chosen])),
        chance=1 / len(scores),
        shots_given=given,
        expected=_said(choice, choice.right),
        answered=_said(choice, chosen),
    )


def _said(question: Choice, choice: int) -> str:
    """A choice in words: its answer, or the end of its sentence where the contexts differ."""
    return (question.contexts[choice][-40:] + question.continuations[choice]).rpartition("\n")[2].strip()


@lru_cache(maxsize=4)
def _order(name: str, seed: int) -> list[int]:
    order = list(range(len(read_questions(name))))
    random.Random(f"{name} {seed}").shuffle(order)
    return order


@lru_cache(maxsize=1)
def _worked(model: LanguageModel, name: str, seed: int, tokens: int, kept_free: int) -> tuple[int, list[int]]:
    """How many worked examples fit into so many tokens, and their tokens."""
    model.check_length(tokens)
    ids: list[int] = []
    order = _order(name, seed)
    for given, number in enumerate(reversed(order[kept_free:])):
        more = model.ids(read_questions(name)[number].example + "\n\n")
        if len(ids) + len(more) + ROOM_TOKENS > tokens:
            return given, ids
        ids += more
    return len(order) - kept_free, ids
