"""Dense attention through torch: every kernel of this device against float64, bottom-right causal, and honest limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pyramidbench.method import Method
from pyramidbench.problem import Problem
from pyramidbench.registry import create

MakeTensors = Callable[..., tuple[Tensor, Tensor, Tensor]]
MaskedDense = Callable[..., tuple[Tensor, Tensor]]
CausalMask = Callable[[int, int], Tensor]
GPU = Problem(1, 8, 8, 128, 128, 64, 64, "bfloat16", True, 0.125, device="cuda")


@pytest.fixture(params=["dense", "dense:flash", "dense:math"])
def dense(request: pytest.FixtureRequest) -> Method:
    return create(request.param)


@pytest.mark.parametrize("lengths", [(64, 64), (77, 77), (1, 50), (30, 100), (100, 30), (1500, 1600)], ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("heads", [(2, 2), (4, 1)], ids=["mha", "gqa"])
def test_output_is_exact_attention(
    dense: Method,
    lengths: tuple[int, int],
    causal: bool,
    heads: tuple[int, int],
    tensors: MakeTensors,
    masked_dense: MaskedDense,
    causal_mask: CausalMask,
) -> None:
    """Longer than MASK_ROWS too; rows before the first key give 0."""
    q, k, v = tensors(queries=lengths[0], keys=lengths[1], heads=heads[0], kv_heads=heads[1])
    problem = Problem.of(q, k, v, causal=causal, scale=0.3)
    mask = causal_mask(*lengths) if causal else torch.ones(lengths, dtype=torch.bool)
    expected, _ = masked_dense(q, k, v, mask, 0.3)
    torch.testing.assert_close(dense(q, k, v, problem), expected)


def test_rows_without_a_key_are_zero_and_pass_no_gradient(dense: Method, tensors: MakeTensors) -> None:
    q, k, v = (x.requires_grad_() for x in tensors(queries=50, keys=20))
    output = dense(q, k, v, Problem.of(q, k, v, causal=True, scale=None))
    assert (output[:, :, :30] == 0).all()
    gradients = torch.autograd.grad((output**2).sum(), (q, k, v))
    assert (gradients[0][:, :, :30] == 0).all()
    assert all(bool(g.isfinite().all()) and float(g.abs().sum()) > 0 for g in gradients)


def test_the_backend_names_the_kernel_that_runs() -> None:
    cpu = replace(GPU, device="cpu")
    assert create("dense").backend(cpu) == "sdpa-flash"
    assert create("dense").backend(replace(cpu, head_dim_v=32)) == "sdpa-math"
    assert create("dense").backend(GPU) == "sdpa-cudnn"
    assert create("dense").backend(replace(GPU, dtype="float32")) == "sdpa-efficient"
    assert create("dense:math").backend(GPU) == "sdpa-math"


@pytest.mark.parametrize(
    ("kernel", "problem", "reason"),
    [
        ("cudnn", replace(GPU, device="cpu"), "needs a CUDA device; on a CPU use flash or math"),
        ("efficient", replace(GPU, device="cpu"), "needs a CUDA device; on a CPU use flash or math"),
        ("cudnn", replace(GPU, dtype="float32"), "computes in float16 and bfloat16, not in float32"),
        ("flash", replace(GPU, dtype="float64"), "computes in float16 and bfloat16, not in float64"),
        ("efficient", replace(GPU, kv_heads=2), "no grouped key/value heads"),
        ("flash", replace(GPU, head_dim_v=32), "one head dim; q has 64 and v has 32"),
        ("cudnn", replace(GPU, seq_len_q=7), "no bottom-right causal mask (queries: 7)"),
    ],
)
def test_a_kernel_says_what_it_cannot_do(kernel: str, problem: Problem, reason: str) -> None:
    said = create(f"dense:{kernel}").unsupported(problem)
    assert said is not None
    assert reason in said
    assert create("dense").unsupported(problem) is None


def test_math_holds_a_matrix_and_flash_does_not() -> None:
    long = replace(GPU, device="cpu", seq_len_q=4096, seq_len_kv=4096)
    assert create("dense:math").cost(long).workspace_bytes >= 4 * 8 * 4096 * 4096
    assert create("dense:flash").cost(long).workspace_bytes == 0


def test_flops_are_four_times_the_visible_pairs_and_dims() -> None:
    assert create("dense").cost(GPU).flops == 4 * 8 * 64 * (128 * 129 // 2)
    assert create("dense").cost(replace(GPU, causal=False)).flops == 4 * 8 * 64 * 128 * 128
