"""NSA's selection branch: attention to compressed keys says which blocks of keys to attend to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn.functional import pad

from pyramidbench.kernels.pooled_method import PooledMethod


@dataclass(frozen=True)
class Nsa(PooledMethod):
    """Keeps the K blocks whose keys get the most attention in compressed form, added over a group's heads.

    Each row attends to means of overlapping pools of keys (softmax); a block's score is the sum of its pools' weights, each as
    often as it has strides inside the block. The first and the last two blocks are always kept.
    Parameters besides the budget: strides (per block) and span (strides of a pool): with blocks of 64, 4 and 2 are the
    source's pools of 32 tokens, 16 apart; score_rows (rows of a tile that score; None: all).
    Cost: 2·D·H·M·strides·n₁/2 for the pools, attention 4·D·H·M·(K + forced)·C.
    Differs from the source: pools are means where NSA trains an MLP; only the selection branch, without the compressed and
    window branches and their gates; the three forced blocks come on top of K (preset `paper`: K 16 counts them). A tile of
    several queries, which NSA lacks, adds its rows' weights.
    """

    source: ClassVar[str] = "Native Sparse Attention, arXiv 2502.11089, section 3.3.2"
    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {
        "default": {},
        "paper": {"query_tile": 1, "top_k": 16, "forced_in_budget": True},
    }

    def block_scores(self, shares: Tensor, blocks: int) -> Tensor:
        # Stride i lies in the pools i - span + 1 … i, and a block takes the pools of each of its strides.
        pools = pad(shares, (self.span - 1, blocks * self.strides - shares.shape[-1]))
        return pools.unfold(-1, self.span, 1).sum(-1).unflatten(-1, (blocks, self.strides)).sum(-1)
