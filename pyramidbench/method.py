"""Method: what the author of an attention method writes, once, in one file. Its fields are its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from pyramidbench.cost import Cost, PlannedBlocks, StageCost, append_cost, attention_cost, planned_blocks
from pyramidbench.decoder import CacheLayout, Decoder, RepeatingDecoder
from pyramidbench.problem import Problem
from pyramidbench.selection import BlockSelection, frozen, ranked_count, top_blocks
from pyramidbench.tiling import Tiling

Kind = Literal["dense", "selection", "bound"]
NonNegative = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]


@dataclass(frozen=True)
class Method:
    """One way to compute attention. Subclass it as a frozen dataclass in a file named after the method.

    `kind` is "dense", "selection" (chooses blocks) or "bound" (an oracle or a floor: not a rival that one would deploy).
    `presets` maps a preset's name to the fields that it sets. `granularity` is how many queries share a set, and how many
    keys a block of it has: "any × any", "1 × any", "128 × 128". `selection_cost` is how the cost of choosing grows, such as
    "O(N²/C)"; left empty, it is read off `cost` (`pyramidbench.facts`). The subclass's docstring says what the method keeps
    and why, its source, its cost, and where it differs from the source.
    """

    name: ClassVar[str] = ""
    kind: ClassVar[Kind] = "selection"
    source: ClassVar[str] = ""
    granularity: ClassVar[str] = ""
    selection_cost: ClassVar[str] = ""
    chooses_inside: ClassVar[bool] = False
    """Whether `attend` chooses by itself, in one call that cannot be taken apart: `select` then only tells what it chooses."""
    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {}

    def unavailable(self) -> str | None:
        """Why this method cannot run on this machine (a missing package or device), or None."""
        return None

    def unsupported(self, problem: Problem) -> str | None:  # noqa: ARG002 - part of the contract
        """Why this method cannot do this problem, or None."""
        return None

    def backend(self, problem: Problem) -> str:
        """The implementation that runs for this problem, as the result's `backend` column shows it."""
        raise NotImplementedError

    def select(self, q: Tensor, k: Tensor, problem: Problem) -> BlockSelection | None:
        """The blocks that each query tile keeps; None when the method attends to everything."""
        raise NotImplementedError

    def attend(self, q: Tensor, k: Tensor, v: Tensor, selection: BlockSelection | None, problem: Problem) -> Tensor:
        """Attention over the selection: [B, H, M, Dv] in q's dtype."""
        raise NotImplementedError

    def cost(self, problem: Problem) -> Cost:
        """Predicted operations and bytes of one forward call, stage by stage."""
        raise NotImplementedError

    def decoder(self, problem: Problem, layout: CacheLayout) -> Decoder:
        """What holds the problem's seq_len_kv tokens while they arrive, and attends for the newest ones.

        By default it keeps keys and values and calls `select` and `attend` on all of them at every step. A method that can
        keep summaries between steps brings its own, with `step_cost` and `step_backend`.
        """
        return RepeatingDecoder(self, problem, layout)

    def cache_bytes(self, problem: Problem) -> float:
        """Bytes that its decoder holds for the problem's seq_len_kv tokens: keys, values, and what it keeps besides."""
        tokens = float(problem.batch * problem.kv_heads * problem.seq_len_kv)
        return tokens * (problem.head_dim + problem.head_dim_v) * problem.itemsize

    def step_cost(self, problem: Problem) -> Cost:
        """Predicted operations and bytes of one decoding step, the append among its stages."""
        cost = self.cost(problem)
        return Cost((append_cost(problem), *cost.stages), cost.workspace_bytes)

    def step_backend(self, problem: Problem) -> str:
        """The implementation that runs a decoding step."""
        return self.backend(problem)

    def alternatives(self, problem: Problem) -> tuple[Method, ...]:  # noqa: ARG002 - part of the contract
        """Methods that compute the same, the fastest of which a sweep runs in place of this one; most have none."""
        return ()

    def expected(
        self,
        q: Tensor,  # noqa: ARG002 - part of the contract
        k: Tensor,  # noqa: ARG002
        v: Tensor,  # noqa: ARG002
        selection: BlockSelection | None,  # noqa: ARG002
        problem: Problem,  # noqa: ARG002
        tiles: Tensor,  # noqa: ARG002
        dtype: torch.dtype,  # noqa: ARG002
    ) -> Tensor | None:
        """What some tiles' output should be, [B, H, T, query_tile, Dv], computed by plain torch in `dtype`, where `attend`
        is no softmax over the listed blocks; None, the default, where it is one, which the gate knows by itself."""
        return None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Tensor:
        """The whole call, end to end: choose, then attend. The choice is a constant to gradients."""
        if self.chooses_inside:
            return self.attend(q, k, v, None, problem)
        with frozen(q.device):
            selection = self.select(q, k, problem)
        return self.attend(q, k, v, selection, problem)


