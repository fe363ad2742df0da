"""Multi-key: one code among several that look alike, by depth and length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from pyramidbench.evaluation.haystack import Needle, Question, ask, hidden_in
from pyramidbench.evaluation.language_model import LanguageModel
from pyramidbench.evaluation.prompting import draws, numbers, prompts
from pyramidbench.evaluation.task import Asked, Group, Outcome, Sample


class MultiKey:
    """Codes of several places stand in a long text; the model must tell one of them. The others are spread evenly.

    After RULER's multi-key needles (arXiv 2404.06654), with other words.
    """

    name: ClassVar[str] = "multi_key"
    group: ClassVar[Group] = "retrieval"
    metric: ClassVar[str] = "exact match"

    def rounds(self, asked: Asked) -> Iterator[tuple[Sample, ...]]:
        for index in range(asked.samples):
            for length in asked.lengths:
                for depth in asked.depths:
                    yield (Sample(self.name, index, asked.seed, length, depth, text=asked.texts[0].label),)

    def measure(self, sample: Sample, asked: Asked, model: LanguageModel) -> Outcome:
        assert sample.length is not None
        assert sample.depth is not None
        told, rng = prompts("retrieval")[self.name], draws(sample)
        others = told["distractors"]
        places, values = rng.sample(prompts("retrieval")["places"], 1 + others), numbers(rng, 1 + others)
        depths = [sample.depth, *((number + 0.5) / others for number in range(others))]
        needles = [
            Needle(told["needle"].format(place=place, value=value), depth)
            for place, value, depth in zip(places, values, depths)
        ]
        question = Question(
            told["instruction"],
            told["question"].format(place=places[0]),
            told["prefix"].format(place=places[0]),
            told["answer"],
            (values[0],),
            told["new_tokens"],
        )
        return ask(question, hidden_in(asked.texts[0], needles, question, sample.length, rng, model), model)
