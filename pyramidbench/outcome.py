"""How a cell ends: the settings it was measured under, its record, and what became of it where it has no numbers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pyramidbench import inputs
from pyramidbench.cell import Cell
from pyramidbench.clock import Cache
from pyramidbench.errors import UserError
from pyramidbench.method import BlockMethod
from pyramidbench.record import Record, Status

OUT_OF_MEMORY = (
    "can't allocate memory", "CUDA error: out of memory", "CUDA driver error: out of memory",
    "Triton Error [CUDA]: out of memory", "STATUS_ALLOC_FAILED",
)  # fmt: skip
DEVICE_FAULTS = (
    "CUDA error", "CUDA driver error", "Triton Error [CUDA]", "STATUS_EXECUTION_FAILED", "STATUS_INTERNAL_ERROR",
    "STATUS_MAPPING_ERROR",
)  # fmt: skip
"""In whose words torch, Triton, cuBLAS and cuDNN report that a kernel failed: whichever of them asks the device next."""


@dataclass(frozen=True)
class Settings:
    """How cells are measured; the same for all cells of a run.

    timing_s: seconds of repeated calls per cell. quality_elements: logits that the oracle may compute per cell, which
    decides how many query tiles are sampled at long lengths. cache: what the clock does to it before each call.
    peak_flops_per_s: what the device reached at the start, which no cell can exceed; None where it was not measured.
    """

    device: str
    device_name: str
    folder: Path
    timing_s: float
    quality_elements: int
    cache: Cache = "cold"
    peak_flops_per_s: float | None = None


@dataclass(frozen=True)
class Lost:
    """A task that gave no result, and why: the cell that was at work, by its identity, or None where that is not known."""

    cell: str | None
    status: Status
    reason: str


def failed(cell: Cell, settings: Settings, status: Status, reason: str) -> Record:
    """A record without numbers."""
    return Record(status=status, reason=reason, **describe(cell, settings))


def classify(error: BaseException) -> tuple[Status, str]:
    """Status and one-line reason of an unexpected exception."""
    text = " ".join(str(error).split())[:300]
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or any(words in text for words in OUT_OF_MEMORY):
        return "oom", f"out of memory: {text}"
    if is_device_fault(error):
        return "cuda_error", text
    return "crashed", f"{type(error).__name__}: {text}" if text else type(error).__name__


def is_device_fault(error: BaseException) -> bool:
    """Whether a fault left a GPU in a state in which nothing that this process does on it can be trusted."""
    return type(error).__name__ == "AcceleratorError" or any(words in str(error) for words in DEVICE_FAULTS)


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
        values["budget_set"] = method.budget_set()
        values["levels"] = method.walked_levels(problem)
    return values


def write_log(folder: Path, identity: str, text: str) -> None:
    """Append to the log of a cell. A disk that has no room for it must not cost the record."""
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        with (folder / "logs" / f"{identity}.txt").open("a", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        os.write(2, f"no log of {identity}: {error}\n".encode())


def _input_label(cell: Cell) -> str:
    """The input's label; its path where the file has gone or cannot be read."""
    try:
        return inputs.input_label(cell.input)
    except UserError:
        return cell.input
