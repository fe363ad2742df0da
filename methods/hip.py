"""HiP: a search that halves its nodes stage by stage, with one key of each node to speak for all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import Tensor

from pyramidbench.cost import Cost, StageCost
from pyramidbench.kernels.attending import WalkMethod
from pyramidbench.kernels.pyramid import Pyramid, walked_levels
from pyramidbench.kernels.representatives import representative_pyramid
from pyramidbench.kernels.walk_cost import nodes_in
from pyramidbench.kernels.walk_rules import WalkRules
from pyramidbench.problem import Problem


@dataclass(frozen=True)
class Hip(WalkMethod):
    """Keeps the K blocks that a multi-stage search finds, which judges a node by its middle key alone.

    It starts with at most 2·K nodes, keeps the best K, halves each, and so on down to the blocks; keys near each other
    have similar logits, so that one may stand for its neighbours. Parameters besides the budget: branching (children of a
    node). Cost: 2·D·H·M·stages·branching·K, attention 4·D·H·M·(K + forced)·C.
    Differs from the source: it ends at blocks of 64 where HiP goes on to a few tokens, ranked there by the middle key too;
    nodes are aligned to powers of two of a block where HiP splits each query's own past evenly; a tile's rows are joined by
    LogSumExp where HiP takes the maximum of sampled rows. InfiniteHiP picks its representatives per query; this does not.
    Written from the papers' mathematics: HiP's code is not free software.
    """

    source: ClassVar[str] = "HiP, arXiv 2406.09827, section 3.1; InfiniteHiP, arXiv 2502.08910, section 4"

    branching: Annotated[int, Field(ge=2)] = 2
    head_reduce: Literal["none", "sum_lse"] = "none"

    def walked_levels(self, problem: Problem) -> int:
        rules = self.rules(problem)
        return walked_levels(rules.levels, self.tiling(problem).blocks, rules.branching, rules.start_width)

    def rules(self, problem: Problem) -> WalkRules:
        return WalkRules(
            top_k=self.top_k,
            sink_blocks=self.sinks(problem),
            local_blocks=self.locals(problem),
            forced_in_budget=self.forced_in_budget,
            branching=self.branching,
            start_width=max(1, 2 * self.top_k),
            beam=1.0,
            bound_weight=0.0,
            leaf_candidates=None,
            leaf_score="summary",
            head_reduce=self.head_reduce,
        )

    def build(self, k: Tensor, problem: Problem) -> Pyramid:
        return representative_pyramid(
            k, block_size=self.block_size, branching=self.branching, levels=self.walked_levels(problem)
        )

    def cost(self, problem: Problem) -> Cost:
        walked = super().cost(problem)
        nodes = nodes_in(self.tiling(problem).blocks, self.branching, self.walked_levels(problem))
        read = 2.0 * problem.batch * problem.kv_heads * nodes * problem.head_dim * problem.itemsize
        return replace(walked, stages=(StageCost("build", 0.0, read), *walked.stages[1:]))
