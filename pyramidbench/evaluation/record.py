"""EvaluationRecord: one sample under one attention, as it stands in samples.jsonl and in results.parquet and results.csv."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

SCHEMA_VERSION = 1


def _column(description: str) -> Any:
    return Field(default=None, description=description)


class EvaluationRecord(BaseModel):
    """One sample of a task under one attention. A missing number is null, never 0."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cell: str = Field(description="identity of the row: a hash of everything that defines it")
    status: Literal["ok", "unsupported"] = Field(description="ok, or unsupported with a reason and no numbers")
    reason: str | None = _column("why there is no number")
    task: str = Field(description="name of the task")
    group: str = Field(description="perplexity, retrieval, recall or commonsense")
    metric: str = Field(description="what `score` is")
    model: str = Field(description="the model's name")
    device: str = Field(description="the device's own name")
    dtype: str | None = _column("of the model's weights and activations; null in runs before it was recorded: float32")
    backend: str | None = _column("what ran the attention, choosing + attending, such as triton or sdpa-flash")
    method: str = Field(description="name, or name:preset")
    kind: str = Field(description="dense, selection, or bound (an oracle or a floor, not a rival)")
    budget: str | None = _column("the budget as it was asked for, e.g. keep=10%")
    top_k: int | None = _column("blocks kept by rank, besides those that are always kept")
    query_tile: int | None = _column("consecutive queries that share one set of blocks")
    parameters: str = Field(description="parameters that the run set, as JSON")
    dense_layers: str | None = _column("layers that kept dense attention")
    text: str | None = _column("label of the text that the prompt is made of")
    length: int | None = _column("length that was asked for, tokens")
    tokens: int | None = _column("length of the prompt, tokens")
    depth: float | None = _column("where the answer stands in the prompt: 0 its start, 1 its end")
    shots: int | None = _column("tokens that were asked for worked examples; 0 is zero-shot")
    shots_given: int | None = _column("worked examples in the prompt")
    index: int = Field(description="number of the sample")
    seed: int = Field(description="seed that the sample was drawn with")
    score: float | None = _column("the task's metric: a loss, or 1 for right and 0 for wrong")
    partial: float | None = _column("share of the expected answers that were given, where there are several")
    chance: float | None = _column("what a guess would score")
    position_loss: list[float] | None = _column("mean loss of each 1 024 positions, nats per token")
    expected: str | None = _column("the right answer")
    answered: str | None = _column("what the model said or chose")
    choice_share: float | None = _column(
        "share of the queries with more eligible blocks than K; where it is 0, sparse is dense in disguise"
    )
    density: float | None = _column("attended ÷ visible (query, key) pairs of the sparse layers")
    sparse_calls: int | None = _column(
        "attention calls that chose blocks, of the samples computed together: proof that the sparse path ran"
    )
    dense_calls: int | None = _column("attention calls that attended to everything, as asked for, likewise")
    seconds: float | None = _column(
        "wall time of the model, prompt and answer; samples computed together share it equally"
    )


def columns() -> list[str]:
    """The columns of a run's table, in order."""
    return list(EvaluationRecord.model_fields)
