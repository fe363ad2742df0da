"""Judging a cell: the gate, and the quality of what it computes. Tensors and exact attention are shared by a group.

`judge` is what a sweep asks before it times a cell; `verify` asks whether a method is right, on two sets of tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyramidbench import inputs
from pyramidbench.budget import reached
from pyramidbench.cell import Cell
from pyramidbench.device import synchronize
from pyramidbench.fastest import Choice, fastest
from pyramidbench.gate import Called, GateFailure, Passed, check_call, check_causal, check_form, gate_tiling
from pyramidbench.gate_gradients import check_gradients, check_gradients_causal
from pyramidbench.method import BlockMethod, Method
from pyramidbench.oracle import ExactRows, TileMass, exact_rows, sample_tiles, widened
from pyramidbench.outcome import Settings
from pyramidbench.passes import Training
from pyramidbench.problem import Problem
from pyramidbench.quality import Quality, measure_quality
from pyramidbench.rates import work
from pyramidbench.registry import mass_source
from pyramidbench.tiling import Tiling

QKV = tuple[Tensor, Tensor, Tensor]


@dataclass
class Loaded:
    """Tensors of one group of cells, and what has been computed once for all its methods."""

    q: Tensor
    k: Tensor
    v: Tensor
    problem: Problem
    exact: dict[Tiling, tuple[Tensor, ExactRows, TileMass | None]] = field(default_factory=dict)
    choices: dict[str, Choice] = field(default_factory=dict)

    @classmethod
    def of(cls, cell: Cell, device: torch.device, kept: QKV | None = None) -> Loaded:
        """A cell's tensors, made or read unless they are here: those of another pass, which the gate saw unmodified."""
        q, k, v = kept or inputs.load_inputs(cell, device)
        return cls(q, k, v, cell.problem(device.type))

    @property
    def tensors(self) -> QKV:
        return self.q, self.k, self.v

    def choose(self, method: Method) -> Choice:
        """The fastest of a method's alternatives, measured when first asked for; most methods stand for themselves."""
        asked = f"{method.name} {method}"
        if asked not in self.choices:
            self.choices[asked] = fastest(method, *self.tensors, self.problem)
        return self.choices[asked]

    def exact_rows(self, tiling: Tiling, elements: int) -> tuple[Tensor, ExactRows, TileMass | None]:
        """Sampled tiles, exact attention on them in fp32, and the mass of more tiles where a faster source runs."""
        if tiling not in self.exact:
            self.exact.clear()
            q, k, problem = self.q, self.k, self.problem
            tiles = sample_tiles(tiling, problem.batch * problem.heads, elements, q.device)
            exact = exact_rows(q, k, self.v, tiling, problem.scale, tiles)
            wide = widened(q, k, problem, tiling, mass_source(tiling), TileMass(tiles, exact.mass))
            self.exact[tiling] = (tiles, exact, wide)
        return self.exact[tiling]


def judge(cell: Cell, method: Method, loaded: Loaded, settings: Settings) -> dict[str, Any]:
    """The columns of gate and quality; of a cell that is timed also `setup_s`, the wall time of its first call of all.

    Raises:
        GateFailure: the first fault found.
    """
    q, k, v, problem = *loaded.tensors, loaded.problem
    called = check_call(method, q, k, v, problem) if cell.timed else check_form(method, q, k, v, problem)
    columns = {
        "backend": method.backend(problem),
        **work(method, problem, called.selection),
        "budget_reached": reached(cell.budget, method, problem, called.selection),
        **asdict(_quality(cell, method, called, loaded, settings)),
        "quality_source": inputs.quality_source(cell.input),
    }
    if not isinstance(called, Passed):
        return columns
    check_causal(method, q, k, v, problem, called)
    training = Training.of(method, q, k, v, problem) if problem.needs_gradients else None
    backward_s = seconds_of(training.train, q.device) if training else 0.0
    errors = max(_share(called.error, called.allowed), _check_training(training, called))
    return columns | {"gate_error": errors, "setup_s": called.seconds + backward_s}


def verify(method: Method, loaded: Loaded) -> dict[str, Any]:
    """The columns of the gate alone, after the same gate on other tensors; a budget of all blocks must be dense attention.

    Raises:
        GateFailure: the first fault found.
    """
    q, k, v, problem = *loaded.tensors, loaded.problem
    called = check_call(method, q, k, v, problem)
    check_causal(method, q, k, v, problem, called)
    training = Training.of(method, q, k, v, problem) if problem.needs_gradients else None
    error = max(_share(called.error, called.allowed), _check_training(training, called))
    told = work(method, problem, called.selection)
    if isinstance(method, BlockMethod) and not method.adaptive:
        blocks = method.tiling(problem).blocks
        if method.top_k >= blocks and told["density"] < 1 - 1e-9:
            kept = f"only {told['density']:.3g} of the pairs are attended to"
            raise GateFailure(f"top_k = {method.top_k} covers all {blocks} blocks, but {kept}")
    check_again(method, loaded)
    return {"backend": method.backend(problem), **told, "gate_error": error}


def check_again(method: Method, loaded: Loaded) -> None:
    """The gate once more, on other tensors of the same shapes: nothing may have been learned from the first ones."""
    q, k, v, problem = *loaded.tensors, loaded.problem
    generator = torch.Generator(device=q.device).manual_seed(2)
    fresh = [
        torch.randn(t.shape, generator=generator, device=t.device, dtype=torch.float32).to(t.dtype) for t in (q, k, v)
    ]
    passed = check_call(method, fresh[0], fresh[1], fresh[2], problem)
    if problem.needs_gradients:
        check_gradients(Training.of(method, fresh[0], fresh[1], fresh[2], problem), passed)


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Wall time of one call, the device's work included."""
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


def _check_training(training: Training | None, called: Passed) -> float:
    """The gate of the gradients, where the pass has them: the largest error ÷ what is allowed."""
    if training is None:
        return 0.0
    errors = check_gradients(training, called)
    check_gradients_causal(training, called, errors)
    return max(_share(apart.error, apart.allowed) for apart in errors.values())


def _share(error: float, allowed: float) -> float:
    return error / allowed if allowed else 0.0


def _quality(cell: Cell, method: Method, called: Called, loaded: Loaded, settings: Settings) -> Quality:
    """Quality columns; empty on random tensors, whose near-uniform attention is no measure of quality."""
    if cell.input == "normal":
        return Quality()
    problem = loaded.problem
    tiling = gate_tiling(method, problem)
    tiles, exact, wide = loaded.exact_rows(tiling, settings.quality_elements)
    return measure_quality(called.output, called.selection, method, problem, tiling, exact, tiles, wide)
