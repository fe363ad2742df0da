"""Means of runs of tokens, and the attention that tiles give to overlapping pools of keys: torch twins.

Pools of `span` strides that begin one stride apart: each token lies in `span` of them. A tile sees a pool when it sees all
of its keys. Cost: one addition per element for the means; 2·D·H·M per visible pool for the probabilities.
Source: NSA (arXiv 2502.11089, section 3.3.1: compression blocks of 32 tokens, 16 apart), InfLLM-V2 (arXiv 2509.24663).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pyramidbench.kernels.panels import Panels, panels_of
from pyramidbench.tiling import Tiling


def run_means(x: Tensor, size: int) -> Tensor:
    """Means of consecutive runs of `size` rows, the last one over what is left: fp32 (fp64) [..., runs, D]; x: [..., n, D]."""
    wide = torch.promote_types(x.dtype, torch.float32)
    full = x.shape[-2] // size
    means = x[..., : full * size, :].unflatten(-2, (full, size)).sum(-2, dtype=wide) / size
    tail = x[..., full * size :, :]
    return torch.cat([means, tail.to(wide).mean(-2, keepdim=True)], dim=-2) if tail.shape[-2] else means


def pool_means(k: Tensor, stride: int, span: int) -> Tensor:
    """Means of all whole pools of `span` strides of `stride` tokens: fp32 (fp64) [..., pools, D]; k: [..., N, D].

    There are none, and the result is empty, where N is below a pool.
    """
    whole = k.shape[-2] // stride
    strides = run_means(k[..., : whole * stride, :], stride)
    if whole < span:
        return strides[..., :0, :]
    return strides.unfold(-2, span, 1).mean(-1)


def pool_shares(
    q: Tensor, pools: Tensor, tiling: Tiling, stride: int, span: int, scale: float, rows: int | None, elements: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """For some tiles at a time: their numbers [T], and the attention of each to the first pools, as many as any sees: [T, n].

    q: [g, M, D], the heads that share a set; pools: [pools, D]. A softmax per row over the pools that the tile sees, added
    over the tile's rows (or `rows` of them, evenly spaced) and the heads. The last tile may come more than once.
    """
    ends = torch.arange(pools.shape[0], device=q.device) * stride + stride * span
    for panels in panels_of(tiling, rows, max(1, pools.shape[0]), q.shape[0], q.shape[-1], q.device, elements):
        seen = torch.full_like(panels.tile, tiling.seq_len_kv)
        if tiling.causal:
            seen = tiling.first_position(panels.tile) + 1
        # The first `every` pools all of these tiles see, and the first `used` some of them.
        every, used = (ends <= torch.stack(seen.aminmax())[:, None]).sum(-1).tolist()
        sees = ends[:used] <= seen[..., None]
        yield panels.tile.flatten(), _shares(q, pools[:used], panels, sees, every, scale).flatten(0, 1)


def _shares(q: Tensor, pools: Tensor, panels: Panels, sees: Tensor, every: int, scale: float) -> Tensor:
    """[P, share, pools]; sees: bool of that shape, True everywhere in the first `every` columns."""
    queries = panels.queries(q)
    # All rows in one product: with dimensions before them torch makes a product of each tile's few rows.
    rows = queries.flatten(0, 3).to(pools.dtype) * scale
    # of shape [P, share, g, rows, pools]
    logits = (rows @ pools.mT).unflatten(0, queries.shape[:4])
    logits[..., every:].masked_fill_(~sees[:, :, None, None, every:], -torch.inf)
    shares = logits.softmax(-1)
    if panels.ragged:
        shares.masked_fill_(~panels.real[:, :, None, :, None], 0)
    # A tile that sees no pool has NaN in all of its rows.
    return shares.sum((2, 3)).masked_fill_(~sees.any(-1, keepdim=True), 0)
