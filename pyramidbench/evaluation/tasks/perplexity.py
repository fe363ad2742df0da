"""Perplexity by position: does context that is far away still help?"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import ClassVar

from pyramidbench.errors import UserError
from pyramidbench.evaluation.language_model import LanguageModel
from pyramidbench.evaluation.task import Asked, Group, Outcome, Sample
from pyramidbench.texts import Passage

POSITION_BUCKET = 1024
"""Tokens over which a loss is averaged: single tokens are noise."""
CHARACTERS_PER_TOKEN = 32
"""A token is rarely longer: a prefix of so many characters per token holds enough of a long text."""


class Perplexity:
    """Loss of each token of a text given all before it, mean over the window, and over each 1 024 positions.

    Sample i of a length N is the i-th window of N tokens; windows do not overlap.
    """

    name: ClassVar[str] = "perplexity"
    group: ClassVar[Group] = "perplexity"
    metric: ClassVar[str] = "loss, nats per token"

    def rounds(self, asked: Asked) -> Iterator[tuple[Sample, ...]]:
        for index in range(asked.samples):
            for length in asked.lengths:
                for text in asked.texts:
                    yield (Sample(self.name, index, asked.seed, length, text=text.label),)

    def measure(self, sample: Sample, asked: Asked, model: LanguageModel) -> Outcome:
        assert sample.length is not None
        passage = next(text for text in asked.texts if text.label == sample.text)
        model.check_length(sample.length)
        losses = model.token_losses(_window(passage, sample.length, sample.index, model))
        # The first token has no loss: the first bucket is one token short.
        buckets = [losses[max(0, start - 1) : start + POSITION_BUCKET - 1] for start in _starts(sample.length)]
        return Outcome(
            score=float(losses.mean()),
            tokens=sample.length,
            position_loss=tuple(float(bucket.mean()) for bucket in buckets if len(bucket)),
        )


@lru_cache(maxsize=4)
def _window(passage: Passage, length: int, index: int, model: LanguageModel) -> list[int]:
    """Tokens of a window, kept since every attention asks for them again."""
    end = (index + 1) * length
    ids = model.ids(passage.text[: CHARACTERS_PER_TOKEN * end])
    if len(ids) < end:
        raise UserError(
            f"text '{passage.label}' has {len(ids)} tokens, window {index} of {length} needs {end}; "
            "ask for fewer samples, a shorter length or a longer text."
        )
    return ids[end - length : end]


def _starts(length: int) -> range:
    return range(0, length, POSITION_BUCKET)
