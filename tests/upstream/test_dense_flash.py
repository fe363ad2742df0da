"""FlashAttention 2, 3 and 4 with stand-ins that have the packages' signatures: layout, alignment, scale, gradients, limits.

Signatures: flash_attn/flash_attn_interface.py of flash-attn 2.8.3, fa3_fwd_interface.py of fa3-fwd 0.0.3, and
flash_attn/cute/interface.py of flash-attn-4 4.0.0b36.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pyramidbench.method import Method
from pyramidbench.problem import Problem
from pyramidbench.registry import create
from pyramidbench.upstream import importing

MakeTensors = Callable[..., tuple[Tensor, Tensor, Tensor]]
MaskedDense = Callable[..., tuple[Tensor, Tensor]]
CausalMask = Callable[[int, int], Tensor]
StandIn = Callable[..., Any]
Signed = Callable[..., Callable[..., Any]]
Make = Callable[[str], Callable[..., Any]]
GPU = Problem(1, 8, 2, 128, 128, 64, 64, "bfloat16", True, 0.125, device="cuda")
KERNELS = {
    "fa2": ("flash_attn",),
    "fa3": ("fa3_fwd_interface", "flash_attn_interface"),
    "fa4": ("flash_attn.cute",),
}


@pytest.fixture
def function(masked_dense: MaskedDense, causal_mask: CausalMask, signed: Signed) -> Make:
    """The function of a kernel by its name: [B, M, H, D] in and out; that of FA4 returns the log-sum-exp besides."""

    def compute(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        assert q.shape[0] == k.shape[0] == v.shape[0]
        assert k.shape[:3] == v.shape[:3]
        assert q.shape[2] % k.shape[2] == 0, "the head dimension must be the third"
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
        mask = causal_mask(q.shape[1], k.shape[1]) if causal else mask
        output, lse = masked_dense(*(tensor.transpose(1, 2) for tensor in (q, k, v)), mask, softmax_scale)
        return output.transpose(1, 2).contiguous().to(q.dtype), lse

    def make(kernel: str) -> Callable[..., Any]:
        call = compute if kernel == "fa4" else lambda **given: compute(**given)[0]
        return signed(SIGNATURES[kernel], call, "q k v softmax_scale causal")

    return make


SIGNATURES = {
    "fa2": "q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "alibi_slopes=None, deterministic=False, return_attn_probs=False",
    "fa3": "q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, "
    "window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, "
    "sm_margin=0, return_attn_probs=False",
    "fa4": "q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False, window_size=(None, None), "
    "learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, score_mod=None, "
    "score_mod_bwd=None, mask_mod=None, aux_tensors=None, aux_scalars=None, block_sparse_tensors=None, "
    "block_sparse_tensors_bwd=None, return_lse=False, gather_bwd_recompute_p=False, gather_bwd_token_chunk=None",
}
MODULES = [(kernel, module) for kernel, modules in KERNELS.items() for module in modules]


@pytest.fixture(params=MODULES, ids=lambda pair: pair[1])
def dense(request: pytest.FixtureRequest, stand_in: StandIn, function: Make) -> Method:
    """Each kernel, through each module that may bring it."""
    kernel, module = request.param
    stand_in(module, flash_attn_func=function(kernel))
    return create(f"dense:{kernel}")


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


def test_the_row_names_the_kernel(dense: Method) -> None:
    kernel = dense.kernel  # type: ignore[attr-defined]
    assert dense.unavailable() is None
    assert dense.backend(GPU) == kernel
    assert dense.cost(GPU).flops == create("dense:cudnn").cost(GPU).flops
    assert dense.cost(GPU).workspace_bytes == 0
    assert dense.alternatives(GPU) == ()
    assert kernel in [rival.backend(GPU) for rival in create("dense").alternatives(GPU)]


@pytest.mark.parametrize("kernel", ["fa2", "fa4"])
def test_gradients_flow(
    kernel: str,
    stand_in: StandIn,
    function: Make,
    tensors: MakeTensors,
    masked_dense: MaskedDense,
    causal_mask: CausalMask,
) -> None:
    stand_in(KERNELS[kernel][0], flash_attn_func=function(kernel))
    leaves = [x.requires_grad_() for x in tensors(queries=20, keys=33, heads=4, kv_heads=2)]
    problem = Problem.of(*leaves, causal=True, scale=0.3)
    expected, _ = masked_dense(*leaves, causal_mask(20, 33), 0.3)
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=expected.dtype)
    ours = torch.autograd.grad(create(f"dense:{kernel}")(*leaves, problem), leaves, upstream)
    for one, other in zip(ours, torch.autograd.grad(expected, leaves, upstream), strict=True):
        torch.testing.assert_close(one, other)
    for direction in ("backward", "train"):
        assert create(f"dense:{kernel}").unsupported(replace(GPU, direction=direction)) is None


def test_a_gradient_through_fa3_is_refused(stand_in: StandIn, function: Make, tensors: MakeTensors) -> None:
    stand_in("fa3_fwd_interface", flash_attn_func=function("fa3"))
    dense = create("dense:fa3")
    q, k, v = (tensor.requires_grad_() for tensor in tensors(queries=8))
    problem = Problem.of(q, k, v, causal=True, scale=None)
    with pytest.raises(ValueError, match="forward pass only"):
        dense(q, k, v, problem)
    with torch.no_grad():
        dense(q, k, v, problem)
    assert "forward pass only" in (dense.unsupported(replace(GPU, direction="train")) or "")


@pytest.mark.parametrize(("kernel", "extra"), [("fa2", "flash"), ("fa3", "fa3"), ("fa4", "fa4")])
def test_without_its_package_it_is_unavailable_and_nothing_stands_in(
    kernel: str, extra: str, tensors: MakeTensors
) -> None:
    said = create(f"dense:{kernel}").unavailable()
    assert said is not None
    assert "\n" not in said
    assert all(module in said for module in KERNELS[kernel])
    assert f"pyramidbench[{extra}]" in said
    assert create("dense").unavailable() is None
    assert kernel not in [rival.backend(GPU) for rival in create("dense").alternatives(GPU)]
    q, k, v = tensors(queries=9)
    with pytest.raises(ImportError):
        create(f"dense:{kernel}")(q, k, v, Problem.of(q, k, v, causal=True, scale=None))


def test_a_package_that_breaks_when_imported_says_how(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build for another torch raises whatever it likes; a package without the function is not the one that is meant."""

    def broken(name: str) -> Any:
        raise OSError(f"{name}.so: undefined symbol:\n  _ZN3c10")

    monkeypatch.setattr("pyramidbench.upstream.importing.import_module", broken)
    said = create("dense:fa2").unavailable() or ""
    assert "flash_attn does not import: OSError: flash_attn.so: undefined symbol: _ZN3c10)" in said
    monkeypatch.undo()
    stand_in("flash_attn")
    assert "flash_attn has no flash_attn_func" in (create("dense:fa2").unavailable() or "")


