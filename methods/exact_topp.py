"""Exact Top-p: the fewest blocks that hold a share p of the attention. What any Top-p method would do if it knew."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from pyramidbench import oracle_rows
from pyramidbench.cost import Cost, StageCost
from pyramidbench.kernels import backends
from pyramidbench.kernels.attending import TorchMethod
from pyramidbench.kernels.share_method import Share
from pyramidbench.kernels.top_p import top_p_blocks
from pyramidbench.method import Kind
from pyramidbench.problem import Problem


@dataclass(frozen=True)
class ExactTopP(TorchMethod):
    """Keeps the fewest blocks that hold `top_p` of the attention, averaged over a group's heads and a tile's rows.

    No choice that keeps as much is sparser, the forced blocks being given: the floor of every density at that mass. Cost:
    2·D·H·P operations for P visible pairs, which is half of dense attention, and the attention over what is kept.
    """

    kind: ClassVar[Kind] = "bound"
    source: ClassVar[str] = "the definition of block mass in docs/selection.md"

    top_p: Share = 0.95

    @property
    def adaptive(self) -> bool:
        return True

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
            shared = mass.unflatten(1, (problem.kv_heads, problem.group)).mean(2)
            yield top_p_blocks(shared, tile, tiling, forced, self.top_p)

    def cost(self, problem: Problem) -> Cost:
        tiling = self.tiling(problem)
        scored = 2.0 * problem.batch * problem.heads * problem.head_dim * tiling.visible_pairs()
        passes = 2 if self._mass_backend(problem) == "triton" else 1
        keys = problem.batch * problem.kv_heads * tiling.tiles * problem.seq_len_kv * problem.head_dim
        masses = float(problem.batch * problem.heads * tiling.tiles * tiling.blocks)
        if self._mass_backend(problem) == "reference":
            masses += min(oracle_rows.CHUNK_ELEMENTS, problem.group * problem.seq_len_q * problem.seq_len_kv)
        route = StageCost("route", passes * scored, keys * problem.itemsize / 2)
        return Cost((route, self.attend_cost(problem)), *self.workspace(problem, masses))
