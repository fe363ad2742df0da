"""Task: what an evaluation asks of a model, sample by sample; and what a sample came to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from pyramidbench.evaluation.language_model import LanguageModel
from pyramidbench.texts import Passage

Group = Literal["perplexity", "retrieval", "recall", "commonsense"]


@dataclass(frozen=True)
class Asked:
    """What the user asks of the tasks. Lengths and shots in tokens; `depths` are shares of the prompt, 0 its start.

    samples: samples per text, length and depth (perplexity, retrieval), or questions of a set (commonsense).
    shots: tokens that worked examples fill before a commonsense question; 0 is zero-shot.
    """

    texts: tuple[Passage, ...]
    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    samples: int
    shots: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class Sample:
    """One thing that is asked: which of its kind (`index`), at which length (tokens), depth, shots and on which text."""

    task: str
    index: int
    seed: int
    length: int | None = None
    depth: float | None = None
    shots: int | None = None
    text: str | None = None


@dataclass(frozen=True)
class Outcome:
    """What a sample came to. score: the task's metric. `partial`: share of several answers that were right.

    tokens: of the prompt. position_loss: mean loss of each POSITION_BUCKET tokens, in nats. chance: the score of a guess.
    """

    score: float
    tokens: int
    partial: float | None = None
    chance: float | None = None
    shots_given: int | None = None
    position_loss: tuple[float, ...] = field(default=())
    expected: str | None = None
    answered: str | None = None


class Task(Protocol):
    """One kind of question. `metric` names the score."""

    @property
    def name(self) -> str: ...

    @property
    def group(self) -> Group: ...

    @property
    def metric(self) -> str: ...

    def rounds(self, asked: Asked) -> Iterator[tuple[Sample, ...]]:
        """The samples, in rounds that an attention does in one go (they may share the start of their prompts).

        All lengths, depths and shots come once before any comes again: a run that is stopped has some of each.

        Raises:
            UserError: the task cannot be done as asked.
        """

    def measure(self, sample: Sample, asked: Asked, model: LanguageModel) -> Outcome:
        """Ask the model; its attention is set already.

        Raises:
            UserError: the prompt does not fit the model.
        """


@runtime_checkable
class TaskOfMany(Task, Protocol):
    """A task that can ask a whole round at once, which a GPU answers in far fewer calls."""

    def measure_all(self, samples: Sequence[Sample], asked: Asked, model: LanguageModel) -> list[Outcome]:
        """`measure` for the samples of one round, with the same outcomes."""
