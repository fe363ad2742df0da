"""Block and node scores: the order that Jensen and the bounds guarantee, and joining heads and rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pyramidbench.kernels.pyramid import build_pyramid
from pyramidbench.kernels.scores import (
    block_scores,
    children_scores,
    join_heads,
    mean_query,
    split_signs,
    summary_scores,
)

MakeTensors = Callable[..., tuple[Tensor, Tensor, Tensor]]


def node_scores(q: Tensor, k: Tensor, alpha: float, level: int, branching: int) -> tuple[Tensor, Tensor, Tensor]:
    """Summary, children and exact scores of a level's nodes for one query [D] and keys [N, D], each [nodes]."""
    pyramid = build_pyramid(k[None, None], block_size=8, branching=branching, levels=level + 1, bound_weight=alpha)
    queries = q.view(1, 1, 1, 1, -1)
    queries = split_signs(queries) if alpha else queries
    real, below = torch.ones(1, 1, 1, dtype=torch.bool), pyramid.at(level - 1)[0, 0]
    summary = summary_scores(queries, real, pyramid, pyramid.at(level)[0, 0], level, pyramid.size(level))
    children = children_scores(queries, real, pyramid, below, level, pyramid.size(level))
    width = 8 * branching**level
    exact = torch.stack([(k[x : x + width] @ q).logsumexp(0) for x in range(0, len(k), width)])
    return summary[0, 0], children[0, 0], exact


@pytest.mark.parametrize("length", [64, 100, 129])
@pytest.mark.parametrize("branching", [2, 3, 4])
@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("seed", range(5))
def test_means_bound_the_mass_from_below_and_children_are_closer(
    tensors: MakeTensors, length: int, branching: int, level: int, seed: int
) -> None:
    q, k, _ = tensors(queries=length, seed=seed)
    summary, children, exact = node_scores(2 * q[0, 0, 0], k[0, 0], 0, level, branching)
    assert (summary <= children + 1e-12).all()
    assert (children <= exact + 1e-12).all()
    assert (summary < exact).any()


@pytest.mark.parametrize("length", [64, 100, 129])
@pytest.mark.parametrize("branching", [2, 3, 4])
@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("seed", range(5))
def test_extremes_bound_the_mass_from_above(
    tensors: MakeTensors, length: int, branching: int, level: int, seed: int
) -> None:
    q, k, _ = tensors(queries=length, seed=seed)
    summary, children, exact = node_scores(2 * q[0, 0, 0], k[0, 0], 1, level, branching)
    assert (summary >= children - 1e-12).all()
    assert (children >= exact - 1e-12).all()
    assert (summary > exact).any()


@pytest.mark.parametrize("union", ["all", "listed"])
def test_a_block_score_is_the_log_mass_of_its_keys(tensors: MakeTensors, union: str) -> None:
    q, k, _ = tensors(queries=50, heads=2, keys=24)
    queries, keys = q[:, :, None].transpose(1, 2), k[0, 0].view(3, 8, 8)
    which: Tensor | int = 3 if union == "all" else torch.tensor([[2, 0, 1]])
    scores = block_scores(queries[None][:, 0], keys, None, which)[0, 0]
    expected = (q[0] @ k[0, 0].T).unflatten(-1, (3, 8)).logsumexp(-1)
    torch.testing.assert_close(scores, expected if union == "all" else expected[..., [2, 0, 1]])


def test_a_key_that_is_hidden_or_past_the_end_weighs_nothing(tensors: MakeTensors) -> None:
    q, k, _ = tensors(queries=5, heads=1, keys=16)
    queries, keys = q[0][None, None], k[0, 0].view(2, 8, 8)
    weight = torch.zeros(2, 8, dtype=torch.float64)
    weight[1, 3:] = -torch.inf
    visible = torch.ones(1, 1, 2, 8, dtype=torch.bool)
    visible[..., 0, 2:] = False
    scores = block_scores(queries, keys, weight, 2, visible)[0, 0, 0]
    logits = q[0, 0] @ k[0, 0].T
    torch.testing.assert_close(scores, torch.stack([logits[:, :2].logsumexp(-1), logits[:, 8:11].logsumexp(-1)], -1))


@pytest.mark.parametrize("how", ["sum_prob", "sum_lse", "lse"])
def test_rows_that_a_ragged_tile_lacks_count_for_nothing(how: str) -> None:
    scores = torch.randn(2, 3, 4, 5, 6, generator=torch.Generator().manual_seed(0))
    real = (torch.arange(5) < 3).expand(2, 3, 5)
    short = join_heads(scores[..., :3, :], real[..., :3], None, None, how)
    torch.testing.assert_close(join_heads(scores, real, None, None, how), short)


@pytest.mark.parametrize("how", ["sum_prob", "sum_lse", "lse"])
@pytest.mark.parametrize("blocks", [5, 6, 33])
def test_equal_blocks_have_equal_scores_wherever_they_stand(how: str, blocks: int) -> None:
    """To the last bit, or ties would not go to the lower block: behind a whole vector torch adds in another order."""
    scores = torch.randn(4, 2, 3, 20, 1, generator=torch.Generator().manual_seed(0)).expand(-1, -1, -1, -1, blocks)
    real = (torch.arange(20) < torch.tensor([[20], [13]])).expand(4, 2, 20)
    joined = join_heads(scores.contiguous(), real, None, scores[..., :2], how)
    assert torch.equal(joined, joined[..., :1].expand_as(joined))


def test_probabilities_of_all_scored_and_forced_blocks_add_to_one_per_row() -> None:
    generator = torch.Generator().manual_seed(0)
    scores, forced = (torch.randn(1, 1, 2, 3, n, generator=generator).double() for n in (6, 2))
    real = torch.ones(1, 1, 3, dtype=torch.bool)
    member = torch.tensor([True, True, False, True, True, True])[None, None]
    counted = torch.cat([scores[..., member[0, 0]], forced], -1).softmax(-1).sum((2, 3))
    joined = join_heads(scores, real, member, forced, "sum_prob")
    torch.testing.assert_close(joined[..., member[0, 0]], counted[..., :5])
    assert abs(float(counted.sum()) - 6) < 1e-12


def test_the_mean_query_leaves_out_rows_that_do_not_exist() -> None:
    queries = torch.randn(1, 2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    real = torch.tensor([[[True] * 4, [True, True, False, False]]])
    pooled = mean_query(queries, real)
    assert pooled.shape == (1, 2, 3, 1, 5)
    torch.testing.assert_close(pooled[:, 0, :, 0], queries[:, 0].mean(2))
    torch.testing.assert_close(pooled[:, 1, :, 0], queries[:, 1, :, :2].mean(2))
