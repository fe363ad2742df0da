"""Multi-query: the codes of several places, asked for at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from pyramidbench.evaluation.haystack import Needle, Question, ask, hidden_in
from pyramidbench.evaluation.language_model import LanguageModel
from pyramidbench.evaluation.prompting import draws, numbers, prompts
from pyramidbench.evaluation.task import Asked, Group, Outcome, Sample


class MultiQuery:
    """Codes of several places stand in a long text, spread evenly; the model must tell those of all.

    After RULER's multi-query needles (arXiv 2404.06654), with other words.
    """

    name: ClassVar[str] = "multi_query"
    group: ClassVar[Group] = "retrieval"
    metric: ClassVar[str] = "exact match of all"

    def rounds(self, asked: Asked) -> Iterator[tuple[Sample, ...]]:
        for index in range(asked.samples):
            for length in asked.lengths:
                yield (Sample(self.name, index, asked.seed, length, text=asked.texts[0].label),)

    def measure(self, sample: Sample, asked: Asked, model: LanguageModel) -> Outcome:
        assert sample.length is not None
        told, rng = prompts("retrieval")[self.name], draws(sample)
        places, values = rng.sample(prompts("retrieval")["places"], told["keys"]), numbers(rng, told["keys"])
        needles = [
            Needle(told["needle"].format(place=place, value=value), (number + rng.random()) / len(values))
            for number, (place, value) in enumerate(zip(places, values))
        ]
        named = ", ".join(places[:-1]) + f" and {places[-1]}"
        question = Question(
            told["instruction"],
            told["question"].format(places=named),
            told["prefix"].format(first=places[0]),
            told["answer"],
            tuple(values),
            told["new_tokens"],
        )
        return ask(question, hidden_in(asked.texts[0], needles, question, sample.length, rng, model), model)
