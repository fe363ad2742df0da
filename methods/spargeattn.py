"""SpargeAttn: mean queries and keys where a block's vectors agree, and everything where they do not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from pyramidbench.cost import Cost, StageCost
from pyramidbench.kernels.pools import run_means
from pyramidbench.kernels.share_method import Share, ShareMethod, Shares
from pyramidbench.problem import Problem


@dataclass(frozen=True)
class SpargeAttn(ShareMethod):
    """Keeps the blocks that reach `top_p` by their means, every block whose keys differ, and all for a tile whose rows differ.

    A mean stands for its vectors only where they are alike: their mean pairwise cosine reaches `similarity`. A softmax of mean
    query × mean key over the alike blocks gives the shares; blocks and tiles that are not alike are kept whole.
    Parameters besides blocks and tiles: top_p, similarity, head_reduce. Preset `top_k` keeps K blocks, unlike ones first, and
    judges no tile. Cost: 2·D·H·(M/tile)·n₁/2 for the logits, 2·N·D to compare, attention 4·D·H·(attended pairs).
    Differs from the source: only the choice, without its second, online skip of products P·V and without quantisation; one
    p and one similarity for all heads where the source tunes them for each; sink and local blocks are always kept; p is taken
    of the blocks before a tile's first query, and the block that reaches it is kept, where the source stops before that one;
    keys are compared as they are, without taking the mean of all keys off; the mean cosine is that of its code, where the paper
    divides by the largest product; tiles of 64 by default where it has 128; `top_k` has a K where the source has a share.
    """

    source: ClassVar[str] = "SpargeAttn, arXiv 2502.18137, section 3.2"
    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {"default": {}, "top_k": {"top_p": None}}

    top_p: Share | None = 0.98
    similarity: Share = 0.6

    def summarise(self, k: Tensor) -> Tensor:
        """Of each block the mean key and, last, how alike its keys are: [B, G, blocks, D + 1]."""
        return torch.cat([run_means(k, self.block_size), likeness(k, self.block_size)[..., None]], dim=-1)

    def elements_per_tile(self, problem: Problem) -> float:
        blocks = problem.batch * problem.heads * self.tiling(problem).blocks
        return float(blocks + problem.batch * problem.heads * self.query_tile * problem.head_dim)

    def shares(self, q: Tensor, summary: Tensor, tile: Tensor, problem: Problem) -> Shares:
        tiling, (means, alike) = self.tiling(problem), (summary[..., :-1], summary[..., -1] >= self.similarity)
        rows = q[:, :, int(tile[0]) * self.query_tile : (int(tile[-1]) + 1) * self.query_tile]
        queries = run_means(rows, self.query_tile).unflatten(1, (problem.kv_heads, problem.group))
        logits = queries @ means[:, :, None].mT * problem.scale
        block = torch.arange(tiling.blocks, device=q.device)
        sees = tiling.complete(block, tile[:, None], self.block_size) & alike[:, :, None, None]
        shares = logits.masked_fill(~sees, -torch.inf).softmax(-1).masked_fill(~sees.any(-1, keepdim=True), 0)
        always = ~alike[:, :, None, None].expand_as(shares).flatten(1, 2)
        if self.top_p is not None:
            always = always | (likeness(rows, self.query_tile) < self.similarity)[..., None]
        return Shares(shares.flatten(1, 2), always)

    def cost(self, problem: Problem) -> Cost:
        tiling = self.tiling(problem)
        logits = problem.batch * problem.heads * tiling.visible_pairs() / (self.query_tile * self.block_size)
        keys = float(problem.batch * problem.kv_heads * problem.seq_len_kv * problem.head_dim)
        queries = float(problem.batch * problem.heads * problem.seq_len_q * problem.head_dim)
        build = StageCost("build", 4 * keys, keys * problem.itemsize)
        route = StageCost(
            "route", 4 * queries + 2.0 * problem.head_dim * logits, queries * problem.itemsize + 16 * logits
        )
        held = self.workspace(problem, logits + queries, 4.0 * keys)
        return Cost((build, route, self.attend_cost(problem)), *held)


def likeness(x: Tensor, size: int) -> Tensor:
    """Mean cosine over all pairs in each run of `size` rows, fp32 [..., runs]: the squared length of the mean direction."""
    directions = normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=-1)
    return run_means(directions, size).square().sum(-1)
