"""Questions with choices, read from the files that packages bring."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from pyramidbench.evaluation.carriers import CARRIERS, member
from pyramidbench.evaluation.prompting import prompts


@dataclass(frozen=True)
class Choice:
    """A question before its answer, its choices, and the index of the right one.

    continuations: what is judged after each choice's context;
    a winogrande context differs by choice and its continuation does not, elsewhere it is the other way round.
    """

    contexts: tuple[str, ...]
    continuations: tuple[str, ...]
    right: int

    @property
    def example(self) -> str:
        """The question with its right answer."""
        return self.contexts[self.right] + self.continuations[self.right]


@cache
def read_questions(name: str) -> tuple[Choice, ...]:
    """The questions of a set of prompts/commonsense.toml, in the file's order.

    Raises:
        UserError: the package that brings it was not fetched.
    """
    told = prompts("commonsense")[name]
    carrier = CARRIERS[told["package"]]
    path = next(path for path in carrier.members if path.endswith(told["member"]))
    text = member(carrier, path).read_text(encoding="utf-8")
    return tuple(READERS[told["form"]](text, told["question"]))


def _bigbench(text: str, question: str) -> Iterator[Choice]:
    for example in json.loads(text)["examples"]:
        choices = example["target_scores"]
        right = max(choices, key=choices.get)
        context = question.format(input=example["input"].strip())
        yield _by_answer(context, [choice.strip() for choice in choices], right.strip())


def _letters(text: str, question: str) -> Iterator[Choice]:
    """One JSON a line: a question with lettered choices, and the right letter. The choices' own words are judged."""
    for line in text.splitlines():
        example: dict[str, Any] = json.loads(line)
        asked, _, listed = example["input"][-1]["content"].partition("\n\n")
        choices = dict(re.findall(r"^ ?([A-Z]): (.+)$", listed, re.MULTILINE))
        if len(choices) > 1 and example["ideal"] in choices:
            context = question.format(input=asked.strip())
            yield _by_answer(context, list(choices.values()), choices[example["ideal"]])


def _winogrande(text: str, question: str) -> Iterator[Choice]:
    """Pairs of sentences with a blank: the two answers are each other's wrong choice; what follows the blank is judged."""
    pattern = re.compile(
        r"Sentence 1: (.+?)\s*\n?\s*Answer ?1: (.+?)\.?\s*\n?\s*Sentence 2: (.+?)\s*\n?\s*Answer ?2: (.+?)\.?\s*$",
        re.DOTALL,
    )
    for example in json.loads(text)["examples"]:
        found = pattern.search(example["target"][0])
        if found is None:
            continue
        first, answer, second, other = (part.strip() for part in found.groups())
        for sentence, right, wrong in ((first, answer, other), (second, other, answer)):
            before, blank, after = sentence.partition("_")
            if blank and after.strip() and right != wrong:
                contexts = tuple(question.format(input=before + word) for word in (right, wrong))
                yield Choice(contexts, (after, after), 0)


def _by_answer(context: str, choices: list[str], right: str) -> Choice:
    return Choice((context,) * len(choices), tuple(f" {choice}" for choice in choices), choices.index(right))


READERS = {"bigbench": _bigbench, "letters": _letters, "winogrande": _winogrande}
