"""Common words: which words of a long list appear most often? The answer stands nowhere and must be gathered."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import ClassVar

from pyramidbench.errors import UserError
from pyramidbench.evaluation.haystack import Question, ask, framed
from pyramidbench.evaluation.language_model import LanguageModel
from pyramidbench.evaluation.prompting import draws, prompts
from pyramidbench.evaluation.task import Asked, Group, Outcome, Sample
from pyramidbench.texts import Passage


class CommonWords:
    """A numbered list of words, drawn from the text; some appear ten times as often as the others, and must be named.

    After RULER's common words (arXiv 2404.06654), with other words.
    """

    name: ClassVar[str] = "common_words"
    group: ClassVar[Group] = "retrieval"
    metric: ClassVar[str] = "exact match of all"

    def rounds(self, asked: Asked) -> Iterator[tuple[Sample, ...]]:
        for index in range(asked.samples):
            for length in asked.lengths:
                yield (Sample(self.name, index, asked.seed, length, text=asked.texts[0].label),)

    def measure(self, sample: Sample, asked: Asked, model: LanguageModel) -> Outcome:
        assert sample.length is not None
        model.check_length(sample.length)
        told, rng = prompts("retrieval")[self.name], draws(sample)
        count = told["common"]
        words = rng.sample(_words(asked.texts[0]), count + 400)
        common, rare = words[:count], words[count:]
        question = Question(
            told["instruction"],
            told["question"].format(count=count),
            told["prefix"].format(count=count),
            told["answer"],
            tuple(common),
            told["new_tokens"],
        )
        room = sample.length - question.new_tokens
        entries = room // 4
        while entries > 0:
            # Every rare word appears twice, every common one so many times as often.
            often = min(2 * told["times_as_often"], max(3, entries // (2 * count)))
            pool = [word for word in common for _ in range(often)]
            pool += [word for word in rare for _ in range(2)][: max(0, entries - len(pool))]
            pool += rng.choices(rare, k=max(0, entries - len(pool)))
            listed = rng.sample(pool, len(pool))
            prompt = framed("\n".join(f"{n}. {word}" for n, word in enumerate(listed, 1)), question, model)
            if len(prompt) <= room:
                return ask(question, prompt, model)
            entries = min(entries - 1, entries * room // len(prompt))
        raise UserError(f"a prompt of {sample.length} tokens has no room for a list of words; ask for a longer one.")


@cache
def _words(text: Passage) -> list[str]:
    words = sorted(set(re.findall(r"\b[a-z]{4,9}\b", text.text)))
    if len(words) < 1000:
        raise UserError(
            f"text '{text.label}' has {len(words)} different words, and 1000 are needed; give a longer one."
        )
    return words
