"""The gate of gradients: honest methods pass at every dtype, tile and length pair; each kind of fault is caught and named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pyramidbench import gate_gradients, sparse_attention
from pyramidbench.errors import UserError
from pyramidbench.gate import GateFailure, check_call, gate_tiling
from pyramidbench.gate_gradients import Apart, check_gradients, check_gradients_causal
from pyramidbench.method import Method
from pyramidbench.methods.sliding_window import SlidingWindow
from pyramidbench.oracle_gradients import head_gradients, rows_of_tiles
from pyramidbench.passes import Training
from pyramidbench.problem import DTYPES, Problem
from pyramidbench.registry import create
from pyramidbench.selection import BlockSelection

QKV = tuple[Tensor, Tensor, Tensor]
Tensors = Callable[..., QKV]
BUDGET: dict[str, Any] = {"top_k": 1, "block_size": 16}


def check(method: Method, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True) -> dict[str, Apart]:
    """The whole gate of a training pass but its forward's look-ahead."""
    problem = replace(Problem.of(q, k, v, causal=causal, scale=None), direction="train")
    passed = check_call(method, q, k, v, problem)
    training = Training.of(method, q, k, v, problem)
    errors = check_gradients(training, passed)
    check_gradients_causal(training, passed, errors)
    return errors


@pytest.mark.parametrize("lengths", [(150, 150), (40, 150), (150, 40)], ids=str)
@pytest.mark.parametrize("tile", [1, 32])
@pytest.mark.parametrize("name", ["pyramid", "flat", "sliding_window", "exact_topk"])
def test_an_honest_method_passes(tensors: Tensors, name: str, tile: int, lengths: tuple[int, int]) -> None:
    q, k, v = tensors(queries=lengths[0], keys=lengths[1], dim=16, dtype=torch.float32)
    errors = check(create(name, {**BUDGET, "query_tile": tile}), q, k, v)
    assert list(errors) == ["q", "k", "v"]
    assert all(0 < apart.allowed < 1e-4 * apart.largest for apart in errors.values())


@pytest.mark.parametrize("seed", [2, 9, 20])
def test_rows_of_few_keys_pass(seed: int) -> None:
    """Where a row sees one key its gradient is a difference of two equal sums, which autograd gets exactly right."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, heads, 145, 64, generator=generator) for heads in (4, 2, 2))
    check(create("flat", {"top_k": 4}), q, k, v)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["dense", "dense:math", "pyramid"])
def test_low_precision_passes(tensors: Tensors, name: str, dtype: str, causal: bool) -> None:
    q, k, v = tensors(queries=130, heads=4, kv_heads=2, dim=16, dim_v=16, dtype=DTYPES[dtype])
    parameters = {} if name.startswith("dense") else {**BUDGET, "query_tile": 32}
    check(create(name, parameters), q, k, v, causal=causal)


class Spoiled(torch.autograd.Function):
    """Nothing forward; `spoil(index, gradient)` on the gradients of q, k and v backward."""

    @staticmethod
    def forward(ctx: Any, spoil: Callable[[int, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor) -> QKV:
        ctx.spoil = spoil
        return q.clone(), k.clone(), v.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, *(ctx.spoil(index, gradient.clone()) for index, gradient in enumerate(gradients))


class Window(SlidingWindow):
    """An honest forward whose backward the faulty ones spoil."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, selection: BlockSelection | None, problem: Problem) -> Tensor:
        if q.requires_grad:
            q, k, v = Spoiled.apply(self.spoil, q, k, v)
        return super().attend(q, k, v, selection, problem)

    def spoil(self, index: int, gradient: Tensor) -> Tensor:
        raise NotImplementedError


class QueriesTwice(Window):
    def spoil(self, index: int, gradient: Tensor) -> Tensor:
        return 2 * gradient if index == 0 else gradient


class KeysOff(Window):
    def spoil(self, index: int, gradient: Tensor) -> Tensor:
        return 1.00005 * gradient if index == 1 else gradient


class LastValueLost(Window):
    def spoil(self, index: int, gradient: Tensor) -> Tensor:
        if index == 2:
            gradient[:, :, -1] = 0
        return gradient


class OneNaN(Window):
    def spoil(self, index: int, gradient: Tensor) -> Tensor:
        if index == 1:
            gradient[0, 0, 3, 2] = torch.nan
        return gradient


