"""HISA: two levels, coarse to fine. A mean per group of blocks decides where the exact scores look."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from pyramidbench.kernels.attending import CachedWalkMethod
from pyramidbench.kernels.walk_rules import WalkRules
from pyramidbench.problem import Problem


@dataclass(frozen=True)
class Hisa(CachedWalkMethod):
    """Keeps the K best of the blocks in the `beam`·K best groups: groups by their mean key, blocks by their exact log-mass.

    Parameters besides the budget: branching (blocks in a group) and beam; branching·beam is how many times K reaches the
    exact scores, 4 as in the source. Cost: 2·D·H·M·n₁/(2·branching) for the groups, 2·D·H·M·branching·beam·K·C for the
    blocks, attention 4·D·H·M·(K + forced)·C.
    Differs from the source: it picks single tokens, and scores with the trained indexer of DeepSeek Sparse Attention, which
    all heads share; here blocks are ranked by LogSumExp of the model's own logits, added over a group's heads. It keeps
    the first and last groups as candidates; here the sink and local blocks are kept on top of K.
    """

    source: ClassVar[str] = "HISA, arXiv 2603.28458, section 3"

    branching: Annotated[int, Field(ge=2)] = 4
    beam: Annotated[float, Field(ge=1)] = 1.0
    head_reduce: Literal["sum_lse", "none"] = "sum_lse"

    def walked_levels(self, problem: Problem) -> int:
        return min(2, self.tiling(problem).blocks)

    def rules(self, problem: Problem) -> WalkRules:
        return WalkRules(
            top_k=self.top_k,
            sink_blocks=self.sinks(problem),
            local_blocks=self.locals(problem),
            forced_in_budget=self.forced_in_budget,
            branching=self.branching,
            levels=2,
            beam=self.beam,
            bound_weight=0.0,
            leaf_candidates=None,
            head_reduce=self.head_reduce,
        )