@dataclass(frozen=True)
class BlockMethod(Method):
    """A method that keeps K blocks of keys per query tile by rank, besides blocks that are always kept.

    Fields (the budget that all block methods share, so that they can be compared at an equal one):
        top_k: blocks kept by rank; the forced ones come on top unless `forced_in_budget`.
        block_size: keys in a block. query_tile: consecutive queries that share one set (1: every token has its own).
        sink_blocks: first blocks, always kept. local_blocks: last blocks up to the query's own, always kept; the own
            one is always among them. Without causality there are no local blocks, and no sinks either by default (None).
        implementation: "triton" (an error where its kernels cannot run), "reference" (torch), or "auto": triton where it
            can. The row's `backend` says which ran.
    """

    granularity: ClassVar[str] = "any × any"

    top_k: NonNegative = 16
    block_size: Positive = 64
    query_tile: Positive = 64
    sink_blocks: NonNegative | None = None
    local_blocks: Positive | None = None
    forced_in_budget: bool = False
    implementation: Literal["auto", "triton", "reference"] = "auto"

    def unsupported(self, problem: Problem) -> str | None:
        if not problem.causal and self.local_blocks is not None:
            return "local_blocks needs causal attention: without it no block is 'the last one up to the query'"
        return None

    def tiling(self, problem: Problem) -> Tiling:
        return Tiling(problem.seq_len_q, problem.seq_len_kv, self.block_size, self.query_tile, problem.causal)

    def sinks(self, problem: Problem) -> int:
        """Sink blocks in force: as given, or 1 when causal and 0 when not."""
        return self.sink_blocks if self.sink_blocks is not None else int(problem.causal)

    def locals(self, problem: Problem) -> int:
        """Local blocks in force: as given, or 2 when causal and 0 when not."""
        return self.local_blocks if self.local_blocks is not None else 2 * int(problem.causal)

    def walked_levels(self, problem: Problem) -> int:  # noqa: ARG002 - depends on the problem in a hierarchy
        """Levels of the search, the block level included: 1 for a single pass or none."""
        return 1

    def own_top_k(self, shared: int, problem: Problem) -> int:  # noqa: ARG002 - differs where a rule counts otherwise
        """This method's `top_k` for a budget of `shared` ranked blocks beside the sink and local blocks that all keep."""
        return shared

    def shared_top_k(self, problem: Problem) -> int:  # noqa: ARG002
        """The budget that `top_k` comes to in the terms that all methods share: the inverse of `own_top_k`."""
        return self.top_k

    def shared_forced(self, tile: Tensor, problem: Problem) -> Tensor:
        """Blocks that these tiles keep whatever their score under the budget that all methods share, int64 as `tile`."""
        shared = BlockMethod()
        return self.tiling(problem).forced(tile, shared.sinks(problem), shared.locals(problem)).count()

    @property
    def adaptive(self) -> bool:
        """Whether each tile keeps as many blocks as it needs (Top-p) and `top_k` has no part in it."""
        return False

    def planned(self, problem: Problem) -> PlannedBlocks:
        """Blocks and pairs that the budget comes to, per head; of an adaptive method, the most that it may keep."""
        tiling = self.tiling(problem)
        top_k = tiling.blocks if self.adaptive else self.top_k
        in_budget = self.forced_in_budget and not self.adaptive
        return planned_blocks(tiling, top_k, self.sinks(problem), self.locals(problem), in_budget)

    def keep_best(self, scores: Tensor, problem: Problem) -> BlockSelection:
        """The forced blocks of each tile and the K others with the highest scores.

        scores: [B, sets, tiles, blocks], or 1 in place of tiles where all have the same; sets are the key/value heads, or the
        query heads. Blocks that a tile does not see whole are never ranked.
        """
        tiling = self.tiling(problem)
        tile = torch.arange(tiling.tiles, device=scores.device)
        forced = tiling.forced(tile, self.sinks(problem), self.locals(problem))
        keep = ranked_count(self.top_k, forced, self.forced_in_budget)
        lists = top_blocks(scores.expand(-1, -1, tiling.tiles, -1), tile, tiling, forced, keep)
        return BlockSelection.from_indices(lists, tiling)

    def backend(self, problem: Problem) -> str:  # noqa: ARG002 - part of the contract
        return "torch"

    def cost(self, problem: Problem) -> Cost:
        return self.attention_and(problem)

    def attention_and(self, problem: Problem, *choosing: StageCost) -> Cost:
        """The cost of attention over the planned blocks, behind that of what chooses them."""
        planned = self.planned(problem)
        return Cost((*choosing, attention_cost(problem, planned.pairs, planned.listed, self.block_size)))

    def budget_set(self) -> str | None:
        """What a budget came to in the method's own parameter, such as "top_k=8"; None where it has none of it."""
        return None if self.adaptive else f"top_k={self.top_k}"
