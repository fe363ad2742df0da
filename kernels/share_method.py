"""A rule that estimates the share of a tile's attention that each block gets, and keeps the best by Top-p or Top-K."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from pyramidbench.kernels.attending import TorchMethod
from pyramidbench.kernels.top_p import top_p_blocks
from pyramidbench.problem import Problem
from pyramidbench.selection import ranked_count, top_blocks

Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True)
class Shares:
    """Estimates for T tiles: `values` [B, H, T, blocks], 0 where nothing is known. always: bool of that shape, or None."""

    values: Tensor
    always: Tensor | None = None


@dataclass(frozen=True)
class ShareMethod(TorchMethod):
    """Keeps the blocks whose shares reach `top_p` of a tile's attention, whatever K is; with top_p None, the K best.

    Shares may look no further than the keys that the tile's first query sees. head_reduce: "none", a set for each query
    head; "sum_prob", the shares of a group's heads added, which then share a set.
    """

    top_p: Share | None = 0.9
    head_reduce: Literal["none", "sum_prob"] = "none"

    @property
    def adaptive(self) -> bool:
        return self.top_p is not None

    def shares(self, q: Tensor, summary: Tensor, tile: Tensor, problem: Problem) -> Shares:
        """The shares of some tiles (int64 [T])."""
        raise NotImplementedError

    def elements_per_tile(self, problem: Problem) -> float:
        """Numbers that `shares` holds for one tile."""
        raise NotImplementedError

    def choose(self, q: Tensor, k: Tensor, summary: Tensor, problem: Problem) -> Iterator[Tensor]:  # noqa: ARG002
        tiling = self.tiling(problem)
        for tile in self.tile_parts(problem, self.elements_per_tile(problem), q.device):
            found = self.shares(q, summary, tile, problem)
            values, always = found.values, found.always
            if self.head_reduce == "sum_prob":
                groups = (problem.kv_heads, problem.group)
                values = values.unflatten(1, groups).sum(2)
                always = None if always is None else always.unflatten(1, groups).any(2)
            forced = tiling.forced(tile, self.sinks(problem), self.locals(problem))
            if self.top_p is not None:
                yield top_p_blocks(values, tile, tiling, forced, self.top_p, always)
                continue
            if always is not None:
                values = values.masked_fill(always, torch.inf)
            yield top_blocks(values, tile, tiling, forced, ranked_count(self.top_k, forced, self.forced_in_budget))
