"""Fixtures that several test files share: seeded tensors, dense attention in float64 to compare with, a made-up run."""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext

import pandas as pd
import pytest
import torch
from torch import Tensor

from pyramidbench.cell import Cell
from pyramidbench.outcome import Lost, Settings
from pyramidbench.record import Record, columns
from pyramidbench.runner import Runner
from pyramidbench.timing import Timing

QKV = tuple[Tensor, Tensor, Tensor]
# Triton 3.9 warns until the choice that it makes today is spelled out.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that take minutes start first: started last, one of them runs alone while the other cores have nothing left."""
    items.sort(key=lambda item: item.get_closest_marker("minutes") is None)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tensors here are tiny: a second thread makes them thirty times slower when the machine is busy."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tensors() -> Callable[..., QKV]:
    """Seeded normal q [B, H, M, D], k [B, G, N, D] and v [B, G, N, Dv]; float64 unless told otherwise, so without ties."""

    def make(
        *,
        queries: int,
        keys: int | None = None,
        batch: int = 1,
        heads: int = 2,
        kv_heads: int = 1,
        dim: int = 8,
        dim_v: int | None = None,
        dtype: torch.dtype = torch.float64,
        seed: int = 0,
    ) -> QKV:
        generator = torch.Generator().manual_seed(seed)
        keys = queries if keys is None else keys
        shapes = (
            (batch, heads, queries, dim),
            (batch, kv_heads, keys, dim),
            (batch, kv_heads, keys, dim if dim_v is None else dim_v),
        )
        q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
        return q, k, v

    return make


@pytest.fixture(scope="session")
def masked_dense() -> Callable[..., tuple[Tensor, Tensor]]:
    """Softmax attention in float64 under an element mask, with its log-sum-exp; an empty row gives 0 and -inf."""

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
        """mask: bool, broadcast to [B, H, M, N]; True where a query sees a key."""
        group = q.shape[1] // k.shape[1]
        k, v = k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
        logits = q.double() @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        logits = logits.masked_fill(~mask, -torch.inf)
        row_sum = logits.logsumexp(-1)
        empty = row_sum == -torch.inf
        weights = (logits - row_sum.masked_fill(empty, 0)[..., None]).exp()
        return weights @ v, row_sum

    return attend


@pytest.fixture(scope="session")
def causal_mask() -> Callable[[int, int], Tensor]:
    """Bottom-right causal mask, bool [M, N]: query i sees the keys up to i + N - M."""

    def make(queries: int, keys: int) -> Tensor:
        return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)

    return make


@pytest.fixture
def no_workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sweeps measure their cells in this process, and the device's peaks in a moment: no seconds of importing torch."""

    class Here:
        """Nothing is stopped here, so limits do not matter."""

        def __init__(self, settings: Settings) -> None:
            self.runner = Runner(settings)

        def judge(self, cell: Cell, limit_s: float) -> Record:  # noqa: ARG002
            return self.runner.judge(cell)

        def time(self, cells: Sequence[Cell], limit_s: float, *, one_by_one: bool = False) -> list[Timing] | Lost:  # noqa: ARG002
            return self.runner.time(cells, one_by_one=one_by_one)

        def finish(self, cell: Cell, judged: Record, timing: Timing, limit_s: float) -> Record:  # noqa: ARG002
            return self.runner.finish(cell, judged, timing)

    # By import_module: the attribute `sweep` of the package is the function.
    sweeping = importlib.import_module("pyramidbench.sweeping")
    monkeypatch.setattr(sweeping, "working", lambda settings: nullcontext(Here(settings)))
    monkeypatch.setattr("pyramidbench.device.PEAK_SECONDS", 1e-3)
    # Measuring memory collects garbage first, which takes 0.3 s a cell among all the objects of a test session.
    gc.freeze()
    yield
    gc.unfreeze()


