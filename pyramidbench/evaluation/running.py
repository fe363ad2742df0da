"""Running an evaluation: every sample under every attention, each on disk before the next; the same call resumes."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

import pyramidbench
import pyramidbench.transformers as attention_interface
from pyramidbench.device import fingerprint
from pyramidbench.errors import UserError
from pyramidbench.evaluation.attention import Attention
from pyramidbench.evaluation.journal import Evaluation, EvaluationManifest, Journal
from pyramidbench.evaluation.language_model import LanguageModel
from pyramidbench.evaluation.record import EvaluationRecord
from pyramidbench.evaluation.task import Asked, Outcome, Sample, Task
from pyramidbench.method import BlockMethod
from pyramidbench.model_files import ModelSource, Say
from pyramidbench.sparse_layer import Unsupported


@dataclass(frozen=True)
class Step:
    """One row to measure."""

    task: Task
    sample: Sample
    attention: Attention


def steps(tasks: tuple[Task, ...], attentions: tuple[Attention, ...], asked: Asked) -> Iterator[Step]:
    """All rows in the order that they are measured: a round of samples under each attention before the next round."""
    for task in tasks:
        for samples in task.rounds(asked):
            for attention in attentions:
                for sample in samples:
                    yield Step(task, sample, attention)


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
) -> Evaluation:
    """Measure what `folder` does not hold yet, and return all of it.

    Raises:
        UserError: a prompt that does not fit the model, or a folder that cannot be used; nothing measured is lost.
    """
    texts = {text.label: text.sha256 for text in asked.texts}
    planned = [(step, identity(step, model.source, texts)) for step in steps(tasks, attentions, asked)]
    device = fingerprint(model.device, peaks=False)
    journal = Journal(folder, _manifest(model, asked, tasks, attentions, texts, [cell for _, cell in planned]), device)
    try:
        todo = [(step, cell) for step, cell in planned if cell not in journal.done]
        say(f"{len(todo)} samples to do, {len(planned) - len(todo)} done before")
        in_force: Attention | None = None
        for number, (step, cell) in enumerate(todo, 1):
            if step.attention != in_force:
                model.use(step.attention)
                in_force = step.attention
            record = _measured(step, cell, asked, model, device.name)
            journal.add(record)
            say(_progress(number, len(todo), record))
    finally:
        evaluation = journal.close()
    return evaluation


def _measured(step: Step, cell: str, asked: Asked, model: LanguageModel, device: str) -> EvaluationRecord:
    before, started = attention_interface.usage(), time.perf_counter()
    known = _known(step, cell, model, device)
    try:
        outcome: Outcome = step.task.measure(step.sample, asked, model)
    except Unsupported as gap:
        return EvaluationRecord.model_validate({**known, "status": "unsupported", "reason": str(gap)})
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    seconds = time.perf_counter() - started
    used = attention_interface.usage() - before
    if known["kind"] != "dense" and not used.sparse_calls:
        raise UserError(f"method '{step.attention.method}' never ran in this model: it has no layer that it reaches.")
    found = {
        "status": "ok", "choice_share": used.choice_share, "density": used.density, "sparse_calls": used.sparse_calls,
        "dense_calls": used.dense_calls, "seconds": seconds,
    }  # fmt: skip
    return EvaluationRecord.model_validate({**known, **_came_to(outcome), **found})


def _known(step: Step, cell: str, model: LanguageModel, device: str) -> dict[str, object]:
    """The columns that are known before the model is asked."""
    made = step.attention.made
    blocks = made if isinstance(made, BlockMethod) else None
    asked = {name: value for name, value in dataclasses.asdict(step.sample).items() if name != "task"}
    return {
        "cell": cell, "task": step.task.name, "group": step.task.group, "metric": step.task.metric,
        "model": model.source.name, "device": device, "method": step.attention.method, "kind": made.kind,
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
