"""Ranking a level of a decoding step: which nodes are kept, in order, with the two at the edges, against a stable sort."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from pyramidbench.kernels.decode_rank import rank

WIDTH = 32


@triton.jit
def ranked(
    score_ptr, list_ptr, out_ptr, count_ptr, starts, lo, hi, keep, width, is_leaf, SLOTS: tl.constexpr, NARROW: tl.constexpr
):  # fmt: skip
    rank(
        score_ptr, list_ptr, out_ptr, count_ptr, starts > 0, lo, hi, keep, width, is_leaf > 0, SLOTS, NARROW, BRANCHING=2,
        BY_NODE=True,
    )  # fmt: skip


def drawn(name: str, nodes: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(nodes, generator=generator)
    if name == "near-ties":
        return (torch.randint(0, 3, (nodes,), generator=generator) + 0x3E800000).int().view(torch.float32)
    if name == "two-values":
        return (scores > 0).float()
    if name == "not-finite":
        scores[::5], scores[1::5], scores[2::5] = torch.nan, -torch.inf, torch.inf
    return torch.zeros(nodes) if name == "all-equal" else scores


def expected(scores: Tensor, candidates: list[int], keep: int) -> list[int]:
    lowest = torch.finfo(torch.float32).min
    known = torch.where(scores > lowest, scores, lowest)[candidates]
    best = known.sort(descending=True, stable=True).indices[:keep]
    return sorted(candidates[place] for place in best.tolist())


@pytest.mark.parametrize("scores", ["random", "near-ties", "two-values", "all-equal", "not-finite"])
@pytest.mark.parametrize("is_leaf", [False, True], ids=["list", "leaves"])
def test_below_the_start(scores: str, is_leaf: bool, device: str) -> None:
    """All combinations of edges: the first node may be ranked where lo is odd, the last where hi is."""
    for lo, hi in ((1, 127), (1, 126), (2, 127), (0, 126), (1, 2), (1, 1)):
        parents = list(range(-(-lo // 2), hi // 2))
        parents = parents[: WIDTH // 2] + parents[-WIDTH // 2 :] if len(parents) > WIDTH else parents
        edges = [node for node in range(lo, hi) if node // 2 in (-(-lo // 2) - 1, hi // 2)]
        candidates = sorted({2 * parent + child for parent in parents for child in (0, 1)} | set(edges))
        for keep in (1, 7, WIDTH):
            check(drawn(scores, 128), parents, (lo, hi), candidates, keep, is_leaf, device)


@pytest.mark.parametrize("scores", ["random", "two-values", "not-finite"])
@pytest.mark.parametrize("nodes", [60, 130], ids=["few", "many"])
def test_at_the_start(scores: str, nodes: int, device: str) -> None:
    check(drawn(scores, nodes), [], (1, nodes), list(range(1, nodes)), WIDTH, False, device, starts=True)


def check(
    scores: Tensor, parents: list[int], interval: tuple[int, int], candidates: list[int], keep: int, is_leaf: bool, device: str,
    *, starts: bool = False,
) -> None:  # fmt: skip
    listed = torch.full((WIDTH,), -1, dtype=torch.int32)
    listed[: len(parents)] = torch.tensor(parents, dtype=torch.int32)
    listed, out, count = listed.to(device), torch.full_like(listed, -7).to(device), torch.zeros(1, dtype=torch.int32)
    count = count.to(device)
    ranked[(1,)](
        scores.to(device), listed, out, count, int(starts), *interval, keep, WIDTH, int(is_leaf), SLOTS=256, NARROW=64,
        num_warps=1,
    )  # fmt: skip
    best = expected(scores, candidates, keep)
    if is_leaf:
        assert int(count) == len(best)
        assert out[: len(best)].tolist() == best
    else:
        assert listed.tolist() == best + [-1] * (WIDTH - len(best))
