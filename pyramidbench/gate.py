"""The gate: what a method must show before it is timed. A cell that fails has no speed.

Shape, dtype and finite values; the output against fp64 under the method's own blocks, within what a plain computation in
the same dtype gets; lists in range, ascending, without repeats or future blocks; inputs unmodified; and no look-ahead:
with later keys and values replaced by garbage, all earlier outputs stay the same, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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
class Passed:
    """What came out of a call that passed."""

    selection: BlockSelection | None
    output: Tensor
    error: float


def check_call(method: Method, q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Passed:
    """Run the method once and check everything but look-ahead. `Passed.error` is the error ÷ what is allowed.

    Raises:
        GateFailure: the first fault found.
    """
    copies = [tensor.clone() for tensor in (q, k, v)]
    selection = method.select(q, k, problem)
    output = method.attend(q, k, v, selection, problem)
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
    return Passed(selection, output, _relative_error(method, q, k, v, problem, selection, output))


def check_causal(method: Method, q: Tensor, k: Tensor, v: Tensor, problem: Problem, output: Tensor) -> None:
    """Replace the last two fifths of the keys and values, and demand the same earlier outputs, bit for bit.

    Raises:
        GateFailure: an earlier output moved.
    """
    first = problem.seq_len_kv * 3 // 5 + 1
    rows = first - (problem.seq_len_kv - problem.seq_len_q)
    if not problem.causal or rows <= 0 or first >= problem.seq_len_kv:
        return
    generator = torch.Generator(device=k.device).manual_seed(1)
    poisoned = []
    for tensor in (k, v):
        copy = tensor.clone()
        noise = torch.randn(copy[:, :, first:].shape, generator=generator, device=k.device)
        copy[:, :, first:] = (POISON * noise).to(copy.dtype)
        poisoned.append(copy)
    again = method(q, poisoned[0], poisoned[1], problem)
    if not torch.equal(again[:, :, :rows], output[:, :, :rows]):
        moved = (again[:, :, :rows] != output[:, :, :rows]).any(-1).nonzero()[0].tolist()
        raise GateFailure(f"look-ahead: keys from position {first} on change the output of query {moved[2]}")


def _relative_error(
    method: Method, q: Tensor, k: Tensor, v: Tensor, problem: Problem, selection: BlockSelection | None, output: Tensor
) -> float:
    """Largest error ÷ the allowance: twice (a plain low-precision computation's error + eps · largest value)."""
    tiling = method.tiling(problem) if isinstance(method, BlockMethod) else _row_tiling(problem)
    tiles = sample_tiles(tiling, problem.batch * problem.heads, GATE_ELEMENTS, q.device)
    truth = exact_rows(q, k, v, tiling, problem.scale, tiles, selection, torch.float64).output
    plain = exact_rows(q, k, v, tiling, problem.scale, tiles, selection, q.dtype).output
    assert truth is not None
    assert plain is not None
    got = tile_rows(output, tiling, tiles)
    largest = float(truth.nan_to_num().abs().max())
    allowed = 2 * (float((plain - truth).nan_to_num().abs().max()) + torch.finfo(q.dtype).eps * largest)
    worst = float((got.to(torch.float64) - truth).nan_to_num().abs().max())
    if worst > allowed:
        raise GateFailure(f"output error {worst:.3g} against fp64 under the method's own blocks; allowed {allowed:.3g}")
    return worst / allowed if allowed else 0.0


def tile_rows(output: Tensor, tiling: Tiling, tiles: Tensor) -> Tensor:
    """Rows of some tiles: [B, H, M, Dv] → [B, H, T, query_tile, Dv]; a ragged tile repeats its last row."""
    row = tiles[:, None] * tiling.query_tile + torch.arange(tiling.query_tile, device=output.device)
    return output[:, :, row.clamp(max=tiling.seq_len_q - 1)]


def _row_tiling(problem: Problem) -> Tiling:
    return Tiling(problem.seq_len_q, problem.seq_len_kv, 64, 64, problem.causal)