class ReadsTheFuture(Window):
    """The future is what the gradient of its keys holds once something comes back to late queries; here always."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, selection: BlockSelection | None, problem: Problem) -> Tensor:
        output = SlidingWindow.attend(self, q, k, v, selection, problem)
        return output + Leak.apply(k) if q.requires_grad else output


class Leak(torch.autograd.Function):
    """Adds 0 forward; backward gives every key a gradient where garbage stands."""

    @staticmethod
    def forward(ctx: Any, k: Tensor) -> Tensor:
        ctx.save_for_backward(k)
        return k.new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ARG004
        (k,) = ctx.saved_tensors
        return torch.where(k.abs() > 10, 1.0, 0.0)


class AnotherOutput(Window):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, selection: BlockSelection | None, problem: Problem) -> Tensor:
        output = SlidingWindow.attend(self, q, k, v, selection, problem)
        return 1.01 * output if q.requires_grad else output


@pytest.mark.parametrize(
    ("faulty", "message"),
    [
        (QueriesTwice, "error .* of the gradient of q against fp64 with the blocks held fixed; allowed"),
        (KeysOff, "error .* of the gradient of k against fp64 with the blocks held fixed; allowed"),
        (LastValueLost, "error .* of the gradient of v against fp64"),
        (OneNaN, "the gradient of k holds NaN or infinity"),
        (ReadsTheFuture, "a gradient leaks from the future: that of k is not 0 from position 121 on"),
        (AnotherOutput, "with gradients the output is another one than without"),
    ],
)
def test_a_fault_is_caught_and_named(tensors: Tensors, faulty: Callable[..., Method], message: str) -> None:
    q, k, v = tensors(queries=200, dim=16, dtype=torch.float32)
    with pytest.raises(GateFailure, match=message):
        check(faulty(**BUDGET, query_tile=32), q, k, v)


def test_a_fault_is_caught_on_sampled_tiles_too(tensors: Tensors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_gradients, "GATE_ELEMENTS", 1)
    q, k, v = tensors(queries=400, dim=16, dtype=torch.float32)
    assert check(create("sliding_window", {**BUDGET, "query_tile": 16}), q, k, v)
    with pytest.raises(GateFailure, match="gradient of k against fp64"):
        check(KeysOff(**BUDGET, query_tile=16), q, k, v)


class KeysOffInCompany(Window):
    """Right where something comes back to few rows, wrong where it comes back to all."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, selection: BlockSelection | None, problem: Problem) -> Tensor:
        self.full: bool
        output = SlidingWindow.attend(self, *(Spoiled.apply(self.spoil, q, k, v) if q.requires_grad else (q, k, v)),
                                      selection, problem)  # fmt: skip
        if q.requires_grad:
            output.register_hook(lambda d_out: object.__setattr__(self, "full", bool((d_out != 0).all())))
        return output

    def spoil(self, index: int, gradient: Tensor) -> Tensor:
        return 1.01 * gradient if index > 0 and self.full else gradient


def test_a_fault_that_sampled_tiles_miss_shows_in_the_sums(tensors: Tensors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_gradients, "GATE_ELEMENTS", 1)
    q, k, v = tensors(queries=400, dim=16, dtype=torch.float32)
    with pytest.raises(GateFailure, match=r"the gradient of k, summed over a head, is .* from what the queries give"):
        check(KeysOffInCompany(**BUDGET, query_tile=16), q, k, v)


def test_attention_without_a_graph_is_told_what_is_accepted(tensors: Tensors) -> None:
    class Detached(SlidingWindow):
        def attend(self, q: Tensor, k: Tensor, v: Tensor, selection: BlockSelection | None, problem: Problem) -> Tensor:
            return super().attend(q.detach(), k.detach(), v.detach(), selection, problem)

    q, k, v = tensors(queries=64, dim=16, dtype=torch.float32)
    with pytest.raises(UserError, match="passes no gradient; accepted: --pass forward"):
        check(Detached(**BUDGET), q, k, v)


@pytest.mark.parametrize("lengths", [(50, 50), (20, 50), (50, 20)], ids=str)
@pytest.mark.parametrize("tiles", [[0, 1, 2, 3], [1, 3]], ids=["all", "some"])
def test_the_judge_agrees_with_autograd(tensors: Tensors, lengths: tuple[int, int], tiles: list[int]) -> None:
    """Of the rows of the tiles alone, under a selection, ragged and with rows that see nothing."""
    q, k, v = tensors(queries=lengths[0], keys=lengths[1], heads=4, kv_heads=2, dim=8, dim_v=6)
    method = create("flat", {"top_k": 1, "block_size": 8, "query_tile": 16})
    problem = Problem.of(q, k, v, causal=True, scale=0.4)
    selection, tiling = method.select(q, k, problem), gate_tiling(method, problem)
    assert selection is not None
    wanted = torch.tensor([tile for tile in tiles if tile < tiling.tiles])
    d_out = torch.randn(*q.shape[:3], 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    output = sparse_attention(*leaves, selection, scale=0.4)
    expected = torch.autograd.grad(output, leaves, d_out * rows_of_tiles(tiling, wanted)[:, None])
    for head in range(2):
        found = head_gradients(q, k, v, d_out, tiling, 0.4, wanted, selection, (0, head), torch.float64)
        torch.testing.assert_close(found[0], expected[0][0, 2 * head : 2 * head + 2])
        torch.testing.assert_close(found[1], expected[1][0, head])
        torch.testing.assert_close(found[2], expected[2][0, head])
