"""The tasks by name, and the names that stand for several."""

from __future__ import annotations

from pathlib import Path

from pyramidbench.errors import UserError, unknown
from pyramidbench.evaluation.prompting import prompts
from pyramidbench.evaluation.task import Task
from pyramidbench.evaluation.tasks.associative_recall import AssociativeRecall
from pyramidbench.evaluation.tasks.common_words import CommonWords
from pyramidbench.evaluation.tasks.commonsense import Commonsense
from pyramidbench.evaluation.tasks.multi_key import MultiKey
from pyramidbench.evaluation.tasks.multi_query import MultiQuery
from pyramidbench.evaluation.tasks.multi_value import MultiValue
from pyramidbench.evaluation.tasks.perplexity import Perplexity
from pyramidbench.evaluation.tasks.single_needle import SingleNeedle
from pyramidbench.evaluation.tasks.variable_tracking import VariableTracking

LM_EVAL = "lm-eval:"
"""Starts the name of a task of EleutherAI's lm-eval."""
OWN = (
    Perplexity, SingleNeedle, MultiKey, MultiValue, MultiQuery, VariableTracking, CommonWords, AssociativeRecall,
)  # fmt: skip


def task_names() -> tuple[str, ...]:
    """Every task of pyramidbench's own."""
    return (*(task.name for task in OWN), *prompts("commonsense"))


def groups() -> dict[str, tuple[str, ...]]:
    """The names that stand for several tasks."""
    retrieval = tuple(task.name for task in OWN if task.group == "retrieval")
    return {"retrieval": retrieval, "commonsense": tuple(prompts("commonsense")), "all": task_names()}


def find_tasks(names: list[str], folder: Path | None) -> tuple[Task, ...]:
    """The tasks behind some names; `folder` holds lm-eval tasks of the user's own.

    Raises:
        UserError: a name that does not exist, or lm-eval is missing.
    """
    asked = [task for name in names for task in groups().get(name, (name,))]
    if not asked:
        raise UserError(f"no task was given; accepted: {', '.join((*groups(), *task_names()))}, {LM_EVAL}NAME.")
    return tuple(_one(name, folder) for name in dict.fromkeys(asked))


def _one(name: str, folder: Path | None) -> Task:
    if name.startswith(LM_EVAL):
        from pyramidbench.evaluation.harness import HarnessTask

        return HarnessTask(name.removeprefix(LM_EVAL), folder)
    own = {task.name: task for task in OWN}
    if name in own:
        return own[name]()
    if name in prompts("commonsense"):
        return Commonsense(name)
    raise unknown("task", name, (*groups(), *task_names(), f"{LM_EVAL}NAME"))
