"""The gate: honest methods pass at every dtype, tile and length pair; each kind of fault is caught and named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pyramidbench.gate import GateFailure, Passed, check_call, check_causal
from pyramidbench.method import Method
from pyramidbench.methods.flat import FlatTopK
from pyramidbench.methods.sliding_window import SlidingWindow
from pyramidbench.problem import DTYPES, Problem
from pyramidbench.registry import create
from pyramidbench.selection import BlockSelection

QKV = tuple[Tensor, Tensor, Tensor]
Tensors = Callable[..., QKV]
BUDGET: dict[str, Any] = {"top_k": 1, "block_size": 16}


def check(method: Method, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True) -> Passed:
    """The whole gate."""
    problem = Problem.of(q, k, v, causal=causal, scale=None)
    passed = check_call(method, q, k, v, problem)
    check_causal(method, q, k, v, problem, passed)
    return passed


class Window(SlidingWindow):
    """An honest method that the faulty ones spoil."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, selection: BlockSelection | None, problem: Problem) -> Tensor:  # noqa: ARG002
        honest = super().select(q, k, problem)
        return self.spoil(super().attend(q, k, v, honest, problem), q, k, v)

    def select(self, q: Tensor, k: Tensor, problem: Problem) -> BlockSelection:
        return self.misplace(super().select(q, k, problem))

    def spoil(self, output: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # noqa: ARG002
        return output

    def misplace(self, selection: BlockSelection) -> BlockSelection:
        return selection


class WrongShape(Window):
    def spoil(self, output: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # noqa: ARG002
        return output[:, :, :-1]


class NoTensor(Window):
    def spoil(self, output: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Any:  # noqa: ARG002
        return None


class NoSelection(Window):
    def misplace(self, selection: BlockSelection) -> Any:
        return selection.indices


class WrongDtype(Window):
    def spoil(self, output: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # noqa: ARG002
        return output.double()


class OneNaN(Window):
    def spoil(self, output: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # noqa: ARG002
        output[0, -1, -1, -1] = torch.nan
        return output


class Infinite(Window):
    def spoil(self, output: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # noqa: ARG002
        output[0, 0, 0, 0] = torch.inf
        return output


class WrongValues(Window):
    def spoil(self, output: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # noqa: ARG002
        return output * 1.0001


class WrongLastRow(Window):
    def spoil(self, output: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # noqa: ARG002
        output[:, :, -1] = 0
        return output


class ChangesKeys(Window):
    def spoil(self, output: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # noqa: ARG002
        k[0, 0, 0, 0] += 1
        return output


class ChangesQueries(Window):
    def spoil(self, output: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # noqa: ARG002
        q.mul_(2)
        return output


class ChangesValues(Window):
    def spoil(self, output: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # noqa: ARG002
        v[..., -1, -1] = 0
        return output


class Repeats(Window):
    def misplace(self, selection: BlockSelection) -> BlockSelection:
        indices = selection.indices.clone()
        indices[:, :, -1, 1] = indices[:, :, -1, 0]
        return replace(selection, indices=indices)


class Unsorted(Window):
    def misplace(self, selection: BlockSelection) -> BlockSelection:
        indices = selection.indices.clone()
        indices[:, :, -1, :2] = indices[:, :, -1, :2].flip(-1)
        return replace(selection, indices=indices)


class Future(Window):
    def misplace(self, selection: BlockSelection) -> BlockSelection:
        indices = selection.indices.clone()
        indices[:, :, 0] = -1
        indices[:, :, 0, 0] = selection.tiling.blocks - 1
        return BlockSelection.from_indices(indices, selection.tiling)


class OutOfRange(Window):
    def misplace(self, selection: BlockSelection) -> BlockSelection:
        indices = selection.indices.clone()
        indices[:, :, -1, -1] = selection.tiling.blocks
        return BlockSelection.from_indices(indices, selection.tiling)


class Miscounted(Window):
    def misplace(self, selection: BlockSelection) -> BlockSelection:
        return replace(selection, counts=selection.counts + 1)


class SeesLaterValues(Window):
    """Leaks the last value with a weight that hides within rounding."""

    def spoil(self, output: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # noqa: ARG002
        return output + 1e-7 * v[:, :1, -1:]


class BreaksOnLaterValues(Window):
    """NaN as soon as a later value is large."""

    def spoil(self, output: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # noqa: ARG002
        return torch.where(v[:, :, -1].abs().max() > 20, torch.nan, output)


class ChoosesByLaterKeys(FlatTopK):
    """Asks with the last key in the place of each query."""

    def select(self, q: Tensor, k: Tensor, problem: Problem) -> BlockSelection:
        return super().select(k[:, :, -1:].repeat_interleave(problem.group, 1).expand_as(q), k, problem)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("tile", [1, 64])
@pytest.mark.parametrize("lengths", [(200, 200), (70, 200), (200, 70)], ids=["M=N", "M<N", "M>N"])
@pytest.mark.parametrize("name", ["pyramid", "flat", "exact_topk", "sliding_window", "random_blocks"])
def test_an_honest_method_passes(tensors: Tensors, name: str, lengths: tuple[int, int], tile: int, dtype: str) -> None:
    q, k, v = tensors(queries=lengths[0], keys=lengths[1], dim=16, dtype=DTYPES[dtype])
    passed = check(create(name, {**BUDGET, "query_tile": tile}), q, k, v)
    assert passed.error <= passed.allowed
    assert passed.selection is not None


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dense_attention_passes_and_has_no_selection(tensors: Tensors, dtype: str, causal: bool) -> None:
    q, k, v = tensors(queries=90, keys=130, dim=16, dtype=DTYPES[dtype])
    passed = check(create("dense"), q, k, v, causal=causal)
    assert passed.selection is None
    assert passed.output.dtype == DTYPES[dtype]


FAULTS = [
    (WrongShape, r"the output is \(1, 2, 399, 16\) torch.float32; expected \(1, 2, 400, 16\) float32"),
    (WrongDtype, r"the output is .* torch.float64; expected .* float32"),
    (NoTensor, "attend returned NoneType; expected a tensor"),
    (NoSelection, "select returned Tensor; expected a BlockSelection, or None for dense"),
    (OneNaN, "the output holds NaN or infinity"),
    (Infinite, "the output holds NaN or infinity"),
    (WrongValues, "output error .* against fp64 under the method's own blocks; allowed"),
    (WrongLastRow, "output error .* allowed"),
    (ChangesQueries, "the method changed its input q"),
    (ChangesKeys, "the method changed its input k"),
    (ChangesValues, "the method changed its input v"),
    (Repeats, "not strictly ascending: a block is repeated or out of order"),
    (Unsorted, "not strictly ascending: a block is repeated or out of order"),
    (Future, "a selected block starts after the tile's last query"),
    (OutOfRange, "a selected block is outside 0 … 24"),
    (Miscounted, "counts disagree with the lists"),
    (SeesLaterValues, r"look-ahead: keys from position 241 on change the output of query 0"),
    (BreaksOnLaterValues, r"look-ahead: keys from position 241 on change the output of query 0"),
    (ChoosesByLaterKeys, r"look-ahead: keys from position 241 on change the blocks of an earlier query"),
]


@pytest.mark.parametrize("tile", [1, 64])
@pytest.mark.parametrize(("faulty", "message"), FAULTS, ids=[faulty.__name__ for faulty, _ in FAULTS])
def test_a_fault_is_caught_and_named(tensors: Tensors, faulty: Callable[..., Method], message: str, tile: int) -> None:
    q, k, v = tensors(queries=400, dim=16, dtype=torch.float32)
    with pytest.raises(GateFailure, match=message):
        check(faulty(**BUDGET, query_tile=tile), q, k, v)


@pytest.mark.parametrize("lengths", [(40, 200), (2, 200), (200, 40)], ids=["M<N", "M=2", "M>N"])
@pytest.mark.parametrize("faulty", [SeesLaterValues, BreaksOnLaterValues])
def test_look_ahead_is_caught_when_queries_and_keys_differ_in_number(
    tensors: Tensors, faulty: Callable[..., Method], lengths: tuple[int, int]
) -> None:
    q, k, v = tensors(queries=lengths[0], keys=lengths[1], dim=16, dtype=torch.float32)
    with pytest.raises(GateFailure, match="look-ahead"):
        check(faulty(**BUDGET, query_tile=1), q, k, v)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_is_wrong_by_more_than_rounding_is_caught_in_low_precision(tensors: Tensors, dtype: str) -> None:
    class Shifted(Window):
        def spoil(self, output: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # noqa: ARG002
            return output + 0.25

    q, k, v = tensors(queries=200, dim=16, dtype=DTYPES[dtype])
    with pytest.raises(GateFailure, match="output error"):
        check(Shifted(**BUDGET), q, k, v)


def test_without_causality_nothing_is_ahead(tensors: Tensors) -> None:
    q, k, v = tensors(queries=200, dim=16, dtype=torch.float32)
    assert check(ChoosesByLaterKeys(**BUDGET), q, k, v, causal=False).selection is not None
