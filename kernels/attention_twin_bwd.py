"""Backward of the attention over listed blocks, as a plain torch twin: dq, dk and dv from the saved log-sum-exp.

Panel by panel, as the forward (attention.py): P = exp(s·QKᵀ - lse), dV += PᵀdO, dS = P ∘ (dO·Vᵀ - Δ) with
Δ = rowsum(dO ∘ O), dQ = s·dS·K, dK += s·dSᵀ·Q. dK and dV of a panel's blocks are added into buffers of all keys, in
query order. Cost: 10·D operations a (row, key) pair; memory: the gradients in fp32 (fp64 for fp64 inputs) and one
chunk of panels, so O(N). The same bits on every run on a CPU; on CUDA only under torch.use_deterministic_algorithms.
Source: FlashAttention-2 (arXiv 2307.08691).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyramidbench.kernels.attention import AttendedSet, attended_sets, panel_of
from pyramidbench.kernels.panels import Panels, gather, panels_of
from pyramidbench.selection import BlockSelection


def sparse_attention_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor, selection: BlockSelection, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients dq, dk and dv in the shapes and dtypes of q, k and v, given d_out and what the forward returned.

    out and d_out: [B, H, M, Dv]; lse: fp32 (fp64) [B, H, M], -inf for a row with no key, which passes no gradient.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    delta = (d_out.to(wide) * out.to(wide)).sum(-1)
    d_q = torch.zeros(q.shape, dtype=wide, device=q.device)
    padded = selection.tiling.blocks * selection.block_size
    d_k, d_v = (torch.zeros((*x.shape[:2], padded, x.shape[3]), dtype=wide, device=x.device) for x in (k, v))
    for part in attended_sets(q, k, v, selection, scale):
        at, kv_at = (part.batch, part.heads), (part.batch, part.kv_head)
        rows = _Rows(lse[at], delta[at], d_out[at])
        blocks = tuple(x[kv_at].unflatten(0, (-1, selection.block_size)) for x in (d_k, d_v))
        _differentiate_set(part, rows, d_q[at], *blocks)
    length = k.shape[2]
    return d_q.to(q.dtype), d_k[:, :, :length].to(k.dtype).contiguous(), d_v[:, :, :length].to(v.dtype).contiguous()


@dataclass(frozen=True)
class _Rows:
    """What the backward knows of each row of a set: log-sum-exp and Δ [g, M], and dO [g, M, Dv]."""

    lse: Tensor
    delta: Tensor
    d_out: Tensor


def _differentiate_set(part: AttendedSet, rows: _Rows, d_q: Tensor, d_keys: Tensor, d_values: Tensor) -> None:
    """Write dq [g, M, D], and add to dk [n, C, D] and dv [n, C, Dv], of one set."""
    columns = max(1, part.indices.shape[1]) * part.selection.block_size
    dims = part.keys.shape[-1] + part.values.shape[-1]
    begin, length = 0, part.q.shape[1]
    for panels in panels_of(part.selection.tiling, None, columns, part.q.shape[0], dims, part.q.device):
        held = min(panels.row.numel(), length - begin)
        d_queries, union, d_k, d_v = _differentiate_panels(part, panels, rows, held)
        d_q[:, begin : begin + held] = d_queries[:, :held]
        blocks = (union.shape[1], part.selection.block_size)
        for total, added in ((d_keys, d_k), (d_values, d_v)):
            total.index_add_(0, union.clamp(min=0).flatten(), added.unflatten(1, blocks).flatten(0, 1))
        begin += held


def _differentiate_panels(
    part: AttendedSet, panels: Panels, rows: _Rows, held: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq of a chunk in query order [g, rows, D], its blocks [P, U], and what they add to dk and dv, [P, U·C, D or Dv].

    Only the first `held` rows in query order exist; the others repeat the last one, and must not count twice.
    """
    queries, union, bias, blind = panel_of(part, panels)
    exists = (torch.arange(blind.numel(), device=union.device) < held).view(blind.shape)
    group = queries.shape[1]
    # [P, g·rows, …]: all heads of the set meet the same gathered keys and values, [P, U·C, …].
    queries = queries.flatten(1, 2)
    keys, values = (gather(x, union).flatten(1, 2) for x in (part.keys, part.values))
    lse, delta = (panels.queries(x[..., None]).transpose(1, 2).flatten(1, 3) for x in (rows.lse, rows.delta))
    d_out = panels.queries(rows.d_out).transpose(1, 2).flatten(1, 3).to(keys.dtype)
    counts = (exists & ~blind)[:, None].expand(-1, group, -1).flatten(1)[..., None]
    logits = (queries @ keys.mT).mul_(part.scale)
    logits = logits.unflatten(1, (group, -1)).add_(bias[:, None]).flatten(1, 2)
    weights = logits.sub_(lse.masked_fill(~counts, 0)).exp_().masked_fill_(~counts, 0)
    d_values = weights.mT @ d_out
    d_logits = (d_out @ values.mT).sub_(delta).mul_(weights).mul_(part.scale)
    d_queries = (d_logits @ keys).unflatten(1, (group, -1)).transpose(0, 1).flatten(1, 2)
    return d_queries, union, d_logits.mT @ queries, d_values
