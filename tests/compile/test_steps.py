"""tests/gpu/compile_steps.py: what it finds that a suite's steps launch is what they launch, and it compiles without a GPU."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from pyramidbench.cell import Cell
from pyramidbench.suite import load_suite


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, on what passes for a Hopper GPU."""
    path = Path(__file__).parent.parent / "gpu" / "compile_steps.py"
    spec = importlib.util.spec_from_file_location("compile_steps", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "compile_steps", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda *_: (9, 0))
    sizes = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda *_: sizes)
    return module


def cell_of(method: str, batch: int, tokens: int, **parameters: Any) -> Cell:
    return Cell(
        method=method, parameters={"query_tile": 1, "top_k": 32, **parameters}, batch=batch, heads=32, kv_heads=8, seq_len=1,
        seq_len_kv=tokens, head_dim=128, head_dim_v=128, dtype="bfloat16", direction="decode", input="normal",
    )  # fmt: skip


def test_each_binary_is_listed_once(script: ModuleType) -> None:
    one, two = cell_of("pyramid", 1, 65536), cell_of("pyramid", 1, 131072)
    mine = script.distinct([one])
    names = [script.launches(cell)[index].kernel.fn.__name__ for cell, index in mine]
    assert names.count("_scan") == names.count("_attend_each") == names.count("_combine_best") == 1
    assert script.distinct([one, one]) == mine
    # A capacity of one level more: other integers, the same binaries.
    assert script.distinct([one, two]) == mine
    assert len(script.distinct([one, cell_of("pyramid", 8, 65536)])) > len(mine), (
        "launches of large batches do not overlap"
    )
    assert script.distinct([Cell(method="dense:math", seq_len=1, seq_len_kv=64, direction="decode")]) == []


def test_the_suite_s_steps_are_a_bounded_number_of_binaries(script: ModuleType) -> None:
    """Each costs a sweep a second or more where it is not compiled before."""
    assert 40 < len(script.distinct(load_suite("decode").cells())) < 100


def test_a_binary_compiles_without_a_gpu(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    fake = SimpleNamespace(
        get_current_device=lambda: 77, get_current_stream=lambda _: 0, get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_active_torch_device=lambda: torch.device("meta"),
    )  # fmt: skip
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    cell = cell_of("sliding_window", 8, 4096)
    (index,) = [i for i, launch in enumerate(script.launches(cell)) if launch.kernel.fn.__name__ == "_combine"]
    monkeypatch.setattr(driver, "_active", fake)
    assert "_combine of sliding_window, batch 8, 4096 tokens" in script.compile_one((cell, index))
    assert list(tmp_path.rglob("_combine.cubin"))
