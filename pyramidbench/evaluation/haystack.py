"""Haystacks: a question about lines that are hidden in a long text, cut so that the whole prompt has the length asked for."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from pyramidbench.errors import UserError
from pyramidbench.evaluation.language_model import LanguageModel
from pyramidbench.evaluation.task import Outcome
from pyramidbench.texts import Passage

_SENTENCE_END = re.compile(r"(?<=[.!?;:\"])\s+|\n\s*\n")


@dataclass(frozen=True)
class Needle:
    """A line that is hidden at `depth`: 0 is the start of the text, 1 its end."""

    line: str
    depth: float


@dataclass(frozen=True)
class Question:
    """What is asked. `prefix` starts the model's answer; `answer` is the pattern of one answer in what it says.

    answers: the right ones, in any order; the first so many different ones that the model gives are judged.
    """

    instruction: str
    question: str
    prefix: str
    answer: str
    answers: tuple[str, ...]
    new_tokens: int


def ask(question: Question, prompt: list[int], model: LanguageModel) -> Outcome:
    """The model's greedy answer to a prompt, by exact match: 1 where all answers are right and none besides."""
    wanted = len(question.answers)

    def is_told(said: str) -> bool:
        # The last match may still grow.
        whole = {found.group() for found in re.finditer(question.answer, said) if found.end() < len(said)}
        return len(whole) >= wanted

    said = model.text(model.generate(prompt, question.new_tokens, is_told))
    given = list(dict.fromkeys(re.findall(question.answer, said)))[:wanted]
    right = len(set(given) & set(question.answers))
    return Outcome(
        score=float(set(given) == set(question.answers)),
        partial=right / len(question.answers),
        tokens=len(prompt),
        expected=" ".join(question.answers),
        answered=said.strip(),
    )


def hidden_in(
    text: Passage, needles: Sequence[Needle], question: Question, length: int, rng: random.Random, model: LanguageModel
) -> list[int]:
    """A prompt with the needles in a stretch of the text, of at most `length` tokens with the answer, and little less.

    Raises:
        UserError: the length is too short for the question, or the text for the length.
    """
    model.check_length(length)
    return list(_hidden(text, tuple(needles), question, length, rng.getstate(), model))


@lru_cache(maxsize=4)
def _hidden(
    text: Passage, needles: tuple[Needle, ...], question: Question, length: int, state: Any, model: LanguageModel
) -> list[int]:
    """The prompt, kept since every attention asks for it again."""
    rng = random.Random()
    rng.setstate(state)
    room = length - question.new_tokens
    bare = len(framed(" ".join(needle.line for needle in needles), question, model))
    filler = _stretch(text, room - bare, rng, model)
    while filler:
        prompt = framed(_with_needles(filler, needles), question, model)
        if len(prompt) <= room:
            return prompt
        filler = filler[: -max(1, (len(prompt) - room) // 64)]
    raise UserError(f"a prompt of {length} tokens has no room for a text besides the question; ask for a longer one.")


def framed(text: str, question: Question, model: LanguageModel) -> list[int]:
    """Instruction, text and question as a chat, and the start of the answer."""
    return model.chat(f"{question.instruction}\n\n{text}\n\n{question.question}") + model.ids(question.prefix)


def _with_needles(sentences: Sequence[str], needles: Sequence[Needle]) -> str:
    lines = list(sentences)
    for needle in sorted(needles, key=lambda needle: -needle.depth):
        lines.insert(round(needle.depth * len(sentences)), needle.line)
    return " ".join(lines)


def _stretch(text: Passage, tokens: int, rng: random.Random, model: LanguageModel) -> list[str]:
    """Consecutive sentences of about so many tokens, from a place that the generator draws."""
    sentences = _sentences(text)
    start = rng.randrange(len(sentences))
    found: list[str] = []
    for step in range(len(sentences)):
        if tokens <= 0:
            return found
        found.append(sentences[(start + step) % len(sentences)])
        tokens -= len(model.ids(" " + found[-1]))
    raise UserError(f"text '{text.label}' is shorter than the prompts that were asked for; give a longer one.")


@cache
def _sentences(text: Passage) -> list[str]:
    return [" ".join(part.split()) for part in _SENTENCE_END.split(text.text) if part.strip()]
