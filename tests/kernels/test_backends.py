"""The choice of a backend: nothing falls back in silence, and no GPU means no import of Triton."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from pyramidbench.errors import UserError
from pyramidbench.kernels import backends
from pyramidbench.problem import Problem
from pyramidbench.registry import create

ON_CPU = Problem(1, 2, 1, 256, 256, 64, 64, "bfloat16", True, 0.125)
ON_CUDA = dataclasses.replace(ON_CPU, device="cuda")


@pytest.mark.parametrize("method", ["pyramid", "flat", "exact_topk", "random_blocks", "sliding_window"])
def test_auto_runs_the_reference_without_a_gpu(method: str) -> None:
    assert create(method).backend(ON_CPU) == "reference"


@pytest.mark.parametrize(
    ("method", "shown"),
    [
        ("pyramid", "triton"),
        ("pyramid:paper", "triton"),
        ("pyramid:fast", "triton"),
        ("pyramid:fastest", "triton"),
        ("flat", "triton"),
        ("flat:sub", "triton"),
        ("sliding_window", "reference+triton"),
    ],
)
def test_the_row_says_which_stage_ran_where(method: str, shown: str) -> None:
    pytest.importorskip("triton")
    assert create(method).backend(ON_CUDA) == shown
    assert create(method, {"implementation": "reference"}).backend(ON_CUDA) == "reference"


def test_an_explicit_request_that_cannot_run_is_an_error_with_the_reason() -> None:
    method = create("pyramid", {"implementation": "triton"})
    assert "CUDA" in (method.unsupported(ON_CPU) or "")
    with pytest.raises(UserError, match="the tensors are on cpu"):
        method.backend(ON_CPU)


def test_what_the_kernels_lack_is_named() -> None:
    pytest.importorskip("triton")
    assert "float64" in (backends.attention_gap(dataclasses.replace(ON_CUDA, dtype="float64"), 64) or "")
    assert "16 to 128" in (backends.attention_gap(ON_CUDA, 256) or "")
    wide = create("pyramid", {"tile_reduce": "lse", "score_rows": None, "query_tile": 256, "implementation": "triton"})
    assert "up to 128 rows" in (wide.unsupported(ON_CUDA) or "")


def test_a_run_on_the_cpu_never_imports_triton() -> None:
    code = (
        "import sys, torch\n"
        "from pyramidbench.problem import Problem\n"
        "from pyramidbench.registry import create\n"
        "q = torch.randn(1, 1, 128, 16)\n"
        "create('pyramid')(q, q, q, Problem.of(q, q, q, causal=True, scale=None))\n"
        "assert 'pyramidbench.kernels.route' not in sys.modules\n"
        "assert 'pyramidbench.kernels.attention_fwd' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
