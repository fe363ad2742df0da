"""The columns of time of one cell: its pass under the clock, and the stages of a call beside it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyramidbench.clock import Call, clock_for, sample, stage_times
from pyramidbench.method import Method
from pyramidbench.passes import Training
from pyramidbench.problem import Problem
from pyramidbench.selection import BlockSelection
from pyramidbench.stats import median_interval

STAGE_REPEATS = 3
LONG_CALL_S = 0.2


def measure_time(
    method: Method,
    tensors: tuple[Tensor, Tensor, Tensor],
    problem: Problem,
    selection: BlockSelection | None,
    training: Training | None,
    timing_s: float,
) -> tuple[list[float], dict[str, Any]]:
    """Raw samples of the pass in seconds, and the columns made of them. `selection` is what the stage "attend" attends to,
    and `training` the pass with gradients, None in a forward."""
    q, k, v = tensors
    clock = clock_for(q.device)
    apart = not method.chooses_inside
    with torch.no_grad():
        samples = sample(_timed_call(method, tensors, problem, selection, training), clock, timing_s)
        stages = stage_times(
            (lambda: method.select(q, k, problem)) if apart else (lambda: None),
            lambda: training.attend(selection) if training else method.attend(q, k, v, selection, problem),
            q.device,
            STAGE_REPEATS if max(samples) < LONG_CALL_S else 1,
            training.backward if training else None,
        )
    interval = median_interval(samples)
    build, route = stages.get("build"), stages.get("route")
    index = stages["select"] - (build or 0.0) - (route or 0.0)
    return samples, {
        "latency_s": interval.median,
        "latency_low_s": interval.low,
        "latency_high_s": interval.high,
        "samples": len(samples),
        "clock": clock.name,
        "build_s": build,
        "route_s": route,
        "index_s": max(0.0, index) if selection is not None and apart else None,
        "attend_s": stages["attend"],
        "backward_s": stages.get("backward"),
    }


def _timed_call(
    method: Method,
    tensors: tuple[Tensor, Tensor, Tensor],
    problem: Problem,
    selection: BlockSelection | None,
    training: Training | None,
) -> Call:
    """What the clock times: a whole forward; a whole forward and backward; or the backward of one forward, whose graph is
    kept."""
    if training is None:
        return lambda: method(*tensors, problem)
    if problem.direction == "train":
        return training.train
    output = training.attend(selection)
    return lambda: training.backward(output)
