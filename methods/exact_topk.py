"""Exact Top-K: the oracle as a method. The most attention that K blocks can hold, at a dense price."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pyramidbench.cost import Cost, StageCost, attention_cost
from pyramidbench.kernels import backends
from pyramidbench.method import BlockMethod, Kind
from pyramidbench.oracle import CHUNK_ELEMENTS, MASS_ELEMENTS
from pyramidbench.problem import Problem
from pyramidbench.selection import BlockSelection, ranked_count, top_blocks
from pyramidbench.stages import stage

CHUNKS = {"reference": CHUNK_ELEMENTS, "triton": MASS_ELEMENTS}
"""Elements of mass that are held at a time."""
PASSES = {"reference": 1, "triton": 2}
"""How often the logits are formed."""


@dataclass(frozen=True)
class ExactTopK(BlockMethod):
    """Keeps the K blocks that hold the most attention, averaged over a group's heads and a tile's rows.

    No selection of the same budget keeps more mass, by construction: it is the ceiling of every mass column, and has
    recall 1. Cost: 2·D·H·P operations for P visible pairs, which is half of dense attention (twice that in the kernel,
    which forms the logits twice), and the attention.
    As the benchmark's judge, where its kernel runs: `fast_mass` (see pyramidbench.oracle.MassSource).
    """

    kind: ClassVar[Kind] = "bound"
    source: ClassVar[str] = "the definition of block mass in docs/selection.md"

    def unsupported(self, problem: Problem) -> str | None:
        gap = backends.mass_gap(problem, self.tiling(problem)) or backends.attention_gap(problem, self.block_size)
        return super().unsupported(problem) or (gap if self.implementation == "triton" else None)

    def backend(self, problem: Problem) -> str:
        return backends.shown(self._mass_backend(problem), self._attend_backend(problem))

    def _mass_backend(self, problem: Problem) -> backends.Backend:
        return backends.chosen(self.implementation, backends.mass_gap(problem, self.tiling(problem)))

    def _attend_backend(self, problem: Problem) -> backends.Backend:
        return backends.chosen(self.implementation, backends.attention_gap(problem, self.block_size))

    def select(self, q: Tensor, k: Tensor, problem: Problem) -> BlockSelection:
        tiling = self.tiling(problem)
        with stage("route"):
            lists = list(self._best(q, k, problem))
            width = max(part.shape[-1] for part in lists)
            padded = [torch.nn.functional.pad(part, (0, width - part.shape[-1]), value=-1) for part in lists]
        return BlockSelection.from_indices(torch.cat(padded, dim=2), tiling)

    def _best(self, q: Tensor, k: Tensor, problem: Problem) -> Iterator[Tensor]:
        tiling, backend = self.tiling(problem), self._mass_backend(problem)
        step = max(1, CHUNKS[backend] // (problem.batch * problem.heads * tiling.blocks))
        for start in range(0, tiling.tiles, step):
            tile = torch.arange(start, min(start + step, tiling.tiles), device=q.device)
            mass = backends.block_mass(q, k, tiling, problem.scale, tile, backend)
            forced = tiling.forced(tile, self.sinks(problem), self.locals(problem))
            keep = ranked_count(self.top_k, forced, self.forced_in_budget)
            yield top_blocks(mass.unflatten(1, (problem.kv_heads, problem.group)).mean(2), tile, tiling, forced, keep)

    def fast_mass(self, q: Tensor, k: Tensor, problem: Problem, tiles: Tensor) -> Tensor | None:
        """Block mass of some tiles by the kernel, fp32 [B, H, T, blocks]; None where the kernel cannot run."""
        backend = self._mass_backend(problem)
        if backend == "reference":
            return None
        return backends.block_mass(q, k, self.tiling(problem), problem.scale, tiles, backend)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, selection: BlockSelection | None, problem: Problem) -> Tensor:
        assert selection is not None
        return backends.attend(q, k, v, selection, problem, self.implementation)

    def cost(self, problem: Problem) -> Cost:
        planned, tiling = self.planned(problem), self.tiling(problem)
        backend = self._mass_backend(problem)
        scored = 2.0 * problem.batch * problem.heads * problem.head_dim * tiling.visible_pairs()
        scored *= PASSES[backend]
        keys = (
            problem.batch * problem.kv_heads * tiling.tiles * problem.seq_len_kv * problem.head_dim * problem.itemsize
        )
        attend = attention_cost(problem, planned.pairs, planned.listed, self.block_size)
        lists = 24.0 * problem.batch * problem.kv_heads * planned.listed
        copies = 4.0 * problem.seq_len_kv * (problem.head_dim + problem.head_dim_v)
        return Cost((StageCost("route", scored, keys / 2), attend), lists + copies + 24.0 * CHUNKS[backend], 0.0, lists)
