"""What the hand-computed examples share: a method's lists as plain Python."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pyramidbench.method import BlockMethod
from pyramidbench.problem import Problem
from pyramidbench.registry import create

Rows = list[list[float]]
Kept = Callable[..., list[list[list[int]]]]


@pytest.fixture(scope="session")
def kept() -> Kept:
    """Blocks by set and tile that a method keeps of heads of queries and of keys, each a list of rows.

    Logits are not scaled. Without other wishes only the blocks that a tile overlaps are forced.
    """

    def choose(spec: str, queries: list[Rows], keys: list[Rows], **parameters: object) -> list[list[list[int]]]:
        method = create(spec, {"sink_blocks": 0, "local_blocks": 1, **parameters})
        assert isinstance(method, BlockMethod)
        q, k = (torch.tensor(heads, dtype=torch.float64)[None] for heads in (queries, keys))
        selection = method.select(q, k, Problem.of(q, k, causal=True, scale=1.0))
        assert selection is not None
        selection.check()
        return [[[block for block in row if block >= 0] for row in tiles] for tiles in selection.indices[0].tolist()]

    return choose
