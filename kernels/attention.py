"""Exact attention over the listed blocks: softmax over the keys of a tile's blocks, with the element mask key ≤ position.

Cost: 4·B·H·D·P operations for P attended pairs per head (2·(D + Dv) when Dv differs); the keys and values of the listed
blocks are read once per tile of a key/value head. A query with no key gets output 0 and log-sum-exp -inf, and passes no
gradient. The indices are constants: gradients flow to q, k and v only.
Source: FlashAttention-2 (arXiv 2307.08691) for the saved log-sum-exp; block lists as in "Block Sparse Attention with
Log-Linear Complexity" (arXiv 2609.31093).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pyramidbench.kernels.panels import Panels, membership, panels_of, unite
from pyramidbench.problem import check_tensors
from pyramidbench.selection import BlockSelection


def sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, selection: BlockSelection, *, scale: float | None = None
) -> Tensor:
    """Attention of each query to the keys of its tile's selected blocks: [B, H, M, Dv] in q's dtype.

    q: [B, H, M, D]; k: [B, G, N, D]; v: [B, G, N, Dv]; the selection's heads are G, or H when each query head has its
    own set. scale multiplies the logits (default 1/√D). Sums run in fp32 (fp64 for fp64 inputs).

    Raises:
        ValueError: tensors that do not fit together, or a selection made for other lengths or heads.
    """
    output, _ = sparse_attention_lse(q, k, v, selection, scale=scale)
    return output


def sparse_attention_lse(
    q: Tensor, k: Tensor, v: Tensor, selection: BlockSelection, *, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """`sparse_attention` and the log-sum-exp of each row's logits, fp32 (fp64) [B, H, M]; -inf for a row with no key."""
    check_tensors(q, k, v)
    _check_selection(q, k, selection)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    batch, sets = selection.indices.shape[:2]
    outputs, sums = [], []
    for index in range(batch * sets):
        b, s = divmod(index, sets)
        heads = slice(s * q.shape[1] // sets, (s + 1) * q.shape[1] // sets)
        kv_head = s * k.shape[1] // sets
        output, row_sum = _attend_set(
            q[b, heads], k[b, kv_head], v[b, kv_head], selection, selection.indices[b, s], scale
        )
        outputs.append(output)
        sums.append(row_sum)
    output = torch.stack(outputs).view(batch, q.shape[1], q.shape[2], v.shape[-1])
    return output.to(q.dtype), torch.stack(sums).view(batch, q.shape[1], q.shape[2])


def _check_selection(q: Tensor, k: Tensor, selection: BlockSelection) -> None:
    if (selection.seq_len_q, selection.seq_len_kv) != (q.shape[2], k.shape[2]):
        raise ValueError(
            f"the selection was made for {selection.seq_len_q} queries and {selection.seq_len_kv} keys; "
            f"q and k have {q.shape[2]} and {k.shape[2]}"
        )
    batch, sets = selection.indices.shape[:2]
    if batch != q.shape[0] or sets not in (k.shape[1], q.shape[1]):
        raise ValueError(
            f"the selection has batch {batch} and {sets} sets of blocks; accepted here: batch {q.shape[0]} and "
            f"{k.shape[1]} sets (one per key/value head) or {q.shape[1]} (one per query head)"
        )


def _attend_set(
    q: Tensor, k: Tensor, v: Tensor, selection: BlockSelection, indices: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """One set of blocks: q [g, M, D], k [N, D], v [N, Dv], indices [T, S] → output [g, M, Dv], log-sum-exp [g, M]."""
    wide = torch.promote_types(q.dtype, torch.float32)
    tiling = selection.tiling
    tail = -k.shape[0] % tiling.block_size
    k_blocks = torch.nn.functional.pad(k.to(wide), (0, 0, 0, tail)).unflatten(0, (-1, tiling.block_size))
    v_blocks = torch.nn.functional.pad(v.to(wide), (0, 0, 0, tail)).unflatten(0, (-1, tiling.block_size))
    group, width = q.shape[0], max(1, indices.shape[1])
    outputs, sums = [], []
    for panels in panels_of(tiling, None, width * tiling.block_size, group, k.shape[-1] + v.shape[-1], q.device):
        arguments = (q, k_blocks, v_blocks, indices.long(), panels, selection, scale)
        tracked = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        # Recomputed in the backward pass, so that no chunk's logits outlive it.
        part = checkpoint(_attend_panels, *arguments, use_reentrant=False) if tracked else _attend_panels(*arguments)
        outputs.append(part[0])
        sums.append(part[1])
    return torch.cat(outputs, dim=1)[:, : q.shape[1]], torch.cat(sums, dim=1)[:, : q.shape[1]]


def _attend_panels(
    q: Tensor,
    k_blocks: Tensor,
    v_blocks: Tensor,
    indices: Tensor,
    panels: Panels,
    selection: BlockSelection,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of a chunk, in query order: [g, rows, Dv] and [g, rows]."""
    tiling = selection.tiling
    queries = panels.queries(q).to(k_blocks.dtype) * scale
    nodes = indices[panels.tile]
    union, slot = unite(nodes)
    member = membership(nodes, slot, union.shape[1]) & (union >= 0)[:, None]
    listed = union.clamp(min=0)
    keys, values = k_blocks[listed].flatten(1, 2), v_blocks[listed].flatten(1, 2)
    key = (union[..., None] * tiling.block_size + torch.arange(tiling.block_size, device=q.device)).flatten(1)
    last = panels.row + tiling.offset if tiling.causal else torch.full_like(panels.row, tiling.seq_len_kv - 1)
    seen = member.repeat_interleave(tiling.block_size, -1)[:, :, None] & (key[:, None, None] <= last[..., None])
    logits = torch.bmm(queries.flatten(1, 3), keys.mT).unflatten(1, queries.shape[1:4])
    logits = logits.masked_fill(~seen[:, :, None], -torch.inf)
    row_sum = logits.logsumexp(-1, keepdim=True)
    weights = (logits - torch.where(row_sum == -torch.inf, 0, row_sum)).exp()
    output = torch.bmm(weights.flatten(1, 3), values).unflatten(1, queries.shape[1:4])
    rows = output.permute(2, 0, 1, 3, 4).flatten(1, 3), row_sum[..., 0].permute(2, 0, 1, 3).flatten(1)
    return rows