@pytest.mark.parametrize(
    ("kernel", "problem", "reason"),
    [
        *((kernel, replace(GPU, device="cpu"), "needs a CUDA device") for kernel in KERNELS),
        *((kernel, replace(GPU, dtype="float32"), "float16 and bfloat16, not in float32") for kernel in KERNELS),
        *((kernel, replace(GPU, head_dim=320, head_dim_v=320), "in steps of 8, not 320") for kernel in KERNELS),
        *((kernel, replace(GPU, head_dim=60, head_dim_v=60), "in steps of 8, not 60") for kernel in KERNELS),
        *((kernel, replace(GPU, head_dim_v=32), "one head dim; q has 64 and v has 32") for kernel in ("fa2", "fa3")),
        ("fa4", replace(GPU, seq_len_q=200), "no more queries than keys"),
    ],
)
def test_it_says_what_it_cannot_do(kernel: str, problem: Problem, reason: str) -> None:
    dense = create(f"dense:{kernel}")
    assert reason in (dense.unsupported(problem) or "")
    assert dense.unsupported(GPU) is None
    assert dense.unsupported(replace(GPU, seq_len_q=7)) is None


def test_a_build_of_fa3_without_float16_says_so(stand_in: StandIn, function: Make) -> None:
    half, dense = replace(GPU, dtype="float16"), create("dense:fa3")
    stand_in("fa3_fwd_interface", flash_attn_func=function("fa3"))
    stand_in("fa3_fwd_config", CONFIG={"build_flags": {}})
    assert dense.unsupported(half) is None
    stand_in("fa3_fwd_config", CONFIG={"build_flags": {"FLASHATTENTION_DISABLE_FP16": True}})
    assert "leaves float16 out" in (dense.unsupported(half) or "")
    assert dense.unsupported(GPU) is None


@pytest.mark.gpu
@pytest.mark.parametrize(("kernel", "module"), MODULES, ids=lambda value: str(value))
def test_the_stand_in_has_the_signature_of_the_package(kernel: str, module: str, function: Make) -> None:
    try:
        real = importing.function((module,), "flash_attn_func")
    except importing.NotHere as reason:
        pytest.skip(str(reason))
    assert list(inspect.signature(real).parameters) == list(inspect.signature(function(kernel)).parameters)
