"""Finishing a cell that has been timed: its stages, its memory, its rates, and the gate once more."""

from __future__ import annotations

from typing import Any

import torch

from pyramidbench.decoding import append_newest, hold
from pyramidbench.device import measured_peaks
from pyramidbench.judging import Loaded, check_again
from pyramidbench.memory import is_too_much, measure_peaks
from pyramidbench.method import Method
from pyramidbench.outcome import Settings
from pyramidbench.passes import Training
from pyramidbench.rates import check_rate, rates
from pyramidbench.record import Record
from pyramidbench.selection import BlockSelection
from pyramidbench.timing import Timing, stage_columns, time_columns

FEW_SAMPLES = 20


def finish(method: Method, loaded: Loaded, judged: Record, timing: Timing, settings: Settings) -> Record:
    """The whole record.

    Raises:
        GateFailure: the method computes something wrong on another seed, or is faster than the device can be.
    """
    q, k, v, problem = *loaded.tensors, loaded.problem
    training = Training.of(method, q, k, v, problem) if problem.needs_gradients else None
    times = time_columns(timing)
    hold(method, k, v, problem)
    stages = stage_columns(method, loaded.tensors, problem, training, settings.cache, times["latency_s"])
    columns = times | {
        "threads": torch.get_num_threads(),
        **stages,
        **_memory(method, loaded, training, judged.expected_memory_bytes or 0),
        **rates(method, problem, method.select(q, k, problem), times["latency_s"]),
    }
    check_again(method, loaded)
    check_rate(columns["useful_flops_per_s"], problem, settings.peak_flops_per_s, lambda: measured_peaks(q.device)[0])
    few = "low_n" if times["samples"] < FEW_SAMPLES else "ok"
    status = "throttled" if timing.sampled.throttled else few
    reasons = (judged.reason, times["reason"], stages["reason"])
    columns["reason"] = "; ".join(text for text in reasons if text) or None
    return Record(**judged.model_dump(by_alias=True, exclude_none=True) | columns | {"status": status})


def _memory(method: Method, loaded: Loaded, training: Training | None, expected: int) -> dict[str, Any]:
    """The columns of measured memory, from one call."""
    q, k, v, problem = *loaded.tensors, loaded.problem

    def select() -> BlockSelection | None:
        if problem.direction == "decode":
            append_newest(method, k, v, problem)
            return None
        return None if method.chooses_inside else method.select(q, k, problem)

    peaks = measure_peaks(
        select,
        lambda chosen: training.attend(chosen) if training else method.attend(q, k, v, chosen, problem),
        q.device,
        training.backward if training else None,
    )
    if peaks is None:
        return {}
    return {
        "peak_memory_bytes": peaks.held,
        "reserved_memory_bytes": peaks.reserved,
        "memory_flagged": is_too_much(peaks.held, expected, q.device.type),
        **{f"{name}_peak_bytes": size for name, size in peaks.stages.items()},
    }
