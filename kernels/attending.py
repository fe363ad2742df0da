"""What selection rules share: whatever they choose, they attend through the one sparse-attention kernel.

Three kinds: a rule in plain torch, which lists blocks for some tiles at a time on any device; a rule that is a walk with
parameters of its own, which thereby has the walk's Triton kernels too; and one of these over summaries that a decoding cache
keeps, which has the kernels of a step besides. So methods differ in what they select, and in nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from pyramidbench.cost import Cost, StageCost, attention_cost
from pyramidbench.decoder import CacheLayout, Decoder
from pyramidbench.kernels import backends
from pyramidbench.kernels.pyramid import Pyramid
from pyramidbench.kernels.walk_cost import step_cost, walk_cost
from pyramidbench.kernels.walk_rules import WalkRules
from pyramidbench.method import BlockMethod
from pyramidbench.problem import Problem
from pyramidbench.selection import BlockSelection, ranked_count
from pyramidbench.stages import stage

CHUNK_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 26}
"""Scores that a torch rule holds at a time: 16 MiB in fp32 stays in a CPU's cache, 256 MiB fills a GPU."""


@dataclass(frozen=True)
class AttendingMethod(BlockMethod):
    """A block method that attends by `kernels.backends.attend`."""

    def attend_backend(self, problem: Problem) -> backends.Backend:
        """What runs the attention; UserError where "triton" was asked for and cannot."""
        return backends.chosen(self.implementation, backends.attention_gap(problem, self.block_size))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, selection: BlockSelection | None, problem: Problem) -> Tensor:
        assert selection is not None
        return backends.attend(q, k, v, selection, problem, self.implementation)

    def sets(self, problem: Problem) -> int:
        """Sets of blocks per batch: the query heads where each has its own, else the key/value heads."""
        return problem.heads if getattr(self, "head_reduce", None) == "none" else problem.kv_heads

    def attend_cost(self, problem: Problem) -> StageCost:
        """The attention over what the budget comes to; each set reads its own blocks."""
        planned = self.planned(problem)
        listed = planned.listed * self.sets(problem) / problem.kv_heads
        return attention_cost(problem, planned.pairs, listed, self.block_size)


