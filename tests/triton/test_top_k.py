"""Top-K inside a program: the places of a stable sort, also where scores differ in their last bits only, or not at all."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from pyramidbench.kernels.top_k import best

SLOTS = 64


@triton.jit
def choose(scores_ptr, allowed_ptr, out_ptr, count, PLACES: tl.constexpr):
    place = tl.arange(0, PLACES)
    score, allowed = tl.load(scores_ptr + place), tl.load(allowed_ptr + place) > 0
    tl.store(out_ptr + place, best(score, allowed, count).to(tl.int32))


def near_ties(generator: torch.Generator) -> Tensor:
    """Scores of a sum over heads: a handful of values, each of them up to two last bits away from another."""
    bits = torch.randint(0, 3, (SLOTS,), generator=generator) + 0x3E800000
    return bits.to(torch.int32).view(torch.float32)


def drawn(name: str) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    if name == "near-ties":
        return near_ties(generator)
    if name == "near-ties-below-zero":
        return -near_ties(generator)
    if name == "all-equal":
        return torch.zeros(SLOTS)
    scores = torch.randn(SLOTS, generator=generator)
    if name == "not-finite":
        scores[::5], scores[1::5], scores[2::5] = torch.nan, -torch.inf, torch.inf
    return scores


def expected(scores: Tensor, allowed: Tensor, count: int) -> list[int]:
    """The best `count` allowed places: score descending, then the lower place; NaN and -inf are the lowest score."""
    lowest = torch.finfo(torch.float32).min
    known = torch.where(scores > lowest, scores, lowest).masked_fill(~allowed, -torch.inf)
    order = known.sort(descending=True, stable=True).indices
    return sorted(order[: min(count, int(allowed.sum()))].tolist())


@pytest.mark.parametrize("scores", ["random", "near-ties", "near-ties-below-zero", "all-equal", "not-finite"])
@pytest.mark.parametrize("warps", [1, 4])
def test_best(scores: str, warps: int, device: str) -> None:
    values = drawn(scores)
    for allowed in (torch.ones(SLOTS, dtype=torch.bool), torch.arange(SLOTS) % 3 > 0):
        # More than `count` must be allowed.
        for count in (0, 1, 7, 31):
            out = torch.empty(SLOTS, dtype=torch.int32, device=device)
            choose[(1,)](values.to(device), allowed.int().to(device), out, count, PLACES=SLOTS, num_warps=warps)
            assert out.nonzero().flatten().tolist() == expected(values, allowed, count)
