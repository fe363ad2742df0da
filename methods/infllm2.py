"""InfLLM-V2: overlapping mean pools of keys, and each block by its best pool. Nothing to train."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn.functional import pad

from pyramidbench.kernels.pooled_method import PooledMethod


@dataclass(frozen=True)
class InfLlm2(PooledMethod):
    """Keeps the K blocks that hold the pools with the most attention, added over a group's heads, besides init and window.

    Each row attends to means of overlapping pools of keys (softmax); a block's score is the largest weight of the pools
    that touch it. The first block and a local window are always kept.
    Parameters besides the budget: strides (per block) and span (strides of a pool): with blocks of 64, 4 and 2 are the
    source's pools of 32 tokens, 16 apart; score_rows (rows of a tile that score; None: all).
    Cost: 2·D·H·M·strides·n₁/2 for the pools, attention 4·D·H·M·(K + forced)·C.
    Differs from the source: the window is the two blocks that all methods here share, and comes on top of K, where it has
    2 048 tokens (preset `paper`: 32 blocks, and K 96 counts them and the first); the softmax is exact where its kernel takes
    the normaliser from coarser pools; it is dense up to 8 192 tokens. A tile of several queries, which it lacks, adds its
    rows' weights.
    """

    source: ClassVar[str] = "InfLLM-V2, arXiv 2509.24663, section 3"
    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {
        "default": {},
        "paper": {"query_tile": 1, "top_k": 96, "local_blocks": 32, "forced_in_budget": True},
    }

    def block_scores(self, shares: Tensor, blocks: int) -> Tensor:
        # The pools that touch block j are strides·j - span + 1 … strides·j + strides - 1.
        pools = pad(shares, (self.span - 1, blocks * self.strides - shares.shape[-1]))
        return pools.unfold(-1, self.strides + self.span - 1, self.strides).amax(-1)