SHOWN_METHODS = {
    # method: (kind, ms per 1k tokens or per 1k² when dense, recall, mass ÷ oracle, output error)
    "dense": ("dense", 1.6, None, None, None),
    "dense:math": ("dense", 4.1, None, None, None),
    "pyramid": ("selection", 5.2, 0.958, 0.995, 0.061),
    "pyramid:fast": ("selection", 2.1, 0.899, 0.987, 0.104),
    "pyramid:paper": ("selection", 4.4, 0.738, 0.935, 0.262),
    "flat": ("selection", 2.6, 0.645, 0.905, 0.313),
    "flat:exact": ("selection", 9.5, 0.896, 0.996, 0.058),
    "sliding_window": ("selection", 1.1, 0.535, 0.876, 0.371),
    "exact_topk": ("bound", 11.0, 1.0, 1.0, 0.049),
    "random_blocks": ("bound", 1.2, 0.08, 0.803, 0.452),
    "<script>alert(1)</script>": ("selection", 2.9, 0.701, 0.926, 0.281),
}


def _shown_cell(method: str, length: int, tile: int, layer: int, *, top_k: int, levels: int | str) -> dict[str, object]:
    """One record: made-up numbers with the signs that a real run has."""
    kind, cost_ms, recall, ratio, error = SHOWN_METHODS[method]
    doublings = math.log2(length / 2048)
    walked = levels if isinstance(levels, int) else max(1, 1 + round(math.log2(length / 64 / 64)))
    if method.split(":")[0] != "pyramid":
        walked = 1
    record: dict[str, object] = dict.fromkeys(columns())
    thousands = length / 1024
    latency = 1e-3 * cost_ms * (thousands**2 if kind == "dense" else thousands * (1 + 0.06 * doublings))
    latency *= (3.0 if tile == 1 and kind != "dense" else 1.0) * (1 + 0.02 * layer / 20)
    record |= {
        "cell": f"{method}-{length}-{tile}-{layer}-{top_k}-{levels}", "status": "ok", "method": method, "kind": kind,
        "backend": "sdpa-flash" if kind == "dense" else "reference", "device": "Xeon 8481C, 2 threads", "batch": 1,
        "heads": 9, "kv_heads": 3, "head_dim": 64, "dtype": "float32", "causal": True, "pass": "forward",
        "input": "smollm2-135m-instruct:python-stdlib", "layer": layer, "seq_len": length, "seq_len_kv": length,
        "parameters": "{}", "seed": 0, "latency_s": latency, "latency_low_s": 0.97 * latency,
        "latency_high_s": 1.04 * latency, "samples": 30, "clock": "perf_counter, warm cache", "density": 1.0,
        "useful_flops_per_s": 5e10, "peak_memory_bytes": 2400 * length, "expected_memory_bytes": 2000 * length,
        "quality_source": "captured",
    }  # fmt: skip
    if kind == "dense" or recall is None or ratio is None or error is None:
        return record
    budget = 1 - 0.03 * (top_k < 8) + 0.012 * (top_k > 8)
    oracle = (0.97 - 0.02 * doublings) * budget
    mass = oracle * ratio
    wobble = 0.01 * math.sin(layer + length)
    found = min(1.0, recall * (1 - 0.02 * doublings) * budget**2 - 0.012 * abs(walked - 2) + wobble)
    return record | {
        "block_size": 64, "top_k": top_k, "levels": walked, "query_tile": tile, "budget": f"top_k={top_k}",
        "parameters": json.dumps({"top_k": top_k, "levels": levels, "query_tile": tile}),
        "density": min(1.0, 1.9 * (top_k + 3) * 64 / length), "selected_blocks": top_k + 2.8,
        "build_s": 0.02 * latency, "route_s": 0.48 * latency, "attend_s": 0.5 * latency, "recall": found,
        "recall_p5": 0.8 * found, "recall_worst_head": 0.85 * found, "mass_kept": mass, "mass_kept_p5": 0.9 * mass,
        "mass_kept_worst_head": 0.93 * mass, "mass_ratio": ratio, "mass_ratio_p5": 0.96 * ratio,
        "mass_outside_forced": max(0.0, 1 - 1.9 * (1 - ratio) - 0.2), "output_error": error * (1 + 0.05 * doublings),
        "output_error_p95": 2.1 * error, "output_error_worst_head": 1.6 * error, "trivial_share": 0.05,
        "sampled_tiles": 64, "recall_by_head": [found - 0.01, found, found + 0.01 if found < 0.99 else None],
        "mass_kept_by_head": [mass - 0.01, mass, mass + 0.01],
    }  # fmt: skip


