"""Faults that users of other sparse attention libraries ran into, on every method that has a budget."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pyramidbench.method import BlockMethod
from pyramidbench.problem import Problem
from pyramidbench.registry import create, method_class, method_names, preset_names

MakeTensors = Callable[..., tuple[Tensor, Tensor, Tensor]]
MaskedDense = Callable[..., tuple[Tensor, Tensor]]
CausalMask = Callable[[int, int], Tensor]

EVERY = [
    f"{name}:{preset}"
    for name in method_names()
    for preset in preset_names(name)
    if issubclass(method_class(name), BlockMethod)
]
BUDGETED = [spec for spec in EVERY if not getattr(create(spec), "adaptive", False)]
"""Those that keep K blocks; the others choose their own budget."""


@pytest.fixture(params=BUDGETED)
def spec(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def make(spec: str, **parameters: object) -> BlockMethod:
    method = create(spec, parameters)
    assert isinstance(method, BlockMethod)
    return method


def problem_of(method: BlockMethod, q: Tensor, k: Tensor, v: Tensor) -> Problem:
    """The problem, or a skip with the method's own words where it says that it cannot do it."""
    problem = Problem.of(q, k, v, causal=True, scale=None)
    reason = method.unsupported(problem)
    if reason is not None:
        pytest.skip(reason)
    return problem


@pytest.mark.parametrize(
    "budget",
    [{"top_k": 0}, {"top_k": 1, "forced_in_budget": True}],
    ids=["none-ranked", "one-that-is-the-own-block"],
)
@pytest.mark.parametrize("tile", [1, 128])
def test_one_block_per_row_is_block_diagonal_and_not_dense(
    spec: str, budget: dict[str, object], tile: int, tensors: MakeTensors, masked_dense: MaskedDense,
    causal_mask: CausalMask,
) -> None:  # fmt: skip
    """MoBA#26: K = 1 quietly became full attention."""
    q, k, v = tensors(queries=1024, heads=1, dim=4, dtype=torch.float32)
    method = make(spec, block_size=128, query_tile=tile, sink_blocks=0, local_blocks=1, **budget)
    problem = problem_of(method, q, k, v)
    selection = method.select(q, k, problem)
    assert selection is not None
    assert (selection.counts == 1).all()
    assert selection.density() == pytest.approx(8 * 128 * 129 / (1024 * 1025))
    block = torch.arange(1024) // 128
    causal = causal_mask(1024, 1024)
    diagonal, _ = masked_dense(q, k, v, causal & (block[:, None] == block))
    dense, _ = masked_dense(q, k, v, causal)
    output = method.attend(q, k, v, selection, problem)
    torch.testing.assert_close(output.double(), diagonal, rtol=1e-4, atol=1e-5)
    assert (output - dense)[:, :, 128:].abs().mean() > 0.01


@pytest.mark.parametrize("length", [1, 63, 64, 65, 100])
@pytest.mark.parametrize("tile", [1, 64])
def test_fewer_blocks_than_k_is_dense(
    spec: str, length: int, tile: int, tensors: MakeTensors, masked_dense: MaskedDense, causal_mask: CausalMask
) -> None:
    """native-sparse-attention-pytorch#18: "selected index k out of range"."""
    q, k, v = tensors(queries=length)
    method = make(spec, top_k=16, block_size=64, query_tile=tile)
    problem = problem_of(method, q, k, v)
    expected, _ = masked_dense(q, k, v, causal_mask(length, length))
    torch.testing.assert_close(method(q, k, v, problem), expected)


@pytest.mark.parametrize("top_k", [1, 4, 16])
def test_an_early_row_sees_what_there_is_and_no_more(spec: str, top_k: int, tensors: MakeTensors) -> None:
    """MInference#108: a fixed K made early rows attend to future blocks."""
    q, k, v = tensors(queries=200)
    method = make(spec, top_k=top_k, block_size=16, query_tile=1)
    problem = problem_of(method, q, k, v)
    selection = method.select(q, k, problem)
    assert selection is not None
    selection.check()
    own, forced = torch.arange(200) // 16, method.sinks(problem) + method.locals(problem)
    most = max(top_k, forced) if method.forced_in_budget else top_k + forced
    assert torch.equal(selection.counts[0, 0].long(), torch.minimum(own + 1, torch.tensor(most)))
    assert selection.indices[0, 0, 0].tolist() == [0] + [-1] * (selection.indices.shape[-1] - 1)


@pytest.mark.parametrize("length", [63, 64, 65, 145, 1000])
@pytest.mark.parametrize("tile", [1, 64])
@pytest.mark.parametrize("spec", EVERY)
def test_memory_behind_the_tensors_is_not_read(spec: str, length: int, tile: int, tensors: MakeTensors) -> None:
    """flashinfer#5090 and tilelang#2069: what lies past the last key was attended, or pooled into a mean."""
    q, k, v = tensors(queries=length, heads=1, dim=4)
    method = make(spec, top_k=2, block_size=64, query_tile=tile)
    problem = problem_of(method, q, k, v)
    views = (torch.nn.functional.pad(x, (0, 0, 0, 90), value=torch.nan)[:, :, :length] for x in (q, k, v))
    q2, k2, v2 = views
    assert torch.equal(method(q2, k2, v2, problem), method(q, k, v, problem))


@pytest.mark.parametrize("spec", [spec for spec in EVERY if not spec.startswith("random_blocks")])
@pytest.mark.parametrize(("queries", "tile"), [(1, 1), (100, 1), (100, 50)])
def test_fewer_queries_than_keys_are_the_last_rows(spec: str, queries: int, tile: int, tensors: MakeTensors) -> None:
    """SDPA's is_causal aligns at the start, FlashAttention at the end: here query i sees keys up to i + N - M."""
    q, k, v = tensors(queries=1000, heads=1, dim=4)
    method = make(spec, top_k=2, block_size=50, query_tile=tile)
    whole = method(q, k, v, problem_of(method, q, k, v))
    last = q[:, :, -queries:]
    output = method(last, k, v, problem_of(method, last, k, v))
    torch.testing.assert_close(output, whole[:, :, -queries:])
