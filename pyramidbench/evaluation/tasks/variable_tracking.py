"""Variable tracking: which names hold a value, through a chain of assignments in a long text."""

from __future__ import annotations

import random
import string
from collections.abc import Iterator
from itertools import pairwise
from typing import ClassVar

from pyramidbench.evaluation.haystack import Needle, Question, ask, hidden_in
from pyramidbench.evaluation.language_model import LanguageModel
from pyramidbench.evaluation.prompting import draws, numbers, prompts
from pyramidbench.evaluation.task import Asked, Group, Outcome, Sample


class VariableTracking:
    """A variable is set to a number, a second one to the first, and so on, in order over a long text; all must be named.

    After RULER's variable tracking (arXiv 2404.06654), with other words and one chain.
    """

    name: ClassVar[str] = "variable_tracking"
    group: ClassVar[Group] = "retrieval"
    metric: ClassVar[str] = "exact match of all"

    def rounds(self, asked: Asked) -> Iterator[tuple[Sample, ...]]:
        for index in range(asked.samples):
            for length in asked.lengths:
                yield (Sample(self.name, index, asked.seed, length, text=asked.texts[0].label),)

    def measure(self, sample: Sample, asked: Asked, model: LanguageModel) -> Outcome:
        assert sample.length is not None
        told, rng = prompts("retrieval")[self.name], draws(sample)
        names, (value,) = _names(rng, 1 + told["hops"]), numbers(rng, 1, digits=5)
        lines = [told["first"].format(name=names[0], value=value)]
        lines += [told["further"].format(name=name, earlier=earlier) for earlier, name in pairwise(names)]
        needles = [Needle(line, (number + rng.random()) / len(lines)) for number, line in enumerate(lines)]
        question = Question(
            told["instruction"],
            told["question"].format(value=value, count=len(names)),
            told["prefix"].format(value=value),
            told["answer"],
            tuple(names),
            told["new_tokens"],
        )
        return ask(question, hidden_in(asked.texts[0], needles, question, sample.length, rng, model), model)


def _names(rng: random.Random, count: int) -> list[str]:
    """Different names of five capitals."""
    names: dict[str, None] = {}
    while len(names) < count:
        names["".join(rng.choices(string.ascii_uppercase, k=5))] = None
    return list(names)
