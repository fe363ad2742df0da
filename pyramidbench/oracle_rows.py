"""Query rows of some tiles, and exact softmax weights on them: what the oracle and the gate's gradients compute with."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pyramidbench.selection import BlockSelection
from pyramidbench.tiling import Tiling

CHUNK_ELEMENTS = 1 << 22
"""Logits that are held at a time."""


class TileRows:
    """The query rows of some tiles: [T, query_tile], ragged ones marked unreal."""

    def __init__(self, tiling: Tiling, tiles: Tensor) -> None:
        self.tiling = tiling
        row = tiles[:, None] * tiling.query_tile + torch.arange(tiling.query_tile, device=tiles.device)
        self.real = row < tiling.seq_len_q
        self.row = row.clamp(max=tiling.seq_len_q - 1)
        self.position = self.row + tiling.offset

    def weights(self, q: Tensor, keys: Tensor, allowed: Tensor | None, *, again: bool = False) -> Tensor:
        """Softmax weights [P·g, T·query_tile, seen keys] of q [P·g, M, D] on keys [P, N, D]; all 0 where a row sees nothing.

        again: as a backward computes them, which keeps each row's log-sum-exp alone, in fp32 at least. By what rounding that is
        off, the whole row is.
        """
        tiling = self.tiling
        seen = min(tiling.seq_len_kv, int(self.position.max()) + 1) if tiling.causal else tiling.seq_len_kv
        seen = min(tiling.seq_len_kv, max(1, -(-seen // tiling.block_size)) * tiling.block_size)
        logits = q[:, self.row.flatten()].view(len(keys), -1, q.shape[-1]) @ keys[:, :seen].mT
        logits = logits.view(len(q), -1, seen)
        key = torch.arange(seen, device=q.device)
        if tiling.causal:
            logits.masked_fill_(key > self.position.flatten()[:, None], -torch.inf)
        if allowed is not None:
            hidden = ~allowed[..., key // tiling.block_size]
            logits.masked_fill_(hidden.repeat_interleave(tiling.query_tile, 1), -torch.inf)
        if again:
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            weights = (wide - wide.logsumexp(-1, keepdim=True)).exp().to(logits.dtype)
        else:
            weights = logits.softmax(-1)
        return weights.masked_fill_(self.blind(allowed)[..., None], 0)

    def blind(self, allowed: Tensor | None) -> Tensor:
        """Rows that see no key at all: bool [T·query_tile], or [g or 1, T·query_tile] under a selection."""
        if allowed is None:
            return (self.position < 0).flatten() & self.tiling.causal
        if not self.tiling.causal:
            return ~allowed.any(-1).repeat_interleave(self.tiling.query_tile, 1)
        started = torch.arange(self.tiling.blocks, device=allowed.device) * self.tiling.block_size
        first = torch.where(allowed, started, self.tiling.seq_len_kv).amin(-1)
        return first.repeat_interleave(self.tiling.query_tile, 1) > self.position.flatten()

    def outputs(self, weights: Tensor, values: Tensor) -> Tensor:
        """Weighted values [P·g, T, query_tile, Dv] for values [P, N, Dv]; NaN in rows that a ragged tile lacks."""
        seen = weights.shape[-1]
        summed = weights.view(len(values), -1, seen) @ values[:, :seen]
        by_row = summed.view(len(weights), -1, self.tiling.query_tile, values.shape[-1])
        return by_row.masked_fill(~self.real[None, :, :, None], torch.nan)

    def block_means(self, weights: Tensor) -> Tensor:
        """Mean over each tile's real rows of the weight in each block: [g, T, blocks]."""
        size, blocks = self.tiling.block_size, self.tiling.blocks
        tail = -weights.shape[-1] % size
        whole = torch.nn.functional.pad(weights, (0, tail)) if tail else weights
        per_block = whole.unflatten(-1, (-1, size)).sum(-1)
        per_block = torch.nn.functional.pad(per_block, (0, blocks - per_block.shape[-1]))
        per_row = per_block.unflatten(1, self.real.shape) * self.real[None, :, :, None]
        return per_row.sum(2) / self.real.sum(-1)[None, :, None]


def row_chunks(tiling: Tiling, tiles: Tensor, group: int) -> Iterator[slice]:
    """Parts of some tiles whose logits of one key/value head stay within CHUNK_ELEMENTS."""
    step = max(1, CHUNK_ELEMENTS // max(1, group * tiling.query_tile * tiling.seq_len_kv))
    for start in range(0, len(tiles), step):
        yield slice(start, start + step)


def allowed_blocks(selection: BlockSelection, b: int, mine: slice, heads: int, tiles: Tensor) -> Tensor:
    """Blocks that each head may use on these tiles: bool [g or 1, T, blocks]."""
    sets = selection.indices.shape[1]
    first, last = mine.start * sets // heads, max(mine.start * sets // heads + 1, mine.stop * sets // heads)
    listed = selection.indices[b, first:last][:, tiles].long()
    blocks = selection.tiling.blocks
    mask = torch.zeros((*listed.shape[:2], blocks + 1), dtype=torch.bool, device=listed.device)
    return mask.scatter_(-1, torch.where(listed < 0, blocks, listed), True)[..., :-1]
