"""MoBA by fla-core's parallel_moba: it chooses and attends in one call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pyramidbench.cost import Cost, StageCost, attention_cost
from pyramidbench.method import BlockMethod, Positive
from pyramidbench.problem import Problem
from pyramidbench.selection import BlockSelection, ranked_count, top_blocks
from pyramidbench.upstream import importing
from pyramidbench.upstream.layout import Packed, rescaled
from pyramidbench.upstream.limits import causal_limit, device_limit, dtype_limit, head_dim_limit, square_limit

WHAT = "fla-core's parallel_moba"
MODULE = "fla.ops.moba.parallel"
INSTALL = "pip install 'pyramidbench[nsa,flash]'"
CHUNK_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class FlaMoba(BlockMethod):
    """Keeps the query's own block and the K blocks before it whose mean key gives the highest logit, for each query head.

    The call chooses and attends in one; the lists that the row's quality columns are about are computed beside it by the same
    rule, and are in no timing. Key/value heads that a group shares are repeated for it: it knows none.
    Cost: 2·D·H·M·n₁ for the logits of means, and the attention, 4·D·H·M·(K + 1)·C.
    K counts the blocks besides the own one, which is the only forced one. In a sweep `--top-k` sets it higher by the other
    blocks that the other methods force, so that all attend to as many keys per query.
    Differs from the paper: upstream's `topk` counts the own block too; `forced_in_budget` restores that count.
    """

    source: ClassVar[str] = "MoBA, arXiv 2502.13189; fla-core 0.6, fla.ops.moba"
    granularity: ClassVar[str] = "1 × any"
    selection_cost: ClassVar[str] = "O(N²/C)"
    chooses_inside: ClassVar[bool] = True

    query_tile: Positive = 1

    def unavailable(self) -> str | None:
        needed = importing.gap(WHAT, (MODULE,), "parallel_moba", INSTALL)
        return needed or importing.gap(
            f"{WHAT} needs flash-attn, which", ("flash_attn",), "flash_attn_varlen_func", INSTALL
        )

    def unsupported(self, problem: Problem) -> str | None:
        reason = device_limit(WHAT, problem) or dtype_limit(WHAT, problem) or causal_limit(WHAT, problem)
        reason = reason or square_limit(WHAT, problem) or head_dim_limit(WHAT, problem, 256)
        if reason is not None:
            return reason
        if self.query_tile != 1:
            return f"{WHAT} chooses for every token, not for tiles of {self.query_tile}; give --query-tile 1"
        if (self.sinks(problem), self.locals(problem)) != (0, 1):
            return f"{WHAT} forces the own block alone; leave sink_blocks and local_blocks out"
        if self._topk() < 2:
            return f"{WHAT} becomes dense attention where no block is kept besides the own one; give a higher --top-k"
        return None

    def sinks(self, problem: Problem) -> int:  # noqa: ARG002 - part of the contract
        return self.sink_blocks or 0

    def locals(self, problem: Problem) -> int:  # noqa: ARG002 - part of the contract
        return self.local_blocks or 1

    def own_top_k(self, shared: int, problem: Problem) -> int:
        return shared + self._forced_besides(problem)

    def shared_top_k(self, problem: Problem) -> int:
        return max(0, self.top_k - self._forced_besides(problem))

    def _forced_besides(self, problem: Problem) -> int:
        """Blocks that the last query has by force in other methods, and here by rank (or within K)."""
        forced = int(self.shared_forced(torch.tensor([self.tiling(problem).tiles - 1]), problem))
        return forced if self.forced_in_budget else forced - 1

    def _topk(self) -> int:
        """K as upstream counts it, the own block included."""
        return self.top_k if self.forced_in_budget else self.top_k + 1

    def budget_set(self) -> str:
        return f"topk={self._topk()}"

    def backend(self, problem: Problem) -> str:  # noqa: ARG002 - part of the contract
        return "fla-moba"

    def select(self, q: Tensor, k: Tensor, problem: Problem) -> BlockSelection:
        lists = list(self._best(q, k, problem))
        width = max(part.shape[-1] for part in lists)
        padded = [torch.nn.functional.pad(part, (0, width - part.shape[-1]), value=-1) for part in lists]
        return BlockSelection.from_indices(torch.cat(padded, dim=2), self.tiling(problem))

    def _best(self, q: Tensor, k: Tensor, problem: Problem) -> Iterator[Tensor]:
        """The lists of some tokens at a time, from means that are rounded as upstream rounds them."""
        tiling = self.tiling(problem)
        means = torch.stack([part.mean(2) for part in k.split(self.block_size, dim=2)], dim=2).float()
        means = means.repeat_interleave(problem.group, 1)
        step = max(1, CHUNK_ELEMENTS // (problem.batch * problem.heads * tiling.blocks))
        for start in range(0, tiling.tiles, step):
            tile = torch.arange(start, min(start + step, tiling.tiles), device=q.device)
            forced = tiling.forced(tile, 0, 1)
            keep = ranked_count(self.top_k, forced, self.forced_in_budget)
            yield top_blocks(q[:, :, tile].float() @ means.mT, tile, tiling, forced, keep)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, selection: BlockSelection | None, problem: Problem) -> Tensor:  # noqa: ARG002 - it chooses by itself
        call = importing.function((MODULE,), "parallel_moba")
        keys, values = (x.repeat_interleave(problem.group, 1) for x in (k, v))
        packed = Packed.of(rescaled(q, problem), keys, values)
        output: Tensor = call(
            packed.q[None],
            packed.k[None],
            packed.v[None],
            packed.starts_q,
            problem.seq_len_q,
            self.block_size,
            self._topk(),
        )
        return Packed.unpacked(output[0], problem)

    def cost(self, problem: Problem) -> Cost:
        planned, blocks = self.planned(problem), self.tiling(problem).blocks
        logits = float(problem.batch * problem.heads * problem.seq_len_q * blocks)
        route = StageCost("route", 2 * problem.head_dim * logits, 8 * logits)
        attend = attention_cost(problem, planned.pairs, planned.listed, self.block_size)
        gathered = planned.listed * problem.batch * problem.heads * problem.head_dim * problem.itemsize
        return Cost((route, attend), 9 * logits + 4.0 * gathered)
