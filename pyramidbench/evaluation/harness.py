"""Tasks of EleutherAI's lm-eval, sample by sample, so that an interrupted run resumes as with every other task."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import redirect_stderr
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from pyramidbench.errors import UserError, unknown
from pyramidbench.evaluation.language_model import LanguageModel
from pyramidbench.evaluation.task import Asked, Group, Outcome, Sample

PREFERRED = ("acc_norm", "acc", "exact_match", "f1")
"""Which of a task's metrics is the score, the first that it has; otherwise its first."""


class HarnessTask:
    """One task of lm-eval (`lm-eval:NAME`), with its own data, prompts, filters and metric.

    The data come from where lm-eval's task says, mostly a hub; what was fetched once is found again without a network.
    `folder` may hold tasks of the user's own as YAML. Of `shots` tokens as many worked examples are made as they hold.
    """

    group: Group = "commonsense"

    def __init__(self, name: str, folder: Path | None) -> None:
        self.name = f"lm-eval:{name}"
        self.harness_name, self.folder = name, folder

    @cached_property
    def task(self) -> Any:
        """lm-eval's task, with its data.

        Raises:
            UserError: lm-eval is missing, has no such task, or cannot get the task's data.
        """
        manager = _manager(self.folder, self.harness_name)
        if self.harness_name not in manager.all_subtasks:
            raise unknown("task of lm-eval", self.harness_name, _near(self.harness_name, manager.all_subtasks))
        try:
            with redirect_stderr(io.StringIO()):
                loaded: Any = manager.load(self.harness_name)["tasks"]
        except (OSError, ValueError, RuntimeError, ImportError) as error:
            raise _no_data(self.harness_name, manager, error) from None
        return next(iter(loaded.values()))

    @property
    def metric(self) -> str:
        """The name of the score."""
        named = [entry["metric"] for entry in self.task.config.metric_list or []] or ["acc"]
        return next((metric for metric in PREFERRED if metric in named), named[0])

    def rounds(self, asked: Asked) -> Iterator[tuple[Sample, ...]]:
        available = len(self.task.eval_docs)
        if asked.samples > available:
            raise UserError(f"{self.name} has {available} samples, {asked.samples} were asked for; ask for fewer.")
        for shots in asked.shots:
            yield tuple(Sample(self.name, index, asked.seed, shots=shots) for index in range(asked.samples))

    def measure(self, sample: Sample, asked: Asked, model: LanguageModel) -> Outcome:  # noqa: ARG002 - the protocol's
        from pyramidbench.evaluation.harness_model import HarnessModel

        assert sample.shots is not None
        answering = HarnessModel(model)
        shots = self._examples(sample, model)
        self._build(sample, shots)
        instances = self.task.instances
        for instance in instances:
            instance.resps.append(getattr(answering, instance.request_type)([instance])[0])
        self.task.apply_filters()
        first = next(iter(instances[0].filtered_resps))
        results = self.task.process_results(instances[0].doc, [one.filtered_resps[first] for one in instances])
        value = results.get(self.metric, next(iter(results.values())))
        if isinstance(value, tuple):
            value = -value[0] / value[1]
        context = str(instances[0].args[0])
        return Outcome(score=float(value), tokens=len(model.ids(context)), shots_given=shots)

    def _examples(self, sample: Sample, model: LanguageModel) -> int:
        """How many worked examples fill `sample.shots` tokens; measured on four, which are drawn as the others."""
        if not sample.shots:
            return 0
        lengths = []
        for shots in (0, 4):
            self._build(sample, shots)
            lengths.append(len(model.ids(str(self.task.instances[0].args[0]))))
        return max(1, int(sample.shots // max(1.0, (lengths[1] - lengths[0]) / 4) * 0.9))

    def _build(self, sample: Sample, shots: int) -> None:
        """The requests of one sample, as lm-eval makes them."""
        self.task.set_config(key="num_fewshot", value=shots)
        self.task.set_fewshot_seed(sample.seed)
        try:
            with redirect_stderr(io.StringIO()):
                self.task.build_all_requests(samples=[sample.index])
        except (ValueError, AssertionError, IndexError) as error:
            raise UserError(
                f"{self.name} cannot make {shots} worked examples: {' '.join(str(error).split())}."
            ) from None


@cache
def _manager(folder: Path | None, name: str) -> Any:
    """lm-eval's index of tasks: the user's folder alone where it has the task, since that of all takes seconds to read."""
    try:
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise UserError("tasks of lm-eval need the package lm-eval: pip install 'pyramidbench[hf]'.") from None
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if folder is None:
        return TaskManager()
    if not folder.is_dir():
        raise UserError(f"--task-path '{folder}' is not a folder; give one with YAML tasks of lm-eval.")
    own = TaskManager(include_path=str(folder), include_defaults=False)
    return own if name in own.all_subtasks else TaskManager(include_path=str(folder))


def _near(name: str, names: list[str]) -> list[str]:
    """Names that share a start with what was given; there are thousands."""
    return [one for one in names if one.startswith(name[:4])][:20] or ["see `lm-eval ls tasks`"]


def _no_data(name: str, manager: Any, error: Exception) -> UserError:
    """What is missing, and how to get it."""
    entry = manager.task_index.get(name)
    config = getattr(entry, "cfg", None) or {}
    path = config.get("dataset_path") or "the one that its YAML names"
    why = (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
    return UserError(
        f"the data of lm-eval:{name} (dataset {path}) are not on this disk and could not be fetched ({why}); run the "
        "command once with a network, or copy the folder that HF_HOME names from a machine that has it."
    )
