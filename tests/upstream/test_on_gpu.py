"""The real packages on a CUDA device, where they are installed: each adapter through the gate, and against our own kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import pyramidbench
from pyramidbench.fastest import fastest
from pyramidbench.gate import check_call, check_causal
from pyramidbench.gate_gradients import check_gradients, check_gradients_causal
from pyramidbench.method import BlockMethod, Method
from pyramidbench.passes import Training
from pyramidbench.problem import Problem
from pyramidbench.registry import create, method_names

# What the packages and torch's compiler warn of on a device is not what these are about.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
MakeTensors = Callable[..., tuple[Tensor, Tensor, Tensor]]
DENSE = ["dense:cudnn", "dense:flash", "dense:efficient", "dense:math", "dense:fa2", "dense:fa3", "dense:fa4"]
BLOCKS: dict[str, tuple[int, int, bool, dict[str, object]]] = {
    # adapter, and what tells two cases of it apart: query heads, key/value heads, causal, parameters
    "fla_nsa": (32, 2, True, {"top_k": 4}),
    "fla_nsa:own": (32, 2, True, {"top_k": 4}),
    "fla_moba": (8, 2, True, {"top_k": 4}),
    "flex": (8, 2, True, {"top_k": 2}),
    "fa4_blocks": (8, 2, True, {"top_k": 2}),
    "fa4_blocks 64 × 128": (8, 2, True, {"top_k": 4, "block_size": 64}),
    "fa4_blocks 64 × 64": (8, 2, False, {"top_k": 4, "block_size": 64, "query_tile": 64}),
    "fastvideo_vsa": (8, 2, False, {"top_k": 4}),
    "flash_moba": (8, 2, True, {"top_k": 4}),
    "block_sparse_attn": (8, 2, True, {"top_k": 2}),
    "llsa": (4, 4, False, {"top_k": 8}),
}


@pytest.fixture(autouse=True)
def one_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autotuners of other packages take the middle one of their configurations. Which is fastest is not asked here, and
    fla's NSA alone compiles some hundred of them to know."""
    from triton.runtime.autotuner import Autotuner

    prune = Autotuner.prune_configs

    def middle(tuner: Autotuner, arguments: dict[str, object]) -> list[object]:
        left = prune(tuner, arguments)
        return left[len(left) // 2 :][:1]

    monkeypatch.setattr(Autotuner, "prune_configs", middle)


def ready(spec: str, parameters: dict[str, object], problem: Problem) -> Method:
    """The method, or a skip with its own words."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    method = create(spec, parameters)
    reason = method.unavailable() or method.unsupported(problem)
    if reason is not None:
        pytest.skip(reason)
    return method


def on_device(
    tensors: MakeTensors, queries: int, keys: int, heads: int, kv_heads: int, dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    made = tensors(queries=queries, keys=keys, batch=2, heads=heads, kv_heads=kv_heads, dim=dim, dtype=torch.bfloat16)
    q, k, v = (x.cuda() for x in made)
    return q, k, v


def through_the_gate(method: Method, q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Tensor:
    """Output, look-ahead, and gradients where the method has them."""
    passed = check_call(method, q, k, v, problem)
    check_causal(method, q, k, v, problem, passed)
    backward = replace(problem, direction="train")
    if method.unsupported(backward) is None:
        training = Training.of(method, q, k, v, backward)
        errors = check_gradients(training, passed)
        check_gradients_causal(training, passed, errors)
    return passed.output


@pytest.mark.parametrize("lengths", [(1000, 1000), (1, 1000), (200, 1000)], ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)], ids=["mha", "gqa"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("spec", DENSE)
def test_dense_kernels(
    spec: str, dim: int, heads: tuple[int, int], causal: bool, lengths: tuple[int, int], tensors: MakeTensors
) -> None:
    q, k, v = on_device(tensors, *lengths, *heads, dim)
    problem = Problem.of(q, k, v, causal=causal, scale=0.1)
    through_the_gate(ready(spec, {}, problem), q, k, v, problem)


@pytest.mark.parametrize("length", [1024, 2000])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("case", BLOCKS)
def test_block_kernels(case: str, dim: int, length: int, tensors: MakeTensors) -> None:
    heads, kv_heads, causal, parameters = BLOCKS[case]
    spec = case.split()[0]
    q, k, v = on_device(tensors, length, length, heads, kv_heads, dim)
    problem = Problem.of(q, k, v, causal=causal, scale=0.1 if spec != "llsa" else None)
    method = ready(spec, parameters, problem)
    output = through_the_gate(method, q, k, v, problem)
    if spec != "llsa":  # whose means no list tells of
        selection = method.select(q, k, problem)
        assert selection is not None
        ours = pyramidbench.sparse_attention(q, k, v, selection, scale=problem.scale)
        torch.testing.assert_close(output, ours, rtol=2e-2, atol=2e-2)


def test_flas_own_choice_is_that_of_our_nsa_rule(tensors: MakeTensors) -> None:
    """With one pool for each block ours ranks what fla ranks: softmax over means, summed over a group. Ties may differ."""
    q, k, v = on_device(tensors, 2000, 2000, 32, 2, 64)
    problem = Problem.of(q, k, v, causal=True, scale=0.1)
    theirs = ready("fla_nsa:own", {"top_k": 4}, problem)
    if "nsa" not in method_names():
        pytest.skip("the rule 'nsa' is not here")
    ours = create("nsa", {"top_k": 4, "query_tile": 1, "strides": 1, "span": 1})
    found = [method.select(q, k, problem) for method in (theirs, ours)]
    assert all(selection is not None for selection in found)
    one, other = (selection.mask() for selection in found if selection is not None)
    assert float((one == other).all(-1).double().mean()) > 0.98
    assert float((one & other).sum() / other.sum()) > 0.995


def test_flas_moba_is_our_moba(tensors: MakeTensors) -> None:
    """The same blocks at one shared budget. fla's call tells of no list: its output is held to ours. Ties may differ."""
    q, k, v = on_device(tensors, 2000, 2000, 4, 4, 64)
    problem = Problem.of(q, k, v, causal=True, scale=None)
    theirs, ours = ready("fla_moba", {}, problem), create("moba")
    assert isinstance(theirs, BlockMethod)
    assert isinstance(ours, BlockMethod)
    theirs, ours = (replace(method, top_k=method.own_top_k(3, problem)) for method in (theirs, ours))
    found = [method.select(q, k, problem) for method in (theirs, ours)]
    one, other = (selection.mask() for selection in found if selection is not None)
    assert torch.equal(one.sum(-1), other.sum(-1))
    same = (one == other).all(-1)
    assert float(same.double().mean()) > 0.98
    outputs = [method(q, k, v, problem)[same] for method in (theirs, ours)]
    close = torch.isclose(*outputs, rtol=2e-2, atol=2e-2).all(-1)
    # fla rounds its logits: a near-tie there may differ from the one that it is described by.
    assert float(close.double().mean()) > 0.98


@pytest.mark.alone
@pytest.mark.parametrize("direction", ["forward", "train", "backward"])
def test_plain_dense_is_the_fastest_and_says_so(direction: str, tensors: MakeTensors) -> None:
    q, k, v = on_device(tensors, 4096, 4096, 8, 8, 128)
    problem = replace(Problem.of(q, k, v, causal=True, scale=None), direction=direction)
    choice = fastest(create("dense"), q, k, v, problem)
    assert choice.note is not None
    assert "sdpa-cudnn " in choice.note
    assert choice.method.backend(problem) not in ("sdpa-math", "sdpa-efficient")
