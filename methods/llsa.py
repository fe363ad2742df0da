"""LLSA: log-linear sparse attention by its authors' kernels, which choose and attend in one call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from pyramidbench.cost import Cost, StageCost, attention_cost
from pyramidbench.method import BlockMethod, NonNegative, Positive
from pyramidbench.problem import Problem
from pyramidbench.selection import BlockSelection
from pyramidbench.upstream import importing
from pyramidbench.upstream.layout import rescaled
from pyramidbench.upstream.limits import device_limit, dtype_limit, full_limit, head_dim_limit, square_limit

WHAT = "LLSA"
MODULES = {
    1: ("llsa.kernel.torch_op.flash_sparse_attention_res_1", "llsa_l1"),
    2: ("llsa.kernel.torch_op.flash_sparse_attention_res_2", "llsa_l2"),
}
INSTALL = "no wheel exists: install it from the repository SingleZombie/LLSA (for non-commercial use only)"
BLOCK = 16
POOLED_AT_ONCE = 64
"""Pooled keys that its kernels read at a time; a rest would be left out."""


@dataclass(frozen=True)
class Llsa(BlockMethod):
    """Keeps K blocks of 16 keys for each 16 queries by the logits of means, and all others as their mean key and value.

    Parameters besides the budget: depth, the coarse levels above the keys. 1 ranks all blocks; 2 keeps K nodes of 256 keys
    first and ranks the blocks in them. The output is a softmax over the kept keys and, weighted by how many keys they stand
    for, the means of the levels above: no softmax over blocks alone, so the gate compares it with that.
    Cost: 2·D·H·(M/16)·n₁ for the ranking at depth 1, (M/256)·n₂ + (M/16)·16·K at depth 2; attention 4·D·H·M·(16·K + means).
    Differs from the paper: nothing; it is its authors' code. No causal mask, lengths and K powers of two.
    """

    source: ClassVar[str] = "Log-linear Sparse Attention, arXiv 2512.16615; SingleZombie/LLSA"
    granularity: ClassVar[str] = "16 × 16"
    selection_cost: ClassVar[str] = "O(N²/C²)"
    chooses_inside: ClassVar[bool] = True
    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {"default": {}, "two": {"depth": 2}}

    top_k: NonNegative = 8
    block_size: Positive = BLOCK
    query_tile: Positive = BLOCK
    depth: Literal[1, 2] = 1

    def unavailable(self) -> str | None:
        module, name = MODULES[self.depth]
        return importing.gap(WHAT, (module,), name, INSTALL)

    def unsupported(self, problem: Problem) -> str | None:
        reason = full_limit(WHAT, problem) or device_limit(WHAT, problem) or dtype_limit(WHAT, problem)
        reason = reason or square_limit(WHAT, problem) or head_dim_limit(WHAT, problem, 128, 16)
        if reason is not None:
            return reason
        if problem.needs_gradients:
            return f"the gate has nothing to compare {WHAT}'s gradients with; give --pass forward"
        shortest = POOLED_AT_ONCE * BLOCK**self.depth
        if (self.block_size, self.query_tile) != (BLOCK, BLOCK):
            return f"{WHAT} keeps blocks of {BLOCK} keys for {BLOCK} queries; give --block-size {BLOCK} --query-tile {BLOCK}"
        if problem.seq_len_kv < shortest or not _is_power(problem.seq_len_kv):
            return (
                f"{WHAT} at depth {self.depth} takes powers of two from {shortest} tokens on, not {problem.seq_len_kv}"
            )
        if self.top_k < 4 or not _is_power(self.top_k):
            return f"{WHAT} takes a K of 4 or a higher power of two, not {self.top_k}"
        if self.sink_blocks or self.local_blocks:
            return f"{WHAT} forces no block; leave sink_blocks and local_blocks out"
        return None

    def backend(self, problem: Problem) -> str:  # noqa: ARG002 - part of the contract
        return "llsa"

    def walked_levels(self, problem: Problem) -> int:  # noqa: ARG002 - part of the contract
        return self.depth

    def select(self, q: Tensor, k: Tensor, problem: Problem) -> BlockSelection:
        keys = k.repeat_interleave(problem.group, 1)
        kept = self._kept(_levels(q, self.depth), _levels(keys, self.depth))[0]
        return BlockSelection.from_indices(kept.sort(dim=-1).values, self.tiling(problem))

    def _kept(self, queries: list[Tensor], keys: list[Tensor]) -> list[Tensor]:
        """What is kept of each level above the keys, the finer first: nodes, int64 [B, H, M/16, K] and [B, H, M/256, K]."""
        coarse = (queries[-1] @ keys[-1].mT).topk(min(self.top_k, keys[-1].shape[2]), dim=-1).indices
        if self.depth == 1:
            return [coarse]
        parents = coarse.repeat_interleave(BLOCK, 2)
        children = (parents[..., None] * BLOCK + torch.arange(BLOCK, device=parents.device)).flatten(3)
        logits = torch.einsum("bhmd,bhmcd->bhmc", queries[1].float(), _rows(keys[1], children).float())
        fine = children.gather(-1, logits.topk(self.top_k, dim=-1).indices)
        return [fine, coarse]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, selection: BlockSelection | None, problem: Problem) -> Tensor:  # noqa: ARG002 - it chooses by itself
        call = importing.function((MODULES[self.depth][0],), MODULES[self.depth][1])
        keys, values = (x.repeat_interleave(problem.group, 1).contiguous() for x in (k, v))
        # K once for every level above the keys.
        output: Tensor = call(
            rescaled(q, problem).contiguous(), keys, values, *[self.top_k] * self.depth, block_size=BLOCK
        )
        return output

    def expected(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        selection: BlockSelection | None,  # noqa: ARG002 - it is made anew
        problem: Problem,
        tiles: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        """Some tiles' output by plain torch, the chosen keys and the means of the levels above in one softmax."""
        k, v = (x.repeat_interleave(problem.group, 1) for x in (k, v))
        keys, values = _levels(k, self.depth), _levels(v, self.depth)
        kept = self._kept(_levels(rescaled(q, problem), self.depth), keys)
        tile = torch.arange(BLOCK, device=q.device)
        rows = (q[:, :, tiles[:, None] * BLOCK + tile].to(dtype)) * problem.scale
        parts = [
            *self._seen(kept, tiles),
            torch.arange(keys[-1].shape[2], device=q.device).expand(*q.shape[:2], len(tiles), -1),
        ]
        logits = [rows @ _rows(keys[level], nodes).to(dtype).mT for level, nodes in enumerate(parts)]
        weighted = [
            part + torch.tensor(float(BLOCK**level), dtype=dtype, device=q.device).log()
            for level, part in enumerate(logits)
        ]
        weights = torch.cat(weighted, dim=-1).softmax(-1)
        every = torch.cat([_rows(values[level], nodes) for level, nodes in enumerate(parts)], dim=3)
        return weights @ every.to(dtype)

    def _seen(self, kept: list[Tensor], tiles: Tensor) -> list[Tensor]:
        """The nodes of each level but the last that some tiles attend to: the children of those that they kept above it."""
        found = []
        for level, nodes in enumerate(kept):
            own = nodes[:, :, tiles // BLOCK**level]
            found.append((own[..., None] * BLOCK + torch.arange(BLOCK, device=own.device)).flatten(3))
        return found

    def cost(self, problem: Problem) -> Cost:
        planned, sets = self.planned(problem), problem.batch * problem.heads
        nodes = [problem.seq_len_kv / BLOCK**level for level in range(self.depth + 1)]
        ranked = nodes[self.depth] ** 2 + (self.depth - 1) * nodes[1] * BLOCK * self.top_k
        pooled = 2.0 * sets * problem.seq_len_kv * (2 * problem.head_dim + problem.head_dim_v)
        route = StageCost("route", 2 * problem.head_dim * sets * ranked, 4.0 * sets * ranked)
        attend = attention_cost(problem, planned.pairs, planned.listed, BLOCK)
        return Cost((StageCost("build", pooled, pooled), route, attend), 6.0 * sets * ranked + pooled)


def _levels(tensor: Tensor, depth: int) -> list[Tensor]:
    """[B, H, N, D] and its means over 16, 256, … neighbours, summed one by one in the tensor's dtype as upstream does."""
    levels = [tensor]
    for _ in range(depth):
        parts = levels[-1].unflatten(2, (-1, BLOCK))
        total = torch.zeros_like(parts[:, :, :, 0])
        for index in range(BLOCK):
            total = total + parts[:, :, :, index]
        levels.append(total / BLOCK)
    return levels


def _rows(tensor: Tensor, index: Tensor) -> Tensor:
    """Rows of [B, H, N, D] by an index [B, H, T, S]: [B, H, T, S, D]."""
    flat = index.flatten(2)[..., None].expand(-1, -1, -1, tensor.shape[-1])
    return tensor.gather(2, flat).unflatten(2, index.shape[2:])


def _is_power(count: int) -> bool:
    return count & (count - 1) == 0
