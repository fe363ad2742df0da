"""The FlashAttention-3 adapter, with a module that stands in for the wheel: layout, alignment, scale, limits."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from pyramidbench.method import Method
from pyramidbench.problem import Problem
from pyramidbench.registry import create

MakeTensors = Callable[..., tuple[Tensor, Tensor, Tensor]]
MaskedDense = Callable[..., tuple[Tensor, Tensor]]
CausalMask = Callable[[int, int], Tensor]
GPU = Problem(1, 8, 2, 128, 128, 64, 64, "bfloat16", True, 0.125, device="cuda")
NAMES = ("fa3_fwd_interface", "flash_attn_interface", "fa3_fwd_config", "flash_attn_config")


@pytest.fixture(autouse=True)
def no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is installed here is out of sight: None in sys.modules makes an import fail."""
    for name in NAMES:
        monkeypatch.setitem(sys.modules, name, None)


@pytest.fixture(params=["output", "output-and-lse"])
def fa3(request: pytest.FixtureRequest, masked_dense: MaskedDense, causal_mask: CausalMask) -> ModuleType:
    """A module as the wheel's: [B, M, H, D] in and out, causal masks bottom-right, with or without the log-sum-exp."""

    def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal: bool) -> Any:
        assert q.shape[0] == k.shape[0] == v.shape[0]
        assert k.shape == v.shape
        assert q.shape[2] % k.shape[2] == 0, "the head dimension must be the third"
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
        mask = causal_mask(q.shape[1], k.shape[1]) if causal else mask
        output, lse = masked_dense(*(tensor.transpose(1, 2) for tensor in (q, k, v)), mask, softmax_scale)
        output = output.transpose(1, 2).contiguous()
        return output if request.param == "output" else (output, lse)

    module = ModuleType("stand-in")
    module.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    module.flash_attn_with_kvcache = flash_attn_func  # type: ignore[attr-defined]
    module.__spec__ = sys.__spec__
    return module


@pytest.fixture
def dense(fa3: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Method:
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", fa3)
    return create("dense:fa3")


@pytest.mark.parametrize("lengths", [(40, 40), (1, 50), (7, 30), (30, 7)], ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("heads", [(3, 3), (6, 2)], ids=["mha", "gqa"])
@pytest.mark.parametrize("transposed", [False, True], ids=["contiguous", "transposed"])
def test_output_is_exact_attention(
    dense: Method,
    lengths: tuple[int, int],
    causal: bool,
    heads: tuple[int, int],
    transposed: bool,
    tensors: MakeTensors,
    masked_dense: MaskedDense,
    causal_mask: CausalMask,
) -> None:
    """Lengths and heads all differ, so a swapped dimension shows."""
    q, k, v = tensors(queries=lengths[0], keys=lengths[1], heads=heads[0], kv_heads=heads[1], batch=2)
    if transposed:
        q, k, v = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (q, k, v))
    mask = causal_mask(*lengths) if causal else torch.ones(lengths, dtype=torch.bool)
    expected, _ = masked_dense(q, k, v, mask, 0.3)
    output = dense(q, k, v, Problem.of(q, k, v, causal=causal, scale=0.3))
    assert output.shape == expected.shape
    torch.testing.assert_close(output, expected)


def test_the_row_names_it_and_auto_never_takes_it(dense: Method) -> None:
    assert dense.unavailable() is None
    assert dense.backend(GPU) == "fa3"
    assert create("dense").backend(GPU) == "sdpa-cudnn"
    assert dense.cost(GPU).flops == create("dense:cudnn").cost(GPU).flops
    assert dense.cost(GPU).workspace_bytes == 0


def test_a_gradient_is_refused(dense: Method, tensors: MakeTensors) -> None:
    q, k, v = (tensor.requires_grad_() for tensor in tensors(queries=8))
    problem = Problem.of(q, k, v, causal=True, scale=None)
    with pytest.raises(ValueError, match="forward pass only"):
        dense(q, k, v, problem)
    with torch.no_grad():
        dense(q, k, v, problem)


def test_the_projects_own_build_does_too(
    fa3: ModuleType, monkeypatch: pytest.MonkeyPatch, tensors: MakeTensors
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", fa3)
    q, k, v = tensors(queries=9)
    assert create("dense:fa3").unavailable() is None
    create("dense:fa3")(q, k, v, Problem.of(q, k, v, causal=True, scale=None))


def test_without_a_package_it_is_unavailable_and_nothing_stands_in(tensors: MakeTensors) -> None:
    said = create("dense:fa3").unavailable()
    assert said is not None
    assert "fa3_fwd_interface" in said
    assert "pyramidbench[fa3]" in said
    assert create("dense").unavailable() is None
    q, k, v = tensors(queries=9)
    with pytest.raises(ImportError):
        create("dense:fa3")(q, k, v, Problem.of(q, k, v, causal=True, scale=None))


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (replace(GPU, device="cpu"), "needs a CUDA device"),
        (replace(GPU, dtype="float32"), "float16 and bfloat16, not in float32"),
        (replace(GPU, head_dim_v=32), "one head dim; q has 64 and v has 32"),
        (replace(GPU, head_dim=320, head_dim_v=320), "up to 256 in steps of 8, not 320"),
        (replace(GPU, head_dim=60, head_dim_v=60), "in steps of 8, not 60"),
    ],
)
def test_it_says_what_it_cannot_do(dense: Method, problem: Problem, reason: str) -> None:
    assert reason in (dense.unsupported(problem) or "")
    assert dense.unsupported(GPU) is None
    assert dense.unsupported(replace(GPU, seq_len_q=7)) is None


def test_a_build_without_float16_says_so(dense: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    half = replace(GPU, dtype="float16")
    assert dense.unsupported(half) is None
    config = ModuleType("stand-in")
    config.CONFIG = {"build_flags": {"FLASHATTENTION_DISABLE_FP16": True}}  # type: ignore[attr-defined]
    config.__spec__ = sys.__spec__
    monkeypatch.setitem(sys.modules, "fa3_fwd_config", config)
    assert "leaves float16 out" in (dense.unsupported(half) or "")
    assert dense.unsupported(GPU) is None
