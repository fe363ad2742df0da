"""A rule that reads a pattern of lines from a few probing queries and applies it to the tiles after them, in torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pyramidbench.cost import Cost, StageCost
from pyramidbench.kernels.attending import TorchMethod
from pyramidbench.kernels.lines import Lines, probe_lines, probe_starts
from pyramidbench.method import Positive
from pyramidbench.problem import Problem


@dataclass(frozen=True)
class ProbedMethod(TorchMethod):
    """Chooses by lines that `probe_rows` queries see; the newest probe that ended before a tile counts for it.

    Probes end after `probe_rows` queries, at twice, four times, … that, and from `probe_every` queries on at each multiple of
    it. Every query head has its own set. On 8 192 tokens of SmolLM2 (layers 7 and 13, K 8) `vertical_slash` finds .39, .47, .51
    and .63 of the best blocks with a probe every 4 096, 1 024, 512 and 64 queries; at 1 024 probes cost 6 % of all logits.
    """

    probe_rows: Positive = 64
    probe_every: Positive = 1024
    head_reduce: Literal["none"] = "none"

    def pattern(
        self, q: Tensor, summary: Tensor, starts: list[int], lines: Lines, problem: Problem
    ) -> tuple[Tensor, ...]:
        """What the lines of P probes, which end before `starts`, come to for the heads q [g, M, D] of the keys' summary: a few
        numbers for each block or distance of blocks, tensors of shape [g, P, any]."""
        raise NotImplementedError

    def lists(
        self, q: Tensor, summary: Tensor, tile: Tensor, pattern: tuple[Tensor, ...] | None, problem: Problem
    ) -> Tensor:
        """Lists [B, H, T, S] of some tiles by the pattern that each goes by, [B, H, T, any]; None before the first probe."""
        raise NotImplementedError

    def unsupported(self, problem: Problem) -> str | None:
        if not problem.causal or problem.seq_len_q != problem.seq_len_kv:
            return "lines are read from earlier queries: it needs causal attention and one query for each key"
        return super().unsupported(problem)

    def choose(self, q: Tensor, k: Tensor, summary: Tensor, problem: Problem) -> Iterator[Tensor]:
        tiles, starts = self.tiling(problem).tiles, probe_starts(problem.seq_len_q, self.probe_rows, self.probe_every)
        elements = 4.0 * problem.batch * problem.heads * self.tiling(problem).blocks
        first = min(tiles, -(-starts[0] // self.query_tile)) if starts else tiles
        for tile in self.tile_parts(problem, elements, q.device, range(first)):
            yield self.lists(q, summary, tile, None, problem)
        if first == tiles:
            return
        patterns = self._patterns(q, k, summary, starts, problem)
        ends = torch.tensor(starts, device=q.device)
        for tile in self.tile_parts(problem, elements, q.device, range(first, tiles)):
            newest = torch.searchsorted(ends, tile * self.query_tile, right=True) - 1
            yield self.lists(q, summary, tile, tuple(part[:, :, newest] for part in patterns), problem)

    def _patterns(
        self, q: Tensor, k: Tensor, summary: Tensor, starts: list[int], problem: Problem
    ) -> tuple[Tensor, ...]:
        """The patterns of all probes: [B, H, P, any]. As many probes at a time as a chunk of logits holds."""
        heads = []
        for queries, keys, known in zip(
            q.flatten(0, 1).split(problem.group), k.flatten(0, 1), summary.flatten(0, 1), strict=True
        ):
            parts = [
                self.pattern(
                    queries, known, some, probe_lines(queries, keys, some, self.probe_rows, problem.scale), problem
                )
                for some in self._together(starts, problem)
            ]
            heads.append([torch.cat(part, dim=1) for part in zip(*parts, strict=True)])
        shape = (problem.batch, problem.heads)
        return tuple(torch.cat(part).unflatten(0, shape) for part in zip(*heads, strict=True))

    def _together(self, starts: list[int], problem: Problem) -> Iterator[list[int]]:
        """Probes whose logits, of the heads of a group and as wide as the last one's, are held together."""
        most = self.chunk_elements(problem) / (problem.group * self.probe_rows)
        first = 0
        for index in range(len(starts)):
            if index > first and (index + 1 - first) * starts[index] > most:
                yield starts[first:index]
                first = index
        yield starts[first:]

    def cost(self, problem: Problem) -> Cost:
        starts = probe_starts(problem.seq_len_q, self.probe_rows, self.probe_every)
        tiling, heads = self.tiling(problem), problem.batch * problem.heads
        probed = float(sum(self.probe_rows * start for start in starts))
        panel = float(heads * tiling.tiles * tiling.blocks)
        read = problem.batch * problem.kv_heads * sum(starts) * problem.head_dim * problem.itemsize
        route = StageCost("route", 2.0 * problem.head_dim * heads * probed + panel, read + 4.0 * panel)
        one = problem.group * self.probe_rows * problem.seq_len_kv
        # Before there are scores of tiles: logits, their softmax and two copies on the way to its diagonals.
        chunk, lists = self.chunk_elements(problem), self.lists_bytes(problem)
        probes = 16.0 * max(one, min(chunk, len(starts) * one))
        scores = 24.0 * min(panel, chunk) + lists
        patterns = 12.0 * heads * len(starts) * tiling.blocks
        held = patterns + lists + max(probes, scores, self.attend_bytes(problem))
        return Cost((route, self.attend_cost(problem)), held, 0.0, lists)
