"""Scores of nodes and blocks for query tiles: LogSumExp of (estimated) logits, as plain torch twins.

For a node with c keys and summary (u, w): S = logsumexp over the tile's rows of s·(q⁺·u + q⁻·w) + log c. With u = w = m
(the mean) Jensen makes it a lower bound of the exact log-mass; with u, w the extremes of the keys it is an upper bound.
For a block: S = logsumexp over rows and keys of s·q·x, the exact log-mass.

Queries come as [P, share, G, R, D] (see panels.py), already multiplied by the softmax scale, in fp32 or fp64.
`union` is int64 [P, U], padded with -1, or an int n: all of the first n nodes, which then need no gather.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyramidbench.kernels.panels import gather
from pyramidbench.kernels.pyramid import Pyramid


def split_signs(queries: Tensor) -> Tensor:
    """[q⁺, q⁻]: what meets a summary (u, w) with bounds."""
    return torch.cat([queries.clamp(min=0), queries.clamp(max=0)], dim=-1)


def mean_query(queries: Tensor, real: Tensor) -> Tensor:
    """One mean query per tile: [P, share, G, 1, D]; rows that a ragged tile lacks do not count."""
    weight = real.to(queries.dtype)
    weight = weight / weight.sum(-1, keepdim=True)
    return torch.einsum("pshrd,psr->pshd", queries, weight).unsqueeze(-2)


def summary_scores(
    queries: Tensor, real: Tensor, pyramid: Pyramid, nodes: Tensor, level: int, union: Tensor | int
) -> Tensor:
    """Scores by the nodes' own summaries, heads added: [P, share, U].

    queries: [P, share, G, R, D or 2·D] to match `nodes` [n, D or 2·D], the level's summaries of this head.
    """
    scores = _logits(queries, nodes, union) + _pick(pyramid.log_keys(level), union)
    return _add_heads(_over_rows(scores, real))


def children_scores(
    queries: Tensor, real: Tensor, pyramid: Pyramid, nodes: Tensor, level: int, union: Tensor | int
) -> Tensor:
    """Scores by the summaries of the nodes' children, heads added: [P, share, U]. `nodes`: those of level - 1."""
    width, children = pyramid.branching, nodes.shape[0]
    if isinstance(union, int):
        below: Tensor = torch.arange(union * width, device=nodes.device).expand(queries.shape[0], -1)
    else:
        below = (union.clamp(min=0)[..., None] * width + torch.arange(width, device=nodes.device)).flatten(1)
    log_keys = pyramid.log_keys(level - 1)[below.clamp(max=children - 1)].masked_fill(below >= children, -torch.inf)
    if isinstance(union, int):
        logits = _logits(queries, nodes, min(union * width, children))
        logits = torch.nn.functional.pad(logits, (0, union * width - logits.shape[-1]))
    else:
        logits = _logits(queries, nodes, below.clamp(max=children - 1))
    scores = (logits + log_keys[:, None, None, None]).unflatten(-1, (-1, width)).logsumexp(-1)
    return _add_heads(_over_rows(scores, real))


def block_scores(
    queries: Tensor, keys: Tensor, log_weight: Tensor | None, union: Tensor | int, visible: Tensor | None = None
) -> Tensor:
    """Log-mass of each block for each row: [P, share, G, R, U].

    keys: [blocks, c, D], the keys of each block or means of its parts; log_weight: [blocks, c], added to the logits (the
    logarithm of a part's key count, -inf for a place past the last key), or None when all are 0.
    visible: bool [P, share, U, c]; False hides a key from all rows of a tile.
    """
    size = keys.shape[1]
    logits = _logits(queries, keys, union).unflatten(-1, (-1, size))
    if log_weight is not None:
        logits = logits + _pick(log_weight, union)
    if visible is not None:
        logits = logits.masked_fill(~visible[:, :, None, None], -torch.inf)
    high = logits.amax(-1, keepdim=True)
    high = torch.where(high == -torch.inf, 0, high)
    return logits.sub_(high).exp_().sum(-1).log_().add_(high[..., 0])


def join_heads(scores: Tensor, real: Tensor, member: Tensor | None, forced_scores: Tensor | None, how: str) -> Tensor:
    """Join rows and heads of block scores [P, share, G, R, U] into one score per tile and block, [P, share, U].

    "sum_prob": the probabilities exp(S - Z), added; Z is each row's LogSumExp over the blocks that its tile scored
    (`member`, bool [P, share, U], None: all) and over the forced ones (`forced_scores`, [P, share, G, R, F]).
    "sum_lse": LogSumExp over rows, added over heads. "lse" (and "none", where G is 1): LogSumExp over both.
    """
    scores = torch.where(scores.isnan(), -torch.inf, scores)
    if how == "sum_prob":
        counted = scores if member is None else scores.masked_fill(~member[:, :, None, None], -torch.inf)
        parts = (
            [counted]
            if forced_scores is None
            else [counted, torch.where(forced_scores.isnan(), -torch.inf, forced_scores)]
        )
        normaliser = torch.cat(parts, dim=-1).logsumexp(-1, keepdim=True)
        share_of_mass = (scores - normaliser).exp_()
        return _rows_last(share_of_mass.masked_fill(~real[:, :, None, :, None], 0)).sum(-1)
    if how == "sum_lse":
        return _add_heads(_over_rows(scores, real))
    return _rows_last(scores.masked_fill(~real[:, :, None, :, None], -torch.inf)).logsumexp(-1)


def _logits(queries: Tensor, keys: Tensor, union: Tensor | int) -> Tensor:
    """Dot products of every row with every (row of every) node of the union: [P, share, G, R, U·c]."""
    rows = queries.flatten(1, 3)
    if isinstance(union, int):
        flat = keys[:union].reshape(-1, keys.shape[-1])
        logits = rows @ flat.mT
    else:
        gathered = gather(keys, union).reshape(union.shape[0], -1, keys.shape[-1])
        logits = torch.bmm(rows, gathered.mT)
    return logits.unflatten(1, queries.shape[1:4])


def _pick(values: Tensor, union: Tensor | int) -> Tensor:
    """Per-node values [n, …] laid out to broadcast over [P, share, G, R, U, …]."""
    return values[:union] if isinstance(union, int) else values[union.clamp(min=0)][:, None, None, None]


def _over_rows(scores: Tensor, real: Tensor) -> Tensor:
    """LogSumExp over the tile's rows: [P, share, G, U]; NaN counts as -inf."""
    if scores.shape[3] == 1:
        joined = scores[:, :, :, 0]
    else:
        joined = scores.masked_fill(~real[:, :, None, :, None], -torch.inf).movedim(3, -1).contiguous().logsumexp(-1)
    return torch.where(joined.isnan(), -torch.inf, joined)


def _add_heads(scores: Tensor) -> Tensor:
    """Two numbers have one sum in whatever order; of more, each column's are added in the same."""
    return scores.sum(2) if scores.shape[2] <= 2 else scores.movedim(2, -1).contiguous().sum(-1)


def _rows_last(scores: Tensor) -> Tensor:
    """[P, share, U, G·R] of scores [P, share, G, R, U]: each block's numbers lie side by side and are added in one order.

    Over outer dimensions torch adds the columns behind the last whole vector in another order than those before them, so that
    blocks of equal keys had scores of different last bits, and a tie went to the higher one.
    """
    return scores.flatten(2, 3).movedim(2, -1).contiguous()
