"""In-context associative recall: pairs of made-up keys and numbers, then one of the keys again."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import ClassVar

from pyramidbench.errors import UserError
from pyramidbench.evaluation.language_model import LanguageModel
from pyramidbench.evaluation.prompting import numbers, prompts
from pyramidbench.evaluation.task import Asked, Group, Outcome, Sample

TOKENS_PER_PAIR = 16
"""More than a pair needs: the list is cut to the length afterwards."""


class AssociativeRecall:
    """A list of `key: number` lines fills the prompt; after a key the model must find its number likeliest, token by token.

    One list is asked for the pairs at all depths; it is read once. No language helps: keys and numbers are drawn.
    """

    name: ClassVar[str] = "associative_recall"
    group: ClassVar[Group] = "recall"
    metric: ClassVar[str] = "exact match"

    def rounds(self, asked: Asked) -> Iterator[tuple[Sample, ...]]:
        for index in range(asked.samples):
            for length in asked.lengths:
                yield tuple(Sample(self.name, index, asked.seed, length, depth) for depth in asked.depths)

    def measure(self, sample: Sample, asked: Asked, model: LanguageModel) -> Outcome:
        return self.measure_all((sample,), asked, model)[0]

    def measure_all(self, samples: Sequence[Sample], asked: Asked, model: LanguageModel) -> list[Outcome]:  # noqa: ARG002 - the protocol's
        told, first = prompts("associative_recall"), samples[0]
        assert first.length is not None
        pairs, ids = _list(model, first.length, first.index, first.seed)
        drawn = [pairs[round((sample.depth or 0.0) * (len(pairs) - 1))] for sample in samples]
        questions = [
            (model.ids(told["question"].format(key=key)), model.ids(told["answer"].format(value=value)))
            for key, value in drawn
        ]
        judged = model.judge_all(ids, questions)
        return [
            Outcome(score=float(one.greedy), tokens=len(ids), expected=value) for one, (_, value) in zip(judged, drawn)
        ]


@lru_cache(maxsize=1)
def _list(model: LanguageModel, length: int, index: int, seed: int) -> tuple[list[tuple[str, str]], list[int]]:
    """The pairs that fit into `length` tokens with a question, and their tokens."""
    model.check_length(length)
    rng = random.Random(f"associative_recall {length} {index} {seed}")
    told = prompts("associative_recall")
    keys = _keys(rng, max(2, length // 4))
    drawn = list(zip(keys, numbers(rng, len(keys), digits=4 if len(keys) < 4000 else 7)))
    pairs: list[tuple[str, str]] = []
    ids: list[int] = []
    for key, value in drawn:
        more = model.ids(told["pair"].format(key=key, value=value))
        if len(ids) + len(more) + TOKENS_PER_PAIR > length:
            break
        pairs.append((key, value))
        ids += more
    if len(pairs) < 2:
        raise UserError(f"a prompt of {length} tokens has no room for two pairs and a question; ask for a longer one.")
    return pairs, ids


def _keys(rng: random.Random, count: int) -> list[str]:
    """Different made-up words."""
    told = prompts("associative_recall")
    keys: dict[str, None] = {}
    while len(keys) < count:
        parts = (rng.choice(told["consonants"]) + rng.choice(told["vowels"]) for _ in range(told["syllables"]))
        keys["".join(parts)] = None
    return list(keys)
