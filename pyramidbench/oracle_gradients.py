"""Gradients of exact attention under given blocks, row by row: what the gate holds a method's backward against.

With weights W of a row, dP = dO·Vᵀ and dS = W ∘ (dP - rowsum(dO ∘ O)): dV = WᵀdO, dQ = scale·dS·K, dK = scale·dSᵀ·Q.
The weights come from a log-sum-exp and the sums from the output, as in any backward that keeps no N² of anything; so rounding
does here what it does there. (Where a row sees one key, dS is 0, and autograd of a softmax would get that without an error.)
Only the rows of some query tiles count; to all others comes back nothing, so that a few tiles are affordable at any length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyramidbench.oracle_rows import TileRows, allowed_blocks, row_chunks
from pyramidbench.selection import BlockSelection
from pyramidbench.tiling import Tiling


def rows_of_tiles(tiling: Tiling, tiles: Tensor) -> Tensor:
    """Which query rows lie in some tiles: bool [M]."""
    rows = TileRows(tiling, tiles)
    wanted = torch.zeros(tiling.seq_len_q, dtype=torch.bool, device=tiles.device)
    wanted[rows.row[rows.real]] = True
    return wanted


def head_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_out: Tensor,
    tiling: Tiling,
    scale: float,
    tiles: Tensor,
    selection: BlockSelection | None,
    at: tuple[int, int],
    precision: torch.dtype,
    *,
    absolute: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients that the rows of `tiles` give: d_q [g, M, D], d_k [N, D], d_v [N, Dv] of one batch entry and key/value head.

    d_out: [B, H, M, Dv], read at those rows. Products run in `precision`, sums over parts of the rows in fp32 at least.
    absolute: every term of every sum by its size, so that nothing cancels: what rounding is in proportion to.
    """
    batch, head = at
    group = q.shape[1] // k.shape[1]
    mine = slice(head * group, (head + 1) * group)
    queries, upstream = (x[batch, mine].to(precision) for x in (q, d_out))
    keys, values = (x[batch, head].to(precision) for x in (k, v))
    wide = torch.promote_types(precision, torch.float32)
    d_q, d_k, d_v = (torch.zeros_like(x, dtype=wide) for x in (queries, keys, values))
    for part in row_chunks(tiling, tiles, group):
        allowed = None if selection is None else allowed_blocks(selection, batch, mine, q.shape[1], tiles[part])
        rows = TileRows(tiling, tiles[part])
        at_rows, real = rows.row.flatten(), rows.real.flatten()[:, None]
        # [g, rows, seen keys]
        weights = rows.weights(queries * scale, keys[None], allowed, again=True)
        seen = weights.shape[-1]
        d_rows = upstream[:, at_rows] * real
        d_weights = d_rows @ values[:seen].mT
        terms = (weights @ values[:seen]).to(wide) * d_rows.to(wide)
        sums = terms.sum(-1, keepdim=True).to(precision)
        if absolute:
            d_logits, d_rows = weights * (d_weights.abs() + sums.abs()), d_rows.abs()
        else:
            d_logits = weights * (d_weights - sums)
        met_keys, met_queries = (x.abs() if absolute else x for x in (keys[:seen], queries[:, at_rows]))
        d_q.index_add_(1, at_rows, (scale * (d_logits @ met_keys)).to(wide))
        d_k[:seen] += (scale * (d_logits.mT @ met_queries)).sum(0).to(wide)
        d_v[:seen] += (weights.mT @ d_rows).sum(0).to(wide)
    return d_q, d_k, d_v