UNTIMED = ("useful_flops_per_s", "latency_s", "latency_low_s", "latency_high_s", "samples", "build_s", "route_s", "attend_s",
           "clock")  # fmt: skip


@pytest.fixture(scope="session")
def shown_run() -> pd.DataFrame:
    """A run's rows as Run.frame has them: token and tile level, three lengths and a fourth, two layers, levels and
    budgets varied, dense skipped at 16k, a failed cell, an untimed cell, and a method that is called <script>."""
    cells = [
        _shown_cell(method, length, tile, layer, top_k=8, levels="auto")
        for tile, length, method, layer in itertools.product((64, 1), (2048, 4096, 8192), SHOWN_METHODS, (0, 20))
        if not (tile == 1 and SHOWN_METHODS[method][0] == "dense")
    ]
    cells += [
        _shown_cell("pyramid", 8192, 64, layer, top_k=8, levels=levels) for levels in (1, 2, 4, 6) for layer in (0, 20)
    ]
    cells += [
        _shown_cell(method, 8192, 64, layer, top_k=top_k, levels="auto")
        for top_k, method, layer in itertools.product((4, 16), ("pyramid", "flat", "exact_topk"), (0, 20))
    ]
    for cell in cells:
        if cell["method"] == "dense:math" and cell["seq_len"] == 8192:
            _fail(cell, "skipped", "predicted 4.2 min, over the 60 s of this sweep")
        if cell["method"] == "flat:exact" and cell["seq_len"] == 8192 and cell["query_tile"] == 1:
            _fail(cell, "oom", "the worker was killed at 7.9 GiB")
        if cell["method"] == "exact_topk" and cell["query_tile"] == 1:
            cell.update(dict.fromkeys(UNTIMED))
        if cell["method"] == "flat:exact" and cell["seq_len"] == 4096:
            cell["status"] = "low_n"
    beyond = [
        _shown_cell(method, 16384, 64, layer, top_k=8, levels="auto")
        for method, layer in itertools.product(("dense", "pyramid", "flat"), (0, 20))
    ]
    for cell in beyond[:2]:
        _fail(cell, "skipped", "predicted 3.1 min, over the 60 s of this sweep")
    return pd.DataFrame([*cells, *beyond], columns=columns())


@pytest.fixture(scope="session")
def large_run() -> pd.DataFrame:
    """500 cells as Run.frame has them: two tile sizes, five lengths, four layers, levels and budgets varied."""
    layers, tiled = (0, 7, 13, 20), [method for method, (kind, *_) in SHOWN_METHODS.items() if kind != "dense"]
    axes = [*((64, method) for method in SHOWN_METHODS), *((1, method) for method in tiled)]
    cells = [
        _shown_cell(method, length, tile, layer, top_k=8, levels="auto")
        for (tile, method), length, layer in itertools.product(axes, (1024, 2048, 4096, 8192, 16384), layers)
    ]
    cells += [
        _shown_cell("pyramid", 16384, 64, layer, top_k=8, levels=levels)
        for levels in (1, 2, 3, 4, 6)
        for layer in layers
    ]
    cells += [
        _shown_cell(method, 16384, 64, layer, top_k=top_k, levels="auto")
        for top_k, method, layer in itertools.product(
            (2, 4, 16, 32, 64), ("pyramid", "pyramid:fast", "flat", "exact_topk"), layers
        )
    ]
    return pd.DataFrame(cells, columns=columns())


def _fail(cell: dict[str, object], status: str, reason: str) -> None:
    kept = ("cell", "method", "kind", "device", "batch", "heads", "kv_heads", "head_dim", "dtype", "causal", "pass",
            "input", "layer", "seq_len", "seq_len_kv", "block_size", "top_k", "levels", "query_tile", "budget",
            "parameters", "seed")  # fmt: skip
    cell.update({name: value for name, value in dict.fromkeys(columns()).items() if name not in kept})
    cell.update(status=status, reason=reason)


@pytest.fixture
def from_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package as tests/gpu/prepare.sh lays it out: importable, and not installed, so that it has no metadata."""
    installed = importlib.metadata.distribution

    def distribution(name: str) -> importlib.metadata.Distribution:
        if name == "pyramidbench":
            raise importlib.metadata.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
