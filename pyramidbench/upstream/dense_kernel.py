"""DenseKernel: one function that computes dense attention, and what must hold for it to be called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from pyramidbench.problem import Problem

KernelName = Literal["cudnn", "flash", "efficient", "math", "fa2", "fa3", "fa4"]


def _always(problem: Problem) -> float:  # noqa: ARG001 - the signature of a cost
    return 0.0


def _here() -> str | None:
    return None


@dataclass(frozen=True)
class DenseKernel:
    """A dense attention function.

    name: as the method's parameter `kernel` and its presets have it. backend: what the row shows.
    limit: why it cannot do a problem, or None. gap: why it is not on this machine, or None.
    attend: (q [B, H, M, D], k [B, G, N, D], v [B, G, N, Dv], problem) → [B, H, M, Dv]; causal masks end bottom right, and
    a query before the first key gets 0. workspace: bytes that it holds besides inputs and output.
    """

    name: KernelName
    backend: str
    limit: Callable[[Problem], str | None]
    attend: Callable[[Tensor, Tensor, Tensor, Problem], Tensor]
    gap: Callable[[], str | None] = _here
    workspace: Callable[[Problem], float] = _always
