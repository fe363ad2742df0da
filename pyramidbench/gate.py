"""The gate: what a method must show before it is timed. A cell that fails has no speed.

Shape, dtype and finite values; the output against fp64 under the method's own blocks, within what a plain computation in
the same dtype gets; lists in range, ascending, without repeats or future blocks; inputs unmodified; and no look-ahead:
with later keys and values replaced by garbage, all earlier queries choose the same blocks and get the same outputs.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from pyramidbench.decoding import hold
from pyramidbench.device import synchronize
from pyramidbench.method import BlockMethod, Method
from pyramidbench.oracle import exact_rows, sample_tiles
from pyramidbench.problem import DTYPES, Problem
from pyramidbench.selection import BlockSelection
from pyramidbench.tiling import Tiling

GATE_ELEMENTS = 1 << 24
"""Logits that the comparison may compute: a few tiles at long lengths, all of them at short ones."""
POISON = 50.0


class GateFailure(Exception):
    """The method computed something wrong; the message says what."""


@dataclass(frozen=True)
class Called:
    """What came out of a call, and the wall time of the call alone."""

    selection: BlockSelection | None
    output: Tensor
    seconds: float


@dataclass(frozen=True)
class Passed(Called):
    """A call that passed: its largest error against fp64, and how large it might have been."""

    error: float
    allowed: float


def check_call(method: Method, q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Passed:
    """Run the method once and check everything but look-ahead.

    Raises:
        GateFailure: the first fault found.
    """
    called = check_form(method, q, k, v, problem)
    worst, allowed = _errors(method, q, k, v, problem, called.selection, called.output)
    if worst > allowed:
        raise GateFailure(f"output error {worst:.3g} against fp64 under the method's own blocks; allowed {allowed:.3g}")
    return Passed(called.selection, called.output, called.seconds, worst, allowed)


def check_form(method: Method, q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Called:
    """Run the method once and check what needs no comparison: shape, dtype, finite values, lists, inputs unmodified.

    Raises:
        GateFailure: the first fault found.
    """
    copies = [tensor.clone() for tensor in (q, k, v)]
    start = time.perf_counter()
    hold(method, k, v, problem)
    selection = method.select(q, k, problem)
    if not isinstance(selection, BlockSelection | None):
        raise GateFailure(f"select returned {type(selection).__name__}; expected a BlockSelection, or None for dense")
    output = method.attend(q, k, v, selection, problem)
    if not isinstance(output, Tensor):
        raise GateFailure(f"attend returned {type(output).__name__}; expected a tensor")
    synchronize(q.device)
    seconds = time.perf_counter() - start
    for name, tensor, copy in zip("qkv", (q, k, v), copies, strict=True):
        if not torch.equal(tensor, copy):
            raise GateFailure(f"the method changed its input {name}")
    expected = (problem.batch, problem.heads, problem.seq_len_q, problem.head_dim_v)
    if tuple(output.shape) != expected or output.dtype != DTYPES[problem.dtype]:
        raise GateFailure(f"the output is {tuple(output.shape)} {output.dtype}; expected {expected} {problem.dtype}")
    if not bool(output.isfinite().all()):
        raise GateFailure("the output holds NaN or infinity")
    if selection is not None:
        try:
            selection.check()
        except ValueError as error:
            raise GateFailure(str(error)) from None
    return Called(selection, output, seconds)


def check_causal(method: Method, q: Tensor, k: Tensor, v: Tensor, problem: Problem, passed: Passed) -> None:
    """Replace keys and values from three fifths of the queries on; demand the same earlier choices and outputs.

    Choices must be identical. Outputs may differ by what rounding may, for kernels whose order of summation depends on
    what else is in the batch; garbage of this size passes that bar with any weight above about 1e-7 in fp32.
    A bound may look at all of a tile's rows, so only tiles that end before the garbage are compared.

    Raises:
        GateFailure: a choice or an output of an earlier query moved.
    """
    hidden = first_hidden(method, problem)
    if hidden is None:
        return
    first, rows = hidden
    generator = torch.Generator(device=k.device).manual_seed(1)
    garbage = [with_garbage(tensor, first, generator) for tensor in (k, v)]
    selection = method.select(q, garbage[0], problem)
    if selection is not None and passed.selection is not None:
        tiles = -(-rows // selection.query_tile)
        if not torch.equal(_lists(selection, tiles), _lists(passed.selection, tiles)):
            raise GateFailure(f"look-ahead: keys from position {first} on change the blocks of an earlier query")
    output = method.attend(q, garbage[0], garbage[1], selection, problem)
    moved = (output[:, :, :rows].double() - passed.output[:, :, :rows].double()).abs().amax((0, 1, 3))
    wrong = ~(moved <= passed.allowed)  # so that NaN is wrong, too
    if bool(wrong.any()):
        query = int(wrong.nonzero()[0])
        raise GateFailure(f"look-ahead: keys from position {first} on change the output of query {query}")


def first_hidden(method: Method, problem: Problem) -> tuple[int, int] | None:
    """The key from which on garbage may stand, and how many queries must not notice; None where nothing is ahead."""
    offset = problem.seq_len_kv - problem.seq_len_q
    seeing = min(problem.seq_len_q, problem.seq_len_kv)
    first = max(0, offset) + min(seeing * 3 // 5 + 1, seeing - 1)
    rows = first - offset
    if method.kind == "bound" and isinstance(method, BlockMethod):
        rows -= rows % method.query_tile
    return (first, rows) if problem.causal and rows > 0 and first < problem.seq_len_kv else None


def with_garbage(tensor: Tensor, first: int, generator: torch.Generator) -> Tensor:
    """A copy with large noise from position `first` on."""
    copy = tensor.clone()
    noise = torch.randn(copy[:, :, first:].shape, generator=generator, device=tensor.device)
    copy[:, :, first:] = (POISON * noise).to(copy.dtype)
    return copy


def _lists(selection: BlockSelection, tiles: int) -> Tensor:
    """The lists of the first tiles, padded to a width that does not depend on the others."""
    lists = selection.indices[:, :, :tiles]
    return torch.nn.functional.pad(lists, (0, selection.tiling.blocks - lists.shape[-1]), value=-1)


def _errors(
    method: Method, q: Tensor, k: Tensor, v: Tensor, problem: Problem, selection: BlockSelection | None, output: Tensor
) -> tuple[float, float]:
    """Largest error on sampled tiles, and the allowance: twice (a plain computation's error + eps · largest value).

    In a forward pass the largest value is that of an early row, which sees few keys. A decoding step has none, and its rows
    average over thousands of values that cancel: there it is the largest Σ weight·|value|, which rounding is in proportion to.
    """
    tiling = gate_tiling(method, problem)
    tiles = sample_tiles(tiling, problem.batch * problem.heads, GATE_ELEMENTS, q.device, fewest=4)
    truth = method.expected(q, k, v, selection, problem, tiles, torch.float64)
    plain = method.expected(q, k, v, selection, problem, tiles, q.dtype)
    if truth is None or plain is None:
        truth = exact_rows(q, k, v, tiling, problem.scale, tiles, selection, torch.float64).output
        plain = exact_rows(q, k, v, tiling, problem.scale, tiles, selection, q.dtype).output
    assert truth is not None
    assert plain is not None
    got = tile_rows(output, tiling, tiles)
    if problem.direction == "decode":
        terms = exact_rows(q, k, v.abs(), tiling, problem.scale, tiles, selection, torch.float64).output
        assert terms is not None
        largest = float(terms.nan_to_num().max())
    else:
        largest = float(truth.nan_to_num().abs().max())
    allowed = 2 * (float((plain - truth).nan_to_num().abs().max()) + torch.finfo(q.dtype).eps * largest)
    return float((got.to(torch.float64) - truth).nan_to_num().abs().max()), allowed


def tile_rows(output: Tensor, tiling: Tiling, tiles: Tensor) -> Tensor:
    """Rows of some tiles: [B, H, M, Dv] → [B, H, T, query_tile, Dv]; a ragged tile repeats its last row."""
    row = tiles[:, None] * tiling.query_tile + torch.arange(tiling.query_tile, device=output.device)
    return output[:, :, row.clamp(max=tiling.seq_len_q - 1)]


def gate_tiling(method: Method, problem: Problem) -> Tiling:
    """Tiles that the gate samples: those of the method, or 64 rows where it has none."""
    if isinstance(method, BlockMethod):
        return method.tiling(problem)
    return Tiling(problem.seq_len_q, problem.seq_len_kv, 64, 64, problem.causal)
