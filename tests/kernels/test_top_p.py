"""Top-p over blocks against trying out every count."""

from __future__ import annotations

import pytest
import torch

from pyramidbench.kernels.top_p import top_p_blocks
from pyramidbench.tiling import Tiling

TILING = Tiling(48, 48, 4, 4, causal=True)
TILES = torch.arange(TILING.tiles)


def brute_force(shares: list[float], eligible: set[int], forced: set[int], top_p: float) -> set[int]:
    """Blocks by falling share, one after another, until they and the forced ones reach p of everything."""
    kept = set(forced)
    for block in sorted(eligible, key=lambda j: (-shares[j], j)):
        if sum(shares[j] for j in kept) >= top_p * sum(shares):
            break
        kept.add(block)
    return kept


@pytest.mark.parametrize("top_p", [0.0, 0.2, 0.5, 0.9, 0.99])
@pytest.mark.parametrize(("sinks", "local"), [(0, 1), (1, 2), (2, 4)])
def test_the_fewest_blocks_that_reach_p(top_p: float, sinks: int, local: int) -> None:
    generator = torch.Generator().manual_seed(0)
    shares = torch.rand(3, TILING.tiles, TILING.blocks, generator=generator, dtype=torch.float64) ** 4
    shares = shares.tril(-1)
    forced = TILING.forced(TILES, sinks, local)
    lists = top_p_blocks(shares, TILES, TILING, forced, top_p)
    for head in range(3):
        for tile in range(TILING.tiles):
            always = {block for block in range(tile + 1) if block < sinks or block > tile - local}
            expected = brute_force(shares[head, tile].tolist(), set(range(tile)) - always, always, top_p)
            assert [block for block in lists[head, tile].tolist() if block >= 0] == sorted(expected)


def test_p_1_keeps_blocks_without_any_share_and_equal_ones_go_by_number() -> None:
    forced = TILING.forced(TILES, 0, 1)
    shares = torch.zeros(1, TILING.tiles, TILING.blocks)
    assert top_p_blocks(shares, TILES, TILING, forced, 1.0)[0, 3].tolist() == [0, 1, 2, 3, *[-1] * 8]
    assert top_p_blocks(shares, TILES, TILING, forced, 0.9)[0, 3].tolist() == [3]
    assert top_p_blocks(shares + 1, TILES, TILING, forced, 2 / 12)[0, 5].tolist()[:2] == [0, 5]


def test_what_is_always_kept_comes_besides_and_may_not_lie_ahead() -> None:
    forced = TILING.forced(TILES, 0, 1)
    shares = torch.zeros(1, TILING.tiles, TILING.blocks)
    shares[..., 0] = 1.0
    always = torch.zeros_like(shares, dtype=torch.bool)
    always[..., 2] = True
    lists = top_p_blocks(shares, TILES, TILING, forced, 0.5, always)
    assert [[x for x in row if x >= 0] for row in lists[0, :4].tolist()] == [[0], [0, 1], [0, 2], [0, 2, 3]]