@dataclass(frozen=True)
class TorchMethod(AttendingMethod):
    """A rule in plain torch: `choose` lists the blocks of consecutive tiles, part by part, so that memory stays bounded."""

    def backend(self, problem: Problem) -> str:
        return backends.shown("reference", self.attend_backend(problem))

    def summarise(self, k: Tensor) -> Tensor:
        """What the rule reads of the keys [B, G, N, D]; without an own version, the keys themselves."""
        return k

    def choose(self, q: Tensor, k: Tensor, summary: Tensor, problem: Problem) -> Iterator[Tensor]:
        """Lists [B, sets, T, S] of the next T tiles, ascending and padded with -1, until all tiles have one."""
        raise NotImplementedError

    def select(self, q: Tensor, k: Tensor, problem: Problem) -> BlockSelection:
        with stage("build"):
            summary = self.summarise(k)
        with stage("route"):
            lists = joined([part.to(torch.int32) for part in self.choose(q, k, summary, problem)])
        return BlockSelection.from_indices(lists, self.tiling(problem))

    def tile_parts(
        self, problem: Problem, elements: float, device: torch.device, tiles: range | None = None
    ) -> Iterator[Tensor]:
        """All tiles (or a range of them) in order, int64, as many at a time as `elements` numbers for each of them allow."""
        tiles = range(self.tiling(problem).tiles) if tiles is None else tiles
        step = max(1, int(self.chunk_elements(problem) // max(1.0, elements)))
        for start in range(tiles.start, tiles.stop, step):
            yield torch.arange(start, min(start + step, tiles.stop), device=device)

    def chunk_elements(self, problem: Problem) -> int:
        """Scores that are held at a time."""
        return CHUNK_ELEMENTS["cpu" if problem.device == "cpu" else "cuda"]

    def workspace(self, problem: Problem, elements: float, summary: float = 0.0) -> tuple[float, float, float]:
        """Bytes held besides inputs and output, and of these the summary's and the lists', as `Cost` takes them.

        The summary and the lists; beside them a few copies of a chunk of scores and the parts that the lists are joined from,
        or what the attention holds. elements: the scores of all tiles together, of which a chunk is held at a time. summary:
        bytes.
        """
        lists = self.lists_bytes(problem)
        scores = 6 * 4.0 * min(elements, self.chunk_elements(problem))
        return summary + lists + max(scores + lists, self.attend_bytes(problem)), summary, lists

    def lists_bytes(self, problem: Problem) -> float:
        """Bytes of the lists, int32 and padded to the longest, with their counts."""
        tiles = self.tiling(problem).tiles
        return 4.0 * problem.batch * self.sets(problem) * tiles * (self.longest_list(problem) + 1)

    def attend_bytes(self, problem: Problem) -> float:
        """Bytes that the attention holds besides the lists and its output."""
        sets, longest = self.sets(problem), self.longest_list(problem)
        return backends.attend_bytes(problem, self.tiling(problem), sets, longest, self.attend_backend(problem))

    def longest_list(self, problem: Problem) -> int:
        """Blocks that a tile lists at most: one of the last does, since how tiles lie on blocks repeats."""
        tiling = self.tiling(problem)
        last = self.block_size // gcd(self.block_size, self.query_tile) + 1
        tile = torch.arange(max(0, tiling.tiles - last), tiling.tiles)
        forced = tiling.forced(tile, self.sinks(problem), self.locals(problem))
        ranked = tiling.blocks if self.adaptive else ranked_count(self.top_k, forced, self.forced_in_budget)
        return int((forced.count() + ranked).clamp(max=tiling.blocks).max())


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Lists [B, sets, T_i, S_i] of consecutive tiles in one, padded with -1 to the longest; a single part is not copied."""
    if len(parts) == 1:
        return parts[0]
    tiles, longest = sum(part.shape[2] for part in parts), max(part.shape[3] for part in parts)
    whole = parts[0].new_full((*parts[0].shape[:2], tiles, longest), -1)
    start = 0
    for part in parts:
        whole[:, :, start : start + part.shape[2], : part.shape[3]] = part
        start += part.shape[2]
    return whole


@dataclass(frozen=True)
class WalkMethod(AttendingMethod):
    """A rule that is a walk (kernels.walk) under `rules`: one level is a single pass over all blocks."""

    def rules(self, problem: Problem) -> WalkRules:
        """The walk's parameters."""
        raise NotImplementedError

    def build(self, k: Tensor, problem: Problem) -> Pyramid:
        """The node summaries that the walk reads."""
        return backends.build(k, self.tiling(problem), self.rules(problem), self.route_backend(problem))

    def unsupported(self, problem: Problem) -> str | None:
        gap = backends.walk_gap(problem, self.tiling(problem), self.rules(problem))
        gap = gap or backends.attention_gap(problem, self.block_size)
        return super().unsupported(problem) or (gap if self.implementation == "triton" else None)

    def backend(self, problem: Problem) -> str:
        return backends.shown(self.route_backend(problem), self.attend_backend(problem))

    def route_backend(self, problem: Problem) -> backends.Backend:
        """What runs the walk."""
        gap = backends.walk_gap(problem, self.tiling(problem), self.rules(problem))
        return backends.chosen(self.implementation, gap)

    def select(self, q: Tensor, k: Tensor, problem: Problem) -> BlockSelection:
        with stage("build"):
            pyramid = self.build(k, problem)
        with stage("route"):
            return backends.route(
                q, k, pyramid, self.tiling(problem), self.rules(problem), problem.scale, self.route_backend(problem)
            )

    def cost(self, problem: Problem) -> Cost:
        tiling, rules = self.tiling(problem), self.rules(problem)
        held = backends.workspace_bytes(
            problem, tiling, rules, self.route_backend(problem), self.attend_backend(problem)
        )
        parts = backends.parts_bytes(problem, tiling, rules, self.route_backend(problem))
        return Cost((*walk_cost(problem, tiling, rules), self.attend_cost(problem)), held, *parts)


@dataclass(frozen=True)
class CachedWalkMethod(WalkMethod):
    """A walk over means and bounds of keys, which a decoding cache keeps: a step appends to them and builds nothing anew."""

    def unsupported(self, problem: Problem) -> str | None:
        if problem.direction != "decode":
            return super().unsupported(problem)
        gap = self._decode_gap(problem) if self.implementation == "triton" else None
        return BlockMethod.unsupported(self, problem) or gap

    def decoder(self, problem: Problem, layout: CacheLayout) -> Decoder:
        return backends.decoder(problem, self.rules(problem), self.block_size, layout, self.implementation)

    def cache_bytes(self, problem: Problem) -> float:
        return backends.cache_bytes(problem, self.rules(problem), self.block_size)

    def step_cost(self, problem: Problem) -> Cost:
        held = backends.step_bytes(problem, self.rules(problem), self.block_size, self.implementation)
        return Cost((*step_cost(problem, self.tiling(problem), self.rules(problem)), self.attend_cost(problem)), held)

    def step_backend(self, problem: Problem) -> str:
        return backends.chosen(self.implementation, self._decode_gap(problem))

    def _decode_gap(self, problem: Problem) -> str | None:
        """Why the Triton kernels cannot do a step, or None."""
        return backends.decode_gap(problem, self.rules(problem), self.block_size)
