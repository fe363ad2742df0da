"""Single needle: one code in a long text, by depth and length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from pyramidbench.evaluation.haystack import Needle, Question, ask, hidden_in
from pyramidbench.evaluation.language_model import LanguageModel
from pyramidbench.evaluation.prompting import draws, numbers, prompts
from pyramidbench.evaluation.task import Asked, Group, Outcome, Sample


class SingleNeedle:
    """A seven-digit code of a place stands somewhere in a long text; the model must tell it.

    After RULER's single needle (arXiv 2404.06654), with other words.
    """

    name: ClassVar[str] = "single_needle"
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
        place, (value,) = rng.choice(prompts("retrieval")["places"]), numbers(rng, 1)
        question = Question(
            told["instruction"],
            told["question"].format(place=place),
            told["prefix"].format(place=place),
            told["answer"],
            (value,),
            told["new_tokens"],
        )
        needle = Needle(told["needle"].format(place=place, value=value), sample.depth)
        return ask(question, hidden_in(asked.texts[0], [needle], question, sample.length, rng, model), model)
