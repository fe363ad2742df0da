"""Quest: blocks ranked by an upper bound of their logits, from the elementwise minimum and maximum of their keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from pyramidbench.kernels.attending import CachedWalkMethod
from pyramidbench.kernels.walk_rules import WalkRules
from pyramidbench.problem import Problem


@dataclass(frozen=True)
class Quest(CachedWalkMethod):
    """Keeps the K pages whose bound Σ_d max(q_d·min_d, q_d·max_d) is highest: no key of a page has a higher logit than that.

    For decoding (one query) and for prefill; every query head has its own pages, as in the source, unless head_reduce is
    "sum_lse". Cost: minima and maxima, 4·D·H·M·n₁/2 for the bounds, attention 4·D·H·M·(K + forced)·C.
    Differs from the source: pages of 64 by default where it has 16 (preset `paper`); sink and local pages come on top of K,
    and the first two layers are not left dense. It only decodes; a tile of queries ranks by the LogSumExp of their bounds.
    """

    source: ClassVar[str] = "Quest, arXiv 2406.10774, section 3.3"
    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {
        "default": {},
        "paper": {"block_size": 16, "query_tile": 1},
    }

    head_reduce: Literal["none", "sum_lse"] = "none"

    def rules(self, problem: Problem) -> WalkRules:
        return WalkRules(
            top_k=self.top_k,
            sink_blocks=self.sinks(problem),
            local_blocks=self.locals(problem),
            forced_in_budget=self.forced_in_budget,
            levels=1,
            bound_weight=1.0,
            leaf_candidates=None,
            leaf_score="summary",
            head_reduce=self.head_reduce,
        )
