"""The fastest of several methods that compute the same: each is checked by the gate and timed on the cell's own tensors."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from pyramidbench.clock import Call, clock_for, sample
from pyramidbench.gate import check_call
from pyramidbench.method import Method
from pyramidbench.passes import Training
from pyramidbench.problem import Problem
from pyramidbench.units import milliseconds, one_line

TIMING_S = 0.5
"""Seconds of repeated calls for each of them; three calls at least."""


@dataclass(frozen=True)
class Choice:
    """The method that runs, and what a reader of its row should know about how it was chosen (None: nothing was)."""

    method: Method
    note: str | None = None


def fastest(method: Method, q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Choice:
    """The fastest of a method's alternatives that passes the gate, or the method itself where it has none.

    One that fails is left out, and the note says why; where all fail, the first one is returned and fails in its row.
    """
    rivals = method.alternatives(problem)
    if len(rivals) < 2:
        return Choice(rivals[0] if rivals else method)
    times: dict[int, float] = {}
    notes = []
    for index, rival in enumerate(rivals):
        name = rival.backend(problem)
        try:
            times[index] = _seconds(rival, q, k, v, problem)
        except Exception as error:  # what one package does wrong is no reason to lose the others
            if _device_is_lost(error):
                raise
            notes.append(f"{name} failed ({one_line(error)[:120]})")
        else:
            notes.append(f"{name} {milliseconds(times[index])} ms")
    best = min(times, key=lambda index: times[index], default=0)
    return Choice(rivals[best], f"the fastest of {', '.join(notes)}")


def _seconds(rival: Method, q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> float:
    """Median time of the problem's pass, after the gate."""
    check_call(rival, q, k, v, problem)
    training = Training.of(rival, q, k, v, problem) if problem.needs_gradients else None
    if training is None:
        with torch.no_grad():
            return median(sample(lambda: rival(q, k, v, problem), clock_for(q.device), TIMING_S))
    call: Call = training.train
    if problem.direction == "backward":
        output = training.attend(training.select())
        call = lambda: training.backward(output)  # noqa: E731 - a call with its graph
    return median(sample(call, clock_for(q.device), TIMING_S))


def _device_is_lost(error: Exception) -> bool:
    """Whether a fault left the device in a state in which nothing after it can be trusted."""
    return type(error).__name__ == "AcceleratorError" or "CUDA error" in str(error)
