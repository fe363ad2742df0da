"""A rule that reads a pattern of lines from a few probing queries and applies it to the tiles after them, in torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

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

    def lists(self, q: Tensor, summary: Tensor, tile: Tensor, lines: Lines | None, problem: Problem) -> Tensor:
        """Lists [B, H, T, S] of some tiles; lines is None before the first probe."""
        raise NotImplementedError

    def unsupported(self, problem: Problem) -> str | None:
        if not problem.causal or problem.seq_len_q != problem.seq_len_kv:
            return "lines are read from earlier queries: it needs causal attention and one query for each key"
        return super().unsupported(problem)

    def choose(self, q: Tensor, k: Tensor, summary: Tensor, problem: Problem) -> Iterator[Tensor]:
        starts = probe_starts(problem.seq_len_q, self.probe_rows, self.probe_every)
        elements = 2.0 * problem.batch * problem.heads * self.tiling(problem).blocks
        for start, stop in pairwise([0, *starts, problem.seq_len_q]):
            tiles = range(-(-start // self.query_tile), -(-stop // self.query_tile))
            if not tiles:
                continue
            lines = probe_lines(q, k, start, self.probe_rows, problem.scale) if start else None
            for tile in self.tile_parts(problem, elements, q.device, tiles):
                yield self.lists(q, summary, tile, lines, problem)

    def cost(self, problem: Problem) -> Cost:
        starts = probe_starts(problem.seq_len_q, self.probe_rows, self.probe_every)
        tiling, heads = self.tiling(problem), problem.batch * problem.heads
        probed = float(sum(min(self.probe_rows, start) * start for start in starts))
        panel = float(heads * tiling.tiles * tiling.blocks)
        read = problem.batch * problem.kv_heads * sum(starts) * problem.head_dim * problem.itemsize
        route = StageCost("route", 2.0 * problem.head_dim * heads * probed + panel, read + 4.0 * panel)
        lines = 8.0 * self.probe_rows * problem.group * problem.seq_len_kv + 8.0 * heads * problem.seq_len_kv
        held, _, lists = self.workspace(problem, 2 * panel)
        return Cost((route, self.attend_cost(problem)), held + lines, 0.0, lists)
