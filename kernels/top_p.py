"""Top-p over blocks: the forced blocks, and the fewest others that bring the kept share of attention to p.

A torch twin with no kernel of its own. Shares are estimates of what each block receives of a tile's attention; they need
not add up to 1, since p is taken of their sum. Ties go to the lower block.
Source: cumulative-attention selection of FlexPrefill (arXiv 2502.20766, section 3.3) and XAttention (arXiv 2503.16428,
section 2.2).
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyramidbench.selection import merge
from pyramidbench.tiling import Forced, Tiling


def top_p_blocks(
    shares: Tensor, tile: Tensor, tiling: Tiling, forced: Forced, top_p: float, always: Tensor | None = None
) -> Tensor:
    """Forced blocks and the fewest eligible ones whose shares reach `top_p` of all shares: int64 lists [..., T, S].

    shares: [..., T, blocks], not negative; tile: int64 [T]. What the forced blocks hold counts towards p. p = 1 keeps every
    eligible block, also one whose share is 0, and p = 0 none. always: bool like `shares`, eligible blocks that are kept
    besides.
    """
    block = torch.arange(tiling.blocks, device=shares.device).expand(len(tile), -1)
    is_forced = forced.contains(block, 1)
    may = (tiling.complete(block, tile[:, None], tiling.block_size) & ~is_forced).expand_as(shares)
    kept = torch.ones_like(may) if top_p >= 1 else _fewest(shares, may, is_forced, top_p)
    if always is not None:
        kept = kept | always
    return merge(block.masked_fill(~(kept & may), -1), forced.list().expand(*shares.shape[:-1], -1))


def _fewest(shares: Tensor, may: Tensor, is_forced: Tensor, top_p: float) -> Tensor:
    """Which eligible blocks it takes, best first, until they and the forced ones hold top_p of the sum."""
    missing = top_p * shares.sum(-1, keepdim=True) - (shares * is_forced).sum(-1, keepdim=True)
    ranked, order = shares.masked_fill(~may, -1.0).sort(dim=-1, descending=True, stable=True)
    before = torch.nn.functional.pad(ranked.clamp(min=0).cumsum(-1)[..., :-1], (1, 0))
    return torch.zeros_like(may).scatter_(-1, order, (before < missing) & (ranked >= 0))
