"""XAttention: the sums along the antidiagonals of small squares of the logits tell which blocks matter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pyramidbench.cost import Cost, StageCost
from pyramidbench.kernels.products import logits, operand
from pyramidbench.kernels.share_method import ShareMethod, Shares
from pyramidbench.method import Positive
from pyramidbench.problem import Problem


@dataclass(frozen=True)
class XAttention(ShareMethod):
    """Keeps the blocks whose antidiagonal sums reach `top_p` of a tile's attention; how many these are, each tile decides.

    Queries and keys are cut into squares of `stride`; a square's score is the mean logit along its antidiagonal, which
    every query and key of it takes part in and every vertical or slash line crosses. A softmax over the squares before the
    tile, added up in each block, estimates the block's share of the attention.
    Parameters besides blocks and tiles: stride, top_p (preset `top_k`: none, and the K best blocks are kept), head_reduce.
    Cost: 2·D·H·M·N/(2·stride) for the sums, attention 4·D·H·(attended pairs).
    Differs from the source: p is taken of the attention before a tile's first query, where it counts the squares up to a row's
    own, so that no later key moves a choice; a local block besides the tile's own is kept by force; one p for all heads where
    the source may search one for each; blocks of 64 where it has 128.
    """

    source: ClassVar[str] = "XAttention, arXiv 2503.16428, section 2"
    granularity: ClassVar[str] = "8s × 8s"
    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {"default": {}, "top_k": {"top_p": None}}

    stride: Positive = 8

    def unsupported(self, problem: Problem) -> str | None:
        for what, size in (("block", self.block_size), ("query tile", self.query_tile)):
            if size % self.stride:
                return f"a {what} of {size} is no multiple of the stride {self.stride}: it has no whole antidiagonals"
        return super().unsupported(problem)

    def elements_per_tile(self, problem: Problem) -> float:
        squares = self.query_tile / self.stride * problem.seq_len_kv / self.stride
        return problem.batch * problem.heads * squares + self.query_tile * problem.head_dim

    def summarise(self, k: Tensor) -> Tensor:
        """Keys of a square side by side: [B, G, squares, stride·D]; the ragged last one is filled up with zeros."""
        whole = operand(torch.nn.functional.pad(k, (0, 0, 0, -k.shape[2] % self.stride)))
        return whole.unflatten(2, (-1, self.stride)).flatten(3)

    def shares(self, q: Tensor, summary: Tensor, tile: Tensor, problem: Problem) -> Shares:
        tiling, stride = self.tiling(problem), self.stride
        first, end = int(tile[0]) * self.query_tile, (int(tile[-1]) + 1) * self.query_tile
        rows = operand(q[:, :, first:end])
        rows = torch.nn.functional.pad(rows, (0, 0, 0, end - first - rows.shape[2]))
        square = torch.arange(summary.shape[2], device=q.device)
        sees = tiling.complete(square, tile[:, None], stride).expand(len(tile), -1)
        # No tile of this part sees the squares behind the last one's: half of all products, over the whole of a sequence.
        used = max(1, int(sees[-1].sum()))
        summary, sees = summary[:, :, :used], sees[:, :used]
        # The last query of a square meets its first key: the antidiagonal. Of shape [B, G, group, T, squares, stride·D]
        rows = rows.unflatten(2, (len(tile), -1, stride)).flip(4).flatten(4).unflatten(1, (problem.kv_heads, -1))
        means = logits(rows.flatten(2, 4), summary, problem.scale / stride).unflatten(2, rows.shape[2:5])
        weights = means.masked_fill_(~sees[:, None], -torch.inf).softmax(-1)
        real = first + torch.arange(0, end - first, stride, device=q.device) < problem.seq_len_q
        real = real.view(len(tile), -1, 1) & sees.any(-1)[:, None, None]
        shares = weights.masked_fill_(~real, 0).sum(4).flatten(1, 2)
        per_block = self.block_size // stride
        tail = tiling.blocks * per_block - shares.shape[-1]
        return Shares(torch.nn.functional.pad(shares, (0, tail)).unflatten(-1, (-1, per_block)).sum(-1))

    def cost(self, problem: Problem) -> Cost:
        sums = problem.batch * problem.heads * self.tiling(problem).visible_pairs() / self.stride
        squares = sums / self.stride
        size = problem.itemsize if problem.device == "cuda" else max(4, problem.itemsize)
        keys = float(size) * problem.batch * problem.kv_heads * problem.seq_len_kv * problem.head_dim
        route = StageCost("route", 2.0 * problem.head_dim * sums, 4 * 4.0 * squares)
        build = StageCost("build", 0.0, 2 * keys)
        return Cost((build, route, self.attend_cost(problem)), *self.workspace(problem, squares, keys))
