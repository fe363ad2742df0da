"""Means of runs and pools against a loop, and what tiles give to pools that they may see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pyramidbench.kernels.pools import pool_means, pool_shares, run_means
from pyramidbench.kernels.representatives import representative_pyramid
from pyramidbench.tiling import Tiling

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(2, 3, 23, 4, generator=GENERATOR, dtype=torch.float64)


@pytest.mark.parametrize("size", [1, 4, 23, 40])
def test_means_of_runs_with_a_ragged_last_one(size: int) -> None:
    expected = [X[..., at : at + size, :].mean(-2) for at in range(0, 23, size)]
    torch.testing.assert_close(run_means(X, size), torch.stack(expected, dim=-2))


@pytest.mark.parametrize(("stride", "span"), [(4, 2), (1, 3), (5, 1), (8, 2)])
def test_pools_overlap_and_are_whole(stride: int, span: int) -> None:
    starts = range(0, 23 - stride * span + 1, stride)
    expected = [X[..., at : at + stride * span, :].mean(-2) for at in starts]
    torch.testing.assert_close(pool_means(X, stride, span), torch.stack(expected, dim=-2))


def test_there_is_no_pool_in_too_few_keys() -> None:
    assert pool_means(X[..., :7, :], 4, 2).shape == (2, 3, 0, 4)


@pytest.mark.parametrize("elements", [1, 500, 1 << 20])
@pytest.mark.parametrize("tile", [1, 5])
def test_shares_are_a_softmax_over_the_pools_that_the_first_row_sees(tile: int, elements: int) -> None:
    q, pools = X[0], pool_means(X[1, 0], 2, 2)
    tiling = Tiling(23, 23, 4, tile, causal=True)
    found = torch.zeros(tiling.tiles, len(pools), dtype=torch.float64)
    for tiles, shares in pool_shares(q, pools, tiling, 2, 2, 0.5, None, elements):
        found[tiles, : shares.shape[1]] = shares
    for number in range(tiling.tiles):
        first = number * tile
        seen = sum(2 * pool + 4 <= first + 1 for pool in range(len(pools)))
        logits = q[:, first : first + tile] @ pools[:seen].mT * 0.5
        expected = logits.softmax(-1).sum((0, 1)) if seen else torch.zeros(0, dtype=torch.float64)
        torch.testing.assert_close(found[number, :seen], expected)
        assert bool((found[number, seen:] == 0).all())


class Products(TorchDispatchMode):
    """The matrix products that are called, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm):
            self.called.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("tile", [1, 5])
def test_all_rows_meet_the_pools_in_one_product(tile: int) -> None:
    """A batched one, of each tile's rows apart, would read the pools anew for each of them."""
    tiling = Tiling(23, 23, 4, tile, causal=True)
    with Products() as products:
        (_,) = pool_shares(X[0], pool_means(X[1, 0], 2, 2), tiling, 2, 2, 0.5, None, 1 << 20)
    assert products.called == ["mm"]


def test_representatives_are_middle_keys_and_the_ragged_end_has_one_too() -> None:
    pyramid = representative_pyramid(X, block_size=4, branching=2, levels=3)
    # Blocks of 4 begin at 0 … 20; nodes of 8 at 0, 8, 16; nodes of 16 at 0, 16. The last node of 16 has keys 16 to 22.
    middles = [2, 6, 10, 14, 18, 22, 4, 12, 20, 8, 22]
    assert torch.equal(pyramid.nodes, X[..., middles, :])
    assert pyramid.offsets == (0, 6, 9, 11)
    assert pyramid.keys.tolist() == [4, 4, 4, 4, 4, 3, 8, 8, 7, 16, 7]
    assert not pyramid.has_bounds
