"""One cell, from method to record: gate, time, memory, quality. The only place that catches everything."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyramidbench import inputs
from pyramidbench.cell import Cell
from pyramidbench.clock import Call
from pyramidbench.errors import UserError
from pyramidbench.gate import Called, GateFailure, Passed, check_call, check_causal, check_form, gate_tiling
from pyramidbench.gate_gradients import check_gradients, check_gradients_causal
from pyramidbench.memory import peak_above_inputs
from pyramidbench.method import BlockMethod, Method
from pyramidbench.oracle import ExactRows, TileMass, exact_rows, sample_tiles, widened
from pyramidbench.passes import Training
from pyramidbench.problem import Problem
from pyramidbench.quality import Quality, measure_quality
from pyramidbench.rates import rates, work
from pyramidbench.record import Record, Status
from pyramidbench.registry import mass_source
from pyramidbench.tiling import Tiling
from pyramidbench.timing import measure_time

FEW_SAMPLES = 20


@dataclass(frozen=True)
class Settings:
    """How cells are measured; the same for all cells of a run.

    timing_s: seconds of repeated calls per cell. quality_elements: logits that the oracle may compute per cell, which
    decides how many query tiles are sampled at long lengths.
    """

    device: str
    device_name: str
    folder: Path
    timing_s: float
    quality_elements: int


@dataclass
class Loaded:
    """Tensors of one group of cells, and what has been computed once for all its methods."""

    q: Tensor
    k: Tensor
    v: Tensor
    problem: Problem
    exact: dict[Tiling, tuple[Tensor, ExactRows, TileMass | None]] = field(default_factory=dict)

    @classmethod
    def of(cls, cell: Cell, device: torch.device) -> Loaded:
        q, k, v = inputs.load_inputs(cell, device)
        return cls(q, k, v, cell.problem(device.type))

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


def run_cell(cell: Cell, load: Callable[[Cell], Loaded], settings: Settings) -> Record:
    """Measure one cell. Every outcome is a record; a failure carries its reason, and its traceback goes to logs/."""
    try:
        method = cell.make_method()
        reason = method.unavailable() or method.unsupported(cell.problem(settings.device))
        if reason is not None:
            return failed(cell, settings, "unsupported", reason)
        return _measure(cell, method, load(cell), settings)
    except GateFailure as failure:
        return failed(cell, settings, "incorrect", str(failure))
    except UserError as error:
        return failed(cell, settings, "unsupported", str(error))
    except (Exception, SystemExit) as error:
        _write_log(cell, settings, traceback.format_exc())
        status, reason = classify(error)
        return failed(cell, settings, status, reason)


def classify(error: BaseException) -> tuple[Status, str]:
    """Status and one-line reason of an unexpected exception."""
    text = " ".join(str(error).split())[:300]
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in text:
        return "oom", f"out of memory: {text}"
    if "CUDA error" in text or type(error).__name__ == "AcceleratorError":
        return "cuda_error", text
    return "crashed", f"{type(error).__name__}: {text}"


def failed(cell: Cell, settings: Settings, status: Status, reason: str) -> Record:
    """A record without numbers."""
    return Record(status=status, reason=reason, **describe(cell, settings))


def describe(cell: Cell, settings: Settings) -> dict[str, Any]:
    """The columns that identify a cell, whatever came of it."""
    method = cell.make_method()
    values: dict[str, Any] = {
        "cell": cell.identity,
        "method": cell.method,
        "kind": method.kind,
        "device": settings.device_name,
        "parameters": cell.all_parameters(),
        "input": _input_label(cell),
        "pass": cell.direction,
    }
    same = (
        "batch",
        "heads",
        "kv_heads",
        "head_dim",
        "dtype",
        "causal",
        "layer",
        "seq_len",
        "seq_len_kv",
        "budget",
        "seed",
    )
    values |= {name: getattr(cell, name) for name in same}
    if isinstance(method, BlockMethod):
        values |= {name: getattr(method, name) for name in ("block_size", "query_tile")}
        problem = cell.problem(settings.device)
        values["top_k"] = None if method.adaptive else method.shared_top_k(problem)
        values["levels"] = method.walked_levels(problem)
    return values


def _input_label(cell: Cell) -> str:
    """The input's label; its path where the file has gone or cannot be read."""
    try:
        return inputs.input_label(cell.input)
    except UserError:
        return cell.input


def _measure(cell: Cell, method: Method, loaded: Loaded, settings: Settings) -> Record:
    q, k, v, problem = loaded.q, loaded.k, loaded.v, loaded.problem
    called = check_call(method, q, k, v, problem) if cell.timed else check_form(method, q, k, v, problem)
    columns = describe(cell, settings) | {
        "backend": method.backend(problem),
        **work(method, problem, called.selection),
        **asdict(_quality(cell, method, called, loaded, settings)),
        "quality_source": inputs.quality_source(cell.input),
    }
    if not isinstance(called, Passed):
        return Record(status="ok", **columns)
    check_causal(method, q, k, v, problem, called)
    training = Training.of(method, q, k, v, problem) if problem.needs_gradients else None
    columns |= {
        "gate_error": max(_share(called.error, called.allowed), _check_training(training, called)),
        "first_call_s": called.seconds,
        **_timing(cell, method, called, loaded, settings, training),
    }
    whole: Call = (lambda: method(q, k, v, problem)) if training is None else training.train
    columns["peak_memory_bytes"] = peak_above_inputs(whole, q.device)
    columns |= rates(method, problem, called.selection, columns["latency_s"])
    _check_again(method, q, k, v, problem)
    return Record(status="low_n" if columns["samples"] < FEW_SAMPLES else "ok", **columns)


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


def _timing(
    cell: Cell, method: Method, called: Called, loaded: Loaded, settings: Settings, training: Training | None
) -> dict[str, Any]:
    """The columns of time; the raw samples go to samples/."""
    tensors = (loaded.q, loaded.k, loaded.v)
    samples, columns = measure_time(method, tensors, loaded.problem, called.selection, training, settings.timing_s)
    folder = settings.folder / "samples"
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / f"{cell.identity}.npy", np.asarray(samples))
    return columns


def _check_again(method: Method, q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> None:
    """The gate once more, on other tensors of the same shapes: nothing may have been learned from the first ones."""
    generator = torch.Generator(device=q.device).manual_seed(2)
    fresh = [
        torch.randn(t.shape, generator=generator, device=t.device, dtype=torch.float32).to(t.dtype) for t in (q, k, v)
    ]
    passed = check_call(method, fresh[0], fresh[1], fresh[2], problem)
    if problem.needs_gradients:
        check_gradients(Training.of(method, fresh[0], fresh[1], fresh[2], problem), passed)


def _write_log(cell: Cell, settings: Settings, text: str) -> None:
    folder = settings.folder / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{cell.identity}.txt").write_text(text)
