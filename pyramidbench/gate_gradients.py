"""The gate of a pass with gradients: what a method's backward must show before it is timed.

Shape, dtype and finite values for a random gradient of the output at every row; inputs unmodified; the gradients against
fp64 with the blocks held fixed, within what a plain computation in the same dtype gets; two sums over all rows; and nothing
from the future: with later keys and values replaced by garbage, the gradients of earlier queries, keys and values stay, and
those of the garbage are zero for them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyramidbench.gate import GATE_ELEMENTS, GateFailure, Passed, first_hidden, gate_tiling, with_garbage
from pyramidbench.oracle import sample_tiles
from pyramidbench.oracle_gradients import head_gradients, rows_of_tiles
from pyramidbench.passes import Gradients, Training
from pyramidbench.problem import DTYPES

NAMES = ("q", "k", "v")
SUM_EPS, SUM_FLOOR = 16.0, 1e-5
"""How far two sums over a whole head may be apart, in units of the dtype's epsilon (that of long fp32 sums at least) × the root
sum of squares of their terms. Rounding alone makes less than one such unit, since its signs are random."""


@dataclass(frozen=True)
class Apart:
    """Of one gradient: its largest error against fp64, what is allowed, and the largest value."""

    error: float
    allowed: float
    largest: float


def check_gradients(training: Training, passed: Passed) -> dict[str, Apart]:
    """Check the gradients under the blocks of a call that passed.

    A random gradient comes back to every row, and one to the rows of sampled tiles only: of that, fp64 is affordable.

    Raises:
        GateFailure: the first fault found.
    """
    leaves, problem = training.leaves, training.problem
    copies = [tensor.detach().clone() for tensor in (*leaves, training.d_out)]
    output = training.attend(passed.selection)
    if not bool(((output.detach().double() - passed.output.double()).abs() <= passed.allowed).all()):
        raise GateFailure("with gradients the output is another one than without")
    whole = training.backward(output)
    for name, gradient, leaf in zip(NAMES, whole, leaves, strict=True):
        if gradient.shape != leaf.shape or gradient.dtype != DTYPES[problem.dtype]:
            found, expected = (f"{tuple(x.shape)} {x.dtype}" for x in (gradient, leaf))
            raise GateFailure(f"the gradient of {name} is {found}; expected {expected}")
        if not bool(gradient.isfinite().all()):
            raise GateFailure(f"the gradient of {name} holds NaN or infinity")
    tiling = gate_tiling(training.method, problem)
    tiles = sample_tiles(tiling, problem.batch * problem.heads, GATE_ELEMENTS, output.device, fewest=4)
    rows = rows_of_tiles(tiling, tiles)
    part = training.d_out * rows[:, None]
    found_part = whole if bool(rows.all()) else training.backward(output, part)
    # A row's own gradient depends on nothing that comes back to other rows.
    alone = torch.where(rows[:, None], whole[0], 0)
    errors = _compared(training, passed, part, tiles, found_part, alone)
    for name, tensor, copy in zip((*NAMES, "d_out"), (*leaves, training.d_out), copies, strict=True):
        if not torch.equal(tensor.detach(), copy):
            raise GateFailure(f"the backward changed {name}")
    for name, apart in errors.items():
        if not apart.error <= apart.allowed:
            raise GateFailure(
                f"error {apart.error:.3g} of the gradient of {name} against fp64 with the blocks held fixed; "
                f"allowed {apart.allowed:.3g}"
            )
    _check_sums(training, output.detach(), whole)
    return errors


def check_gradients_causal(training: Training, passed: Passed, errors: dict[str, Apart]) -> None:
    """Replace later keys and values as `gate.check_causal` does, let a gradient come back to earlier queries alone, and
    demand the same gradients of what these see, and none of what they do not see.

    Raises:
        GateFailure: a gradient moved, or leaked from the future.
    """
    problem = training.problem
    hidden = first_hidden(training.method, problem)
    if hidden is None:
        return
    first, rows = hidden
    q, k, v = (leaf.detach() for leaf in training.leaves)
    early = training.d_out.clone()
    early[:, :, rows:] = 0
    clean = training.backward(training.attend(passed.selection), early)
    generator = torch.Generator(device=k.device).manual_seed(1)
    spoiled = Training.of(
        training.method, q, with_garbage(k, first, generator), with_garbage(v, first, generator), problem
    )
    moved = spoiled.backward(spoiled.attend(spoiled.select()), early)
    for name, before, after, end in zip(NAMES, clean, moved, (rows, first, first), strict=True):
        if bool((after[:, :, end:] != 0).any()):
            raise GateFailure(f"a gradient leaks from the future: that of {name} is not 0 from position {end} on")
        largest = float(before[:, :, :end].abs().max())
        allowed = errors[name].allowed * max(1.0, largest / max(errors[name].largest, 1e-30))
        apart = (after[:, :, :end].double() - before[:, :, :end].double()).abs()
        if not bool((apart <= allowed).all()):
            raise GateFailure(f"look-ahead: keys from position {first} on change the gradient of {name} before them")


def _check_sums(training: Training, output: Tensor, found: Gradients) -> None:
    """Two identities that hold over a whole head, so that rows which fp64 does not see count, too, if coarsely:
    Σ k·dk = Σ q·dq, both being Σ dS ∘ S, and Σ v·dv = Σ o·do.

    Raises:
        GateFailure: one does not hold.
    """
    problem = training.problem
    q, k, v = (leaf.detach() for leaf in training.leaves)
    unit = SUM_EPS * max(torch.finfo(q.dtype).eps, SUM_FLOOR)
    for batch in range(q.shape[0]):
        for head in range(k.shape[1]):
            mine = slice(head * problem.group, (head + 1) * problem.group)
            for name, rows, keys in (
                ("k", (q[batch, mine], found[0][batch, mine]), (k[batch, head], found[1][batch, head])),
                ("v", (output[batch, mine], training.d_out[batch, mine]), (v[batch, head], found[2][batch, head])),
            ):
                terms = [one.double() * other.double() for one, other in (rows, keys)]
                apart = abs(float(terms[0].sum() - terms[1].sum()))
                allowed = unit * sum(float(torch.linalg.vector_norm(part)) for part in terms)
                if not apart <= allowed:
                    raise GateFailure(
                        f"the gradient of {name}, summed over a head, is {apart:.3g} from what the queries give; "
                        f"allowed {allowed:.3g}"
                    )


def _compared(
    training: Training, passed: Passed, d_out: Tensor, tiles: Tensor, found: Gradients, alone: Tensor
) -> dict[str, Apart]:
    """Errors of the gradients that the tiles' rows give; `alone` is a second finding of that of q."""
    q, k, v = (leaf.detach() for leaf in training.leaves)
    problem, tiling = training.problem, gate_tiling(training.method, training.problem)
    worst = torch.zeros(len(NAMES), 4, dtype=torch.float64)
    for batch in range(q.shape[0]):
        for head in range(k.shape[1]):
            given = (q, k, v, d_out, tiling, problem.scale, tiles, passed.selection, (batch, head))
            truth, plain = (head_gradients(*given, precision) for precision in (torch.float64, q.dtype))
            terms = head_gradients(*given, torch.promote_types(q.dtype, torch.float32), absolute=True)
            mine = slice(head * problem.group, (head + 1) * problem.group)
            ours = [(found[0][batch, mine], alone[batch, mine]), (found[1][batch, head],), (found[2][batch, head],)]
            for index, (exact, low, sizes, versions) in enumerate(zip(truth, plain, terms, ours, strict=True)):
                error = max(float((version.double() - exact).abs().max()) for version in versions)
                # A plain result is rounded once more, as any gradient is.
                other = float((low.to(q.dtype).double() - exact).abs().max())
                largest = float(exact.abs().max())
                measured = torch.tensor([error, other, largest, float(sizes.max())], dtype=torch.float64)
                worst[index] = torch.maximum(worst[index], measured)
    # Sums run in fp32 at least, and round in proportion to their terms, which cancel.
    eps, sum_eps = (torch.finfo(dtype).eps for dtype in (q.dtype, torch.promote_types(q.dtype, torch.float32)))
    return {
        name: Apart(error, 2 * (other + eps * largest + sum_eps * terms), largest)
        for name, (error, other, largest, terms) in zip(NAMES, worst.tolist(), strict=True)
    }
