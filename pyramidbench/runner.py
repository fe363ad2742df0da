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
from pyramidbench.clock import clock_for, sample, stage_times
from pyramidbench.cost import attention_cost
from pyramidbench.errors import UserError
from pyramidbench.gate import Called, GateFailure, Passed, check_call, check_causal, check_form
from pyramidbench.memory import peak_above_inputs
from pyramidbench.method import BlockMethod, Method
from pyramidbench.oracle import ExactRows, TileMass, exact_rows, sample_tiles, widened
from pyramidbench.problem import Problem
from pyramidbench.quality import Quality, measure_quality
from pyramidbench.record import Record, Status
from pyramidbench.registry import mass_source
from pyramidbench.selection import BlockSelection
from pyramidbench.stats import median_interval
from pyramidbench.tiling import Tiling

FEW_SAMPLES = 20
STAGE_REPEATS = 3
LONG_CALL_S = 0.2


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
        values |= {name: getattr(method, name) for name in ("block_size", "top_k", "query_tile")}
        values["levels"] = method.walked_levels(cell.problem(settings.device))
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
        **_work(method, problem, called.selection),
        **asdict(_quality(cell, method, called, loaded, settings)),
        "quality_source": inputs.quality_source(cell.input),
    }
    if not isinstance(called, Passed):
        return Record(status="ok", **columns)
    check_causal(method, q, k, v, problem, called)
    columns |= {
        "gate_error": called.error / called.allowed if called.allowed else 0.0,
        "first_call_s": called.seconds,
        **_timing(cell, method, called, loaded, settings),
    }
    columns["peak_memory_bytes"] = peak_above_inputs(lambda: method(q, k, v, problem), q.device)
    columns |= _rates(method, problem, called.selection, columns["latency_s"])
    _check_again(method, q, k, v, problem)
    return Record(status="low_n" if columns["samples"] < FEW_SAMPLES else "ok", **columns)


def _quality(cell: Cell, method: Method, called: Called, loaded: Loaded, settings: Settings) -> Quality:
    """Quality columns; empty on random tensors, whose near-uniform attention is no measure of quality."""
    if cell.input == "normal":
        return Quality()
    problem = loaded.problem
    tiling = (
        method.tiling(problem)
        if isinstance(method, BlockMethod)
        else Tiling(problem.seq_len_q, problem.seq_len_kv, 64, 64, problem.causal)
    )
    tiles, exact, wide = loaded.exact_rows(tiling, settings.quality_elements)
    return measure_quality(called.output, called.selection, method, problem, tiling, exact, tiles, wide)


def _timing(cell: Cell, method: Method, called: Called, loaded: Loaded, settings: Settings) -> dict[str, Any]:
    q, k, v, problem = loaded.q, loaded.k, loaded.v, loaded.problem
    clock = clock_for(q.device)
    with torch.no_grad():
        samples = sample(lambda: method(q, k, v, problem), clock, settings.timing_s)
        stages = stage_times(
            lambda: method.select(q, k, problem),
            lambda: method.attend(q, k, v, called.selection, problem),
            q.device,
            STAGE_REPEATS if max(samples) < LONG_CALL_S else 1,
        )
    folder = settings.folder / "samples"
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / f"{cell.identity}.npy", np.asarray(samples))
    interval = median_interval(samples)
    build, route = stages.get("build"), stages.get("route")
    index = stages["select"] - (build or 0.0) - (route or 0.0)
    return {
        "latency_s": interval.median,
        "latency_low_s": interval.low,
        "latency_high_s": interval.high,
        "samples": len(samples),
        "clock": clock.name,
        "build_s": build,
        "route_s": route,
        "index_s": max(0.0, index) if called.selection is not None else None,
        "attend_s": stages["attend"],
    }


def _work(method: Method, problem: Problem, selection: BlockSelection | None) -> dict[str, Any]:
    cost = method.cost(problem)
    expected = problem.itemsize * problem.batch * problem.heads * problem.seq_len_q * problem.head_dim_v
    columns: dict[str, Any] = {"density": 1.0, "expected_memory_bytes": int(expected + cost.workspace_bytes)}
    if selection is not None:
        columns |= {"density": selection.density(), "selected_blocks": float(selection.counts.double().mean())}
    return columns


def _rates(method: Method, problem: Problem, selection: BlockSelection | None, seconds: float) -> dict[str, Any]:
    """Rates by useful, executed and dense-equivalent work; docs/measuring.md defines the three."""
    cost = method.cost(problem)
    tiling = Tiling(problem.seq_len_q, problem.seq_len_kv, 1, 1, problem.causal)
    dense = attention_cost(problem, tiling.visible_pairs(), 0, 1).flops
    chosen = cost.flops - cost.stage("attend").flops
    useful, executed = dense, _executed_dense(problem)
    if selection is not None:
        group = problem.heads // selection.indices.shape[1]
        useful = 2.0 * (problem.head_dim + problem.head_dim_v) * group * float(selection.pairs().sum())
        listed = float(selection.counts.sum()) * selection.block_size * selection.query_tile
        executed = 2.0 * (problem.head_dim + problem.head_dim_v) * group * listed
    return {
        "tokens_per_s": problem.batch * problem.seq_len_q / seconds,
        "useful_flops_per_s": (useful + chosen) / seconds,
        "executed_flops_per_s": (executed + chosen) / seconds,
        "dense_equivalent_flops_per_s": dense / seconds,
    }


def _executed_dense(problem: Problem) -> float:
    """Operations of a dense kernel that skips 128 × 128 tiles above the diagonal and computes the others whole."""
    coarse = Tiling(-(-problem.seq_len_q // 128), -(-problem.seq_len_kv // 128), 1, 1, problem.causal)
    return attention_cost(problem, coarse.visible_pairs() * 128.0 * 128.0, 0, 1).flops


def _check_again(method: Method, q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> None:
    """The gate once more, on other tensors of the same shapes: nothing may have been learned from the first ones."""
    generator = torch.Generator(device=q.device).manual_seed(2)
    fresh = [
        torch.randn(t.shape, generator=generator, device=t.device, dtype=torch.float32).to(t.dtype) for t in (q, k, v)
    ]
    check_call(method, fresh[0], fresh[1], fresh[2], problem)


def _write_log(cell: Cell, settings: Settings, text: str) -> None:
    folder = settings.folder / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{cell.identity}.txt").write_text(text)
