"""Multi-value: all codes of one place, spread over a long text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from pyramidbench.evaluation.haystack import Needle, Question, ask, hidden_in
from pyramidbench.evaluation.language_model import LanguageModel
from pyramidbench.evaluation.prompting import draws, numbers, prompts
from pyramidbench.evaluation.task import Asked, Group, Outcome, Sample


class MultiValue:
    """Several codes of one place stand in a long text, spread evenly; the model must tell all of them.

    After RULER's multi-value needles (arXiv 2404.06654), with other words.
    """

    name: ClassVar[str] = "multi_value"
    group: ClassVar[Group] = "retrieval"
    metric: ClassVar[str] = "exact match of all"

    def rounds(self, asked: Asked) -> Iterator[tuple[Sample, ...]]:
        for index in range(asked.samples):
            for length in asked.lengths:
                yield (Sample(self.name, index, asked.seed, length, text=asked.texts[0].label),)

    def measure(self, sample: Sample, asked: Asked, model: LanguageModel) -> Outcome:
        assert sample.length is not None
        told, rng = prompts("retrieval")[self.name], draws(sample)
        place, values = rng.choice(prompts("retrieval")["places"]), numbers(rng, told["values"])
        needles = [
            Needle(told["needle"].format(place=place, value=value), (number + rng.random()) / len(values))
            for number, value in enumerate(values)
        ]
        question = Question(
            told["instruction"],
            told["question"].format(place=place),
            told["prefix"].format(place=place),
            told["answer"],
            tuple(values),
            told["new_tokens"],
        )
        return ask(question, hidden_in(asked.texts[0], needles, question, sample.length, rng, model), model)
