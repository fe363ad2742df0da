"""Running an evaluation: every sample under every attention, each on disk before the next; the same call resumes."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby, zip_longest
from pathlib import Path

import pyramidbench
import pyramidbench.transformers as attention_interface
from pyramidbench.device import fingerprint
from pyramidbench.errors import UserError
from pyramidbench.evaluation.attention import Attention
from pyramidbench.evaluation.journal import Evaluation, EvaluationManifest, Journal
from pyramidbench.evaluation.language_model import LanguageModel
from pyramidbench.evaluation.record import EvaluationRecord
from pyramidbench.evaluation.task import Asked, Outcome, Sample, Task, TaskOfMany
from pyramidbench.method import BlockMethod
from pyramidbench.model_files import ModelSource, Say
from pyramidbench.sparse_layer import Unsupported

ERRORS = "errors.txt"
"""Tracebacks of attentions that failed, beside the samples."""


@dataclass(frozen=True)
class Step:
    """One row to measure. `round`: number of the round of samples that it belongs to, over all tasks."""

    task: Task
    sample: Sample
    attention: Attention
    round: int


def steps(tasks: tuple[Task, ...], attentions: tuple[Attention, ...], asked: Asked) -> Iterator[Step]:
    """All rows in the order that they are measured: a round of samples under each attention before the next round.

    The tasks take turns, round by round, so that a run that is stopped has something of each, and as much of every attention.
    """
    turns = zip_longest(*(task.rounds(asked) for task in tasks))
    rounds = ((task, samples) for turn in turns for task, samples in zip(tasks, turn) if samples is not None)
    for number, (task, samples) in enumerate(rounds):
        for attention in attentions:
            for sample in samples:
                yield Step(task, sample, attention, number)


def identity(step: Step, source: ModelSource, texts: dict[str, str]) -> str:
    """A hash of everything that defines a row; `texts` has the checksum of each text."""
    defining = [
        source.name, source.sha256, dataclasses.asdict(step.sample), dataclasses.asdict(step.attention),
        texts.get(step.sample.text or ""),
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(defining, sort_keys=True).encode()).hexdigest()[:12]


def evaluate(
    model: LanguageModel,
    tasks: tuple[Task, ...],
    attentions: tuple[Attention, ...],
    asked: Asked,
    folder: Path,
    say: Say,
    ends: float = math.inf,
) -> Evaluation:
    """Measure what `folder` does not hold yet, and return all of it. Nothing is begun after `ends` on time.perf_counter.

    Raises:
        UserError: a prompt that does not fit the model, a folder that cannot be used, or an attention that failed, which the
            others outlive; nothing measured is lost.
    """
    texts = {text.label: text.sha256 for text in asked.texts}
    planned = [(step, identity(step, model.source, texts)) for step in steps(tasks, attentions, asked)]
    device = fingerprint(model.device, peaks=False)
    journal = Journal(folder, _manifest(model, asked, tasks, attentions, texts, [cell for _, cell in planned]), device)
    try:
        failed = _measure(planned, asked, model, device.name, journal, say, ends)
    finally:
        evaluation = journal.close()
    if failed:
        names = ", ".join(f"{one.method} {one.budget or ''}".strip() for one in failed)
        raise UserError(
            f"{names} failed, see '{folder / ERRORS}'; all others are measured, and the same command tries again."
        )
    return evaluation


def _measure(
    planned: list[tuple[Step, str]],
    asked: Asked,
    model: LanguageModel,
    device: str,
    journal: Journal,
    say: Say,
    ends: float,
) -> list[Attention]:
    """Put what is not on disk yet there, and return the attentions that failed: each is left out after its first error."""
    todo = [(step, cell) for step, cell in planned if cell not in journal.done]
    say(f"{len(todo)} samples to do, {len(planned) - len(todo)} done before")
    number, in_force = 0, None
    failed: list[Attention] = []
    for together in _together(todo, model):
        attention = together[0][0].attention
        if time.perf_counter() > ends:
            say(f"{len(todo) - number} samples are left: the time is up; the same command goes on with them")
            break
        if attention in failed:
            continue
        try:
            if attention != in_force:
                model.use(attention)
                in_force = attention
            for record in _measured(together, asked, model, device):
                journal.add(record)
                number += 1
                say(_progress(number, len(todo), record))
        except UserError:
            raise
        except Exception as error:
            in_force = None
            failed.append(attention)
            with (journal.folder / ERRORS).open("a", encoding="utf-8") as stream:
                stream.write(f"{attention}\n{traceback.format_exc()}\n")
            said = (str(error).strip().splitlines() or [""])[0]
            say(f"{attention.method} {attention.budget or ''} failed and is left out: {type(error).__name__}: {said}")
    return failed


def _together(todo: Sequence[tuple[Step, str]], model: LanguageModel) -> Iterator[list[tuple[Step, str]]]:
    """Rows that are measured in one go: those of one round and attention where task and model can, else one by one."""

    def goes(item: tuple[int, tuple[Step, str]]) -> tuple[object, ...]:
        at, (step, _) = item
        many = isinstance(step.task, TaskOfMany) and model.side_by_side > 1
        return (step.round, step.attention, None if many else at)

    for _, rows in groupby(enumerate(todo), key=goes):
        yield [row for _, row in rows]


def _measured(
    together: list[tuple[Step, str]], asked: Asked, model: LanguageModel, device: str
) -> Iterator[EvaluationRecord]:
    """The records of rows that are measured in one go; they share its time and its counts of attention."""
    first = together[0][0]
    attention_interface.reset_usage()
    before = model.busy_s
    known = [_known(step, cell, model, device) for step, cell in together]
    try:
        outcomes = _outcomes([step for step, _ in together], asked, model)
    except Unsupported as gap:
        for one in known:
            yield EvaluationRecord.model_validate({**one, "status": "unsupported", "reason": str(gap)})
        return
    used = attention_interface.usage()
    if known[0]["kind"] != "dense" and not used.sparse_calls:
        raise UserError(f"method '{first.attention.method}' never ran in this model: it has no layer that it reaches.")
    found = {
        "status": "ok", "backend": ", ".join(used.backends), "choice_share": used.choice_share, "density": used.density,
        "sparse_calls": used.sparse_calls, "dense_calls": used.dense_calls,
        "seconds": (model.busy_s - before) / len(together),
    }  # fmt: skip
    for one, outcome in zip(known, outcomes):
        yield EvaluationRecord.model_validate({**one, **_came_to(outcome), **found})


def _outcomes(rows: list[Step], asked: Asked, model: LanguageModel) -> list[Outcome]:
    task, samples = rows[0].task, [step.sample for step in rows]
    if isinstance(task, TaskOfMany):
        return task.measure_all(samples, asked, model)
    return [task.measure(sample, asked, model) for sample in samples]


def _known(step: Step, cell: str, model: LanguageModel, device: str) -> dict[str, object]:
    """The columns that are known before the model is asked."""
    made = step.attention.made
    blocks = made if isinstance(made, BlockMethod) else None
    asked = {name: value for name, value in dataclasses.asdict(step.sample).items() if name != "task"}
    return {
        "cell": cell, "task": step.task.name, "group": step.task.group, "metric": step.task.metric,
        "model": model.source.name, "device": device, "dtype": model.dtype, "method": step.attention.method, "kind": made.kind,
        "budget": step.attention.budget, "top_k": None if blocks is None else blocks.top_k,
        "query_tile": None if blocks is None else blocks.query_tile, "parameters": step.attention.parameters,
        "dense_layers": ",".join(map(str, step.attention.dense_layers)) or None, **asked,
    }  # fmt: skip


def _came_to(outcome: Outcome) -> dict[str, object]:
    return {**dataclasses.asdict(outcome), "position_loss": list(outcome.position_loss) or None}


def _progress(number: int, total: int, record: EvaluationRecord) -> str:
    at = "" if record.length is None else f" {record.length}"
    depth = "" if record.depth is None else f" depth {record.depth:.2f}"
    budget = "" if record.budget is None else f" {record.budget}"
    came_to = record.reason if record.score is None else f"{record.score:.4f} in {record.seconds:.1f} s"
    return f"[{number}/{total}] {record.task}{at}{depth} #{record.index} {record.method}{budget}: {came_to}"


def _manifest(
    model: LanguageModel, asked: Asked, tasks: tuple[Task, ...], attentions: tuple[Attention, ...], texts: dict[str, str],
    cells: list[str],
) -> EvaluationManifest:  # fmt: skip
    settings = {
        "tasks": [task.name for task in tasks],
        "attentions": [dataclasses.asdict(attention) for attention in attentions],
        "lengths": asked.lengths, "depths": asked.depths, "samples": asked.samples, "shots": asked.shots,
        "seed": asked.seed,
    }  # fmt: skip
    if (model.dtype, model.device.type) != ("float32", "cpu"):
        settings["dtype"] = model.dtype
    return EvaluationManifest(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        argv=sys.argv[1:],
        model=model.source.name,
        model_sha256=model.source.sha256,
        texts=texts,
        settings=json.loads(json.dumps(settings)),
        version=pyramidbench.__version__,
        cells=cells,
    )
