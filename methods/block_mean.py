"""Mean query × mean key: the cheapest block score there is, one dot product per tile and block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from pyramidbench.kernels.attending import CachedWalkMethod
from pyramidbench.kernels.walk_rules import WalkRules
from pyramidbench.problem import Problem


@dataclass(frozen=True)
class BlockMean(CachedWalkMethod):
    """Keeps the K blocks whose mean key suits the tile's mean query best (MInference's block-sparse head, VSA's coarse stage).

    Every query head has its own set, as in the sources; head_reduce "sum_lse" adds the logits of a group, which then shares
    one. Cost: means of queries and keys, 2·D·H·(M/tile)·n₁/2 for the logits, attention 4·D·H·M·(K + forced)·C.
    Differs from the sources: sink and local blocks come on top of K, where MInference ranks the tile's own block like the
    others (in its paper after a softmax, which keeps the order) and forces none. VSA is not causal, pools cubes of a video,
    trains, and adds a coarse attention to the output.
    """

    source: ClassVar[str] = "MInference block-sparse, arXiv 2407.02490, section 3.2; VSA, arXiv 2505.13389"

    head_reduce: Literal["none", "sum_lse"] = "none"

    def rules(self, problem: Problem) -> WalkRules:
        return WalkRules(
            top_k=self.top_k,
            sink_blocks=self.sinks(problem),
            local_blocks=self.locals(problem),
            forced_in_budget=self.forced_in_budget,
            levels=1,
            bound_weight=0.0,
            leaf_candidates=None,
            leaf_score="summary",
            head_reduce=self.head_reduce,
            tile_reduce="mean",
        )
