"""The fastest of several methods that compute the same: each is checked by the gate and timed on the cell's own tensors."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from pyramidbench.clock import Call, clock_for
from pyramidbench.gate import check_call
from pyramidbench.method import Method
from pyramidbench.nvml import watch_for
from pyramidbench.outcome import is_device_fault
from pyramidbench.passes import Training
from pyramidbench.problem import Problem
from pyramidbench.sampling import sample_in_turns
from pyramidbench.timing import timed_call
from pyramidbench.units import milliseconds, one_line

TIMING_S = 0.5
"""Seconds of repeated calls for each of them; three calls at least."""


@dataclass(frozen=True)
class Choice:
    """The method that runs, and what a reader of its row should know about how it was chosen (None: nothing was)."""

    method: Method
    note: str | None = None


def fastest(method: Method, q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Choice:
    """The fastest of a method's alternatives that passes the gate, or the method itself where it has none. They are timed in
    turns, as cells are.

    One that fails is left out, and the note says why; where all fail, the first one is returned and fails in its row.
    """
    rivals = method.alternatives(problem)
    if len(rivals) < 2:
        return Choice(rivals[0] if rivals else method)
    calls: dict[int, Call] = {}
    failed: dict[int, str] = {}
    for index, rival in enumerate(rivals):
        try:
            calls[index] = _checked_call(rival, q, k, v, problem)
        except Exception as error:  # what one package does wrong is no reason to lose the others
            if is_device_fault(error):
                raise
            failed[index] = f"failed ({one_line(error)[:120]})"
    times = dict(zip(calls, _seconds(list(calls.values()), q.device)))
    told = {index: f"{milliseconds(seconds)} ms" for index, seconds in times.items()} | failed
    notes = [f"{rival.backend(problem)} {told[index]}" for index, rival in enumerate(rivals)]
    best = min(times, key=lambda index: times[index], default=0)
    return Choice(rivals[best], f"the fastest of {', '.join(notes)}")


def _checked_call(rival: Method, q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Call:
    """The problem's pass, after the gate and a first call of it."""
    check_call(rival, q, k, v, problem)
    training = Training.of(rival, q, k, v, problem) if problem.needs_gradients else None
    call = timed_call(rival, (q, k, v), problem, training)
    call()
    return call


def _seconds(calls: list[Call], device: torch.device) -> list[float]:
    """Median times of calls, in turns."""
    if not calls:
        return []
    with torch.no_grad():
        sampled = sample_in_turns(calls, clock_for(device), TIMING_S, watch_for(device))
    return [median(own.seconds) for own in sampled]
