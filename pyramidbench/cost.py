"""Cost: predicted floating-point operations and bytes of a call, stage by stage (one multiply-add is two operations)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pyramidbench.problem import Problem
from pyramidbench.selection import ranked_count
from pyramidbench.tiling import Tiling

STAGES = ("build", "route", "index", "append", "attend", "backward")


@dataclass(frozen=True)
class StageCost:
    """Work of one stage: floating-point operations, and bytes that it reads and writes."""

    stage: str
    flops: float
    bytes: float


@dataclass(frozen=True)
class Cost:
    """Work of a whole call. `workspace_bytes` is the largest memory held besides inputs and output; of it, `pyramid_bytes` are
    summaries of keys that live from build to route, and `lists_bytes` the chosen blocks, which live until the end."""

    stages: tuple[StageCost, ...]
    workspace_bytes: float = 0.0
    pyramid_bytes: float = 0.0
    lists_bytes: float = 0.0

    @property
    def flops(self) -> float:
        return sum(stage.flops for stage in self.stages)

    @property
    def bytes(self) -> float:
        return sum(stage.bytes for stage in self.stages)

    def stage(self, name: str) -> StageCost:
        """The stage of that name, or one without work."""
        return next((stage for stage in self.stages if stage.stage == name), StageCost(name, 0.0, 0.0))


@dataclass(frozen=True)
class PlannedBlocks:
    """What a fixed-K method will keep, summed over the tiles of one head: known before it runs."""

    ranked: int
    listed: int
    eligible: int
    pairs: int


def planned_blocks(
    tiling: Tiling, top_k: int, sink_blocks: int, local_blocks: int, forced_in_budget: bool = False
) -> PlannedBlocks:
    """Blocks and (query, key) pairs that K ranked blocks and the forced ones come to, for one head.

    Exact when every ranked block is full, which causality guarantees; otherwise the ragged last block may be among them
    and the pairs are an upper bound.
    """
    tile = torch.arange(tiling.tiles)
    forced = tiling.forced(tile, sink_blocks, local_blocks)
    eligible = tiling.eligible(tile, forced)
    ranked = torch.minimum(ranked_count(top_k, forced, forced_in_budget), eligible)
    rows = tiling.last_position(tile) - tiling.first_position(tile) + 1
    width = min(tiling.block_size, tiling.seq_len_kv)
    pairs = int((rows * ranked * width).sum()) + int(tiling.pairs(tile[:, None], forced.list()).sum())
    return PlannedBlocks(int(ranked.sum()), int((ranked + forced.count()).sum()), int(eligible.sum()), pairs)


def attention_cost(problem: Problem, pairs_per_head: float, listed_blocks: float, block_size: int) -> StageCost:
    """Exact attention over `pairs_per_head` (query, key) pairs of each query head.

    `listed_blocks` are the blocks read per key/value head, summed over query tiles; bytes are before any cache reuse.
    """
    dims = problem.head_dim + problem.head_dim_v
    heads = problem.batch * problem.heads
    reads = problem.batch * problem.kv_heads * listed_blocks * block_size * dims * problem.itemsize
    own = problem.itemsize * heads * problem.seq_len_q * dims
    return StageCost("attend", 2.0 * heads * dims * pairs_per_head, reads + own)


def append_cost(problem: Problem) -> StageCost:
    """The stage "append" of a decoder that only keeps keys and values: the new tokens, read and written."""
    tokens = problem.batch * problem.kv_heads * problem.seq_len_q * (problem.head_dim + problem.head_dim_v)
    return StageCost("append", 0.0, 2.0 * problem.itemsize * tokens)
