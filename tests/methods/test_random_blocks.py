"""Random blocks: drawn evenly and apart for every tile and set, and another draw with another seed."""

from __future__ import annotations

import torch

from pyramidbench.problem import Problem
from pyramidbench.registry import create
from pyramidbench.selection import BlockSelection

SIZES: dict[str, object] = {"block_size": 2, "query_tile": 2, "top_k": 3, "sink_blocks": 0, "local_blocks": 1}


def drawn(seed: int) -> BlockSelection:
    q = torch.zeros(1, 8, 400, 4)
    selection = create("random_blocks", {**SIZES, "seed": seed}).select(q, q, Problem.of(q, q, causal=True, scale=1.0))
    assert selection is not None
    selection.check()
    return selection


def test_every_block_is_as_likely_as_another() -> None:
    # The last tile of 8 heads under 200 seeds: 1600 draws of 3 of 199 blocks, so 24 times each; a deviation is 4.9.
    counts = sum(drawn(seed).mask()[0, :, -1].sum(0) for seed in range(200))
    assert isinstance(counts, torch.Tensor)
    assert int(counts[-1]) == 1600
    assert int(counts[:-1].sum()) == 4800
    assert int(counts[:-1].min()) > 24 - 5 * 4.9
    assert int(counts[:-1].max()) < 24 + 5 * 4.9


def test_tiles_sets_and_seeds_draw_apart() -> None:
    one, same, other = (drawn(seed).indices for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert not torch.equal(one[:, 0], one[:, 1])
    assert not torch.equal(one[0, 0, -1, :-1], one[0, 0, -2, :-1])
