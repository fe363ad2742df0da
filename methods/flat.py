"""Flat Top-K: every block is scored in a single pass. The pyramid's rival."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from pyramidbench.kernels.attending import CachedWalkMethod
from pyramidbench.kernels.walk_rules import WalkRules
from pyramidbench.method import Positive
from pyramidbench.problem import Problem


@dataclass(frozen=True)
class FlatTopK(CachedWalkMethod):
    """Keeps the K best of all blocks, scoring each block for each query tile: O(N²/C) at token level.

    Parameters besides the budget: score ("mean": the logit of the block's mean key; "sub": LogSumExp over the means of
    `sub_blocks` parts, for every row of the tile, where `subblock` takes means of rows too; "exact": the true log-mass),
    bound_weight (mixes the min/max bound into "mean" and into the pre-filter), candidates (blocks, as a multiple of K, that
    the mean lets through to a "sub" or "exact" score; None: all), head_reduce, tile_reduce, score_rows as in `pyramid`.
    Presets: default and `exact` as published baselines use them; `bounds` and `filtered` get every improvement that the
    pyramid has, so that the pyramid is not compared with a straw man.
    Cost: 2·D·H·M·n₁/2 for means (C times that for exact scores), attention as in `pyramid`.
    Differs from the source: forced sink and local blocks come on top of K, so that all methods here share one budget; a
    group's heads and a tile's rows share a set, by sums of LogSumExps (`moba` chooses by query and head, as the source does).
    """

    source: ClassVar[str] = "MoBA, arXiv 2502.13189 (mean keys per block)"
    selection_cost: ClassVar[str] = "O(N²/C)"
    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {
        "default": {},
        "exact": {"score": "exact"},
        "sub": {"score": "sub"},
        "bounds": {"bound_weight": "auto"},
        "filtered": {"score": "exact", "bound_weight": "auto", "candidates": 3, "head_reduce": "sum_prob"},
    }

    score: Literal["mean", "sub", "exact"] = "mean"
    bound_weight: Literal["auto"] | Annotated[float, Field(ge=0, le=1)] = 0
    candidates: Positive | None = None
    sub_blocks: Positive = 4
    head_reduce: Literal["sum_prob", "sum_lse", "lse", "none"] = "sum_lse"
    tile_reduce: Literal["lse", "mean"] = "lse"
    score_rows: Positive | None = None

    def rules(self, problem: Problem) -> WalkRules:
        """Flat selection is a walk that starts at the blocks."""
        return WalkRules(
            top_k=self.top_k,
            sink_blocks=self.sinks(problem),
            local_blocks=self.locals(problem),
            forced_in_budget=self.forced_in_budget,
            levels=1,
            bound_weight=self.bound_weight,
            leaf_candidates=self.candidates,
            leaf_score="summary" if self.score == "mean" else self.score,
            sub_blocks=self.sub_blocks,
            head_reduce=self.head_reduce,
            tile_reduce=self.tile_reduce,
            score_rows=self.score_rows,
        )
