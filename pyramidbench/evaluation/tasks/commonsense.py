"""Commonsense: questions with choices, alone and after as many worked examples as fill 4k or 8k tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import lru_cache

from pyramidbench.errors import UserError
from pyramidbench.evaluation.language_model import LanguageModel
from pyramidbench.evaluation.questions import Choice, read_questions
from pyramidbench.evaluation.task import Asked, Group, Outcome, Sample

ROOM_TOKENS = 256
"""Left free behind the worked examples for the question and its longest choice."""


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
        for shots in asked.shots:
            yield tuple(Sample(self.name, index, asked.seed, shots=shots) for index in range(asked.samples))

    def measure(self, sample: Sample, asked: Asked, model: LanguageModel) -> Outcome:
        assert sample.shots is not None
        order = _order(self.name, sample.seed)
        asked_one = read_questions(self.name)[order[sample.index]]
        given, prefix = _worked(model, self.name, sample.seed, sample.shots, asked.samples)
        scores = []
        for context, continuation in zip(asked_one.contexts, asked_one.continuations):
            judged = model.judge(prefix, *_split(model, context, continuation))
            scores.append(judged.log_prob / len(continuation))
        chosen = scores.index(max(scores))
        return Outcome(
            score=float(chosen == asked_one.right),
            tokens=len(prefix) + len(model.ids(asked_one.contexts[chosen])),
            chance=1 / len(scores),
            shots_given=given,
            expected=_said(asked_one, asked_one.right),
            answered=_said(asked_one, chosen),
        )


def _split(model: LanguageModel, context: str, continuation: str) -> tuple[list[int], list[int]]:
    return model.ids(context), model.ids(continuation)


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
