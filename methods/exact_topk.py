"""Exact Top-K: the oracle as a method. The most attention that K blocks can hold, at a dense price."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from pyramidbench import oracle_rows
from pyramidbench.cost import Cost, StageCost
from pyramidbench.kernels import backends
from pyramidbench.kernels.attending import TorchMethod
from pyramidbench.method import Kind
from pyramidbench.problem import Problem
from pyramidbench.selection import ranked_count, top_blocks

PASSES = {"reference": 1, "triton": 2}
"""How often the logits are formed."""


@dataclass(frozen=True)
class ExactTopK(TorchMethod):
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
        return backends.shown(self._mass_backend(problem), self.attend_backend(problem))

    def _mass_backend(self, problem: Problem) -> backends.Backend:
        return backends.chosen(self.implementation, backends.mass_gap(problem, self.tiling(problem)))

    def choose(self, q: Tensor, k: Tensor, summary: Tensor, problem: Problem) -> Iterator[Tensor]:  # noqa: ARG002
        tiling, backend = self.tiling(problem), self._mass_backend(problem)
        for tile in self.tile_parts(problem, problem.batch * problem.heads * tiling.blocks, q.device):
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

    def cost(self, problem: Problem) -> Cost:
        tiling = self.tiling(problem)
        scored = 2.0 * problem.batch * problem.heads * problem.head_dim * tiling.visible_pairs()
        scored *= PASSES[self._mass_backend(problem)]
        keys = (
            problem.batch * problem.kv_heads * tiling.tiles * problem.seq_len_kv * problem.head_dim * problem.itemsize
        )
        masses = float(problem.batch * problem.heads * tiling.tiles * tiling.blocks)
        if self._mass_backend(problem) == "reference":
            masses += min(oracle_rows.CHUNK_ELEMENTS, problem.group * problem.seq_len_q * problem.seq_len_kv)
        return Cost((StageCost("route", scored, keys / 2), self.attend_cost(problem)), *self.workspace(problem, masses))
