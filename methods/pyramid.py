"""Pyramid Top-K: blocks chosen coarse to fine over a hierarchy of pooled keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from pyramidbench.kernels.attending import CachedWalkMethod
from pyramidbench.kernels.pyramid import walked_levels
from pyramidbench.kernels.walk_rules import WalkRules
from pyramidbench.method import Positive
from pyramidbench.problem import Problem


@dataclass(frozen=True)
class PyramidTopK(CachedWalkMethod):
    """Keeps the K blocks that a coarse-to-fine walk finds: O(log N) levels, a bounded number of scores on each.

    Parameters besides the budget (docs/selection.md defines them): branching, levels ("auto", "full" or a number),
    start_width, beam (nodes kept on inner levels, as a multiple of K), bound_weight (how much of the min/max bound a
    node's summary holds), leaf_candidates (blocks, as a multiple of K, that get the exact score; None: all), node_score,
    leaf_score, sub_blocks, head_reduce, tile_reduce, score_rows.
    Cost: inner levels 4·D·H·M·levels·branching·beam·K (÷ tile/rows when a tile scores fewer rows), exact leaf
    2·D·H·M·leaf_candidates·K·C, attention 4·D·H·M·(K + forced)·C.
    Differs from the paper in the default preset: bounds in the summaries, a pre-filter before the exact block score, a
    beam of 4, and heads joined by probability. Preset `paper` is the paper's walk.
    """

    source: ClassVar[str] = "Block Sparse Attention with Log-Linear Complexity, arXiv 2609.31093"
    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {
        "default": {},
        "paper": {
            "beam": 1,
            "levels": "full",
            "bound_weight": 0,
            "node_score": "children",
            "leaf_candidates": None,
            "head_reduce": "sum_lse",
        },
        "fast": {"query_tile": 128, "score_rows": 16, "beam": 2, "leaf_candidates": 2},
        "fastest": {"query_tile": 128, "tile_reduce": "mean", "leaf_score": "summary", "beam": 2},
    }

    branching: Annotated[int, Field(ge=2)] = 2
    levels: Literal["auto", "full"] | Positive = "auto"
    start_width: Positive = 64
    beam: Annotated[float, Field(ge=1)] = 4.0
    bound_weight: Literal["auto"] | Annotated[float, Field(ge=0, le=1)] = "auto"
    leaf_candidates: Positive | None = 3
    node_score: Literal["summary", "children"] = "summary"
    leaf_score: Literal["exact", "sub", "summary"] = "exact"
    sub_blocks: Positive = 4
    head_reduce: Literal["sum_prob", "sum_lse", "lse", "none"] = "sum_prob"
    tile_reduce: Literal["lse", "mean"] = "lse"
    score_rows: Positive | None = None

    def walked_levels(self, problem: Problem) -> int:
        return walked_levels(self.levels, self.tiling(problem).blocks, self.branching, self.start_width)

    def rules(self, problem: Problem) -> WalkRules:
        return WalkRules(
            top_k=self.top_k,
            sink_blocks=self.sinks(problem),
            local_blocks=self.locals(problem),
            forced_in_budget=self.forced_in_budget,
            branching=self.branching,
            levels=self.levels,
            start_width=self.start_width,
            beam=self.beam,
            bound_weight=self.bound_weight,
            leaf_candidates=self.leaf_candidates,
            node_score=self.node_score,
            leaf_score=self.leaf_score,
            sub_blocks=self.sub_blocks,
            head_reduce=self.head_reduce,
            tile_reduce=self.tile_reduce,
            score_rows=self.score_rows,
        )
