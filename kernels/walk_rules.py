"""What a walk is told: how many blocks, which levels, and how nodes and blocks are scored. Plain values, for every backend."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class WalkRules:
    """Parameters of the walk; docs/selection.md defines each."""

    top_k: int
    sink_blocks: int
    local_blocks: int
    forced_in_budget: bool = False
    branching: int = 2
    levels: int | Literal["auto", "full"] = "auto"
    start_width: int = 64
    beam: float = 4.0
    bound_weight: float | Literal["auto"] = "auto"
    leaf_candidates: int | None = 3
    node_score: Literal["summary", "children"] = "summary"
    leaf_score: Literal["exact", "sub", "summary"] = "exact"
    sub_blocks: int = 4
    head_reduce: Literal["sum_prob", "sum_lse", "lse", "none"] = "sum_prob"
    tile_reduce: Literal["lse", "mean"] = "lse"
    score_rows: int | None = None

    def bounds(self, head_dim: int) -> float:
        """α in force: as given, or min(1, 4/√D), since the slack of a bound grows with D."""
        return min(1.0, 4.0 / math.sqrt(head_dim)) if self.bound_weight == "auto" else float(self.bound_weight)

    def needs_summaries(self, levels: int) -> bool:
        """Whether any node's summary is ever read."""
        return levels > 1 or self.leaf_score == "summary" or self.leaf_candidates is not None

    def inner_width(self) -> int:
        """Nodes kept on a level above the blocks."""
        return math.ceil(self.beam * self.top_k)
