"""Exact attention over the listed blocks: softmax over the keys of a tile's blocks, with the element mask key ≤ position.

Cost: 4·B·H·D·P operations for P attended pairs per head (2·(D + Dv) when Dv differs); the keys and values of the listed
blocks are read once per tile of a key/value head. A query with no key gets output 0 and log-sum-exp -inf, and passes no
gradient. The indices are constants: gradients flow to q, k and v only.
Source: FlashAttention-2 (arXiv 2307.08691) for the saved log-sum-exp; block lists as in "Block Sparse Attention with
Log-Linear Complexity" (arXiv 2609.31093).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from pyramidbench.kernels.panels import Panels, gather, membership, panels_of, unite
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
    check_call(q, k, v, selection)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    heads = [torch.cat(list(_over_panels(part, _attend)), dim=1) for part in attended_sets(q, k, v, selection, scale)]
    return torch.stack([head[:, : q.shape[2]] for head in heads]).view(*q.shape[:3], v.shape[-1]).to(q.dtype)


def sparse_log_sum_exp(q: Tensor, k: Tensor, selection: BlockSelection, *, scale: float | None = None) -> Tensor:
    """Log-sum-exp of each row's logits over its selected keys, fp32 (fp64) [B, H, M]; -inf for a row with no key.

    Shapes and errors as for `sparse_attention`.
    """
    check_call(q, k, k, selection)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    heads = [
        torch.cat(list(_over_panels(part, _log_sum_exp)), dim=1) for part in attended_sets(q, k, k, selection, scale)
    ]
    return torch.stack([head[:, : q.shape[2]] for head in heads]).view(q.shape[:3])


def check_call(q: Tensor, k: Tensor, v: Tensor, selection: BlockSelection) -> None:
    """Raise ValueError unless the tensors fit together and the selection was made for them."""
    check_tensors(q, k, v)
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


@dataclass(frozen=True)
class AttendedSet:
    """One set of blocks and what it attends with: q [g, M, D], keys [n, C, D], values [n, C, Dv], indices [T, S].

    batch, heads and kv_head say where in the call's tensors these lie.
    """

    batch: int
    heads: slice
    kv_head: int
    q: Tensor
    keys: Tensor
    values: Tensor
    indices: Tensor
    selection: BlockSelection
    scale: float


def attended_sets(q: Tensor, k: Tensor, v: Tensor, selection: BlockSelection, scale: float) -> Iterator[AttendedSet]:
    """The sets of blocks one by one, each with the heads that share it."""
    wide = torch.promote_types(q.dtype, torch.float32)
    batch, sets = selection.indices.shape[:2]
    tail = -k.shape[2] % selection.block_size
    for index in range(batch * sets):
        b, s = divmod(index, sets)
        heads, kv_head = slice(s * q.shape[1] // sets, (s + 1) * q.shape[1] // sets), s * k.shape[1] // sets
        keys, values = (
            torch.nn.functional.pad(x[b, kv_head].to(wide), (0, 0, 0, tail)).unflatten(0, (-1, selection.block_size))
            for x in (k, v)
        )
        yield AttendedSet(
            b, heads, kv_head, q[b, heads], keys, values, selection.indices[b, s].long(), selection, scale
        )


def _over_panels(part: AttendedSet, compute: Callable[[AttendedSet, Panels], Tensor]) -> Iterator[Tensor]:
    """`compute` on every chunk of panels; recomputed in a backward pass, so that no chunk's logits outlive it."""
    columns = max(1, part.indices.shape[1]) * part.selection.block_size
    dims = part.keys.shape[-1] + part.values.shape[-1]
    tracked = torch.is_grad_enabled() and any(x.requires_grad for x in (part.q, part.keys, part.values))
    for panels in panels_of(part.selection.tiling, None, columns, part.q.shape[0], dims, part.q.device):
        yield checkpoint(compute, part, panels, use_reentrant=False) if tracked else compute(part, panels)


def panel_of(part: AttendedSet, panels: Panels) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A chunk's queries [P, g, rows, D], union of blocks [P, U], and what its rows see.

    The bias [P, rows, U·C] is 0 for a key that a row sees and -inf for another; rows that see none are blind, [P, rows].
    """
    tiling = part.selection.tiling
    nodes = part.indices[panels.tile]
    union, slot = unite(nodes)
    member = (membership(nodes, slot, union.shape[1]) & (union >= 0)[:, None])[:, :, None]
    first = (union * tiling.block_size).to(torch.int32)
    key = (first[..., None] + torch.arange(tiling.block_size, dtype=torch.int32, device=union.device)).flatten(1)
    last = panels.row + tiling.offset if tiling.causal else torch.full_like(panels.row, tiling.seq_len_kv - 1)
    last = last[..., None].to(torch.int32)
    seen = (key[:, None, None] <= last) & member.repeat_interleave(tiling.block_size, -1)
    blind = ~((first[:, None, None] <= last) & member).any(-1)
    bias = torch.zeros((), dtype=part.keys.dtype, device=union.device).where(seen, -torch.inf)
    queries = panels.queries(part.q).transpose(1, 2).flatten(2, 3).to(part.keys.dtype)
    return queries, union, bias.flatten(1, 2), blind.flatten(1)


def _attend(part: AttendedSet, panels: Panels) -> Tensor:
    """Output of a chunk in query order, [g, rows, Dv]: dense attention over the gathered blocks, under their mask."""
    queries, union, bias, blind = panel_of(part, panels)
    heads = (-1, queries.shape[1], -1, -1)
    keys, values = (gather(x, union).flatten(1, 2)[:, None].expand(heads) for x in (part.keys, part.values))
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        output = torch.nn.functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=bias[:, None], scale=part.scale
        )
    return output.masked_fill(blind[:, None, :, None], 0).transpose(0, 1).flatten(1, 2)


def _log_sum_exp(part: AttendedSet, panels: Panels) -> Tensor:
    """Log-sum-exp of a chunk in query order, [g, rows]."""
    queries, union, bias, _ = panel_of(part, panels)
    # Heads side by side: a product that broadcasts the keys over them would copy the keys for each.
    logits = queries.flatten(1, 2) @ gather(part.keys, union).flatten(1, 2).mT * part.scale
    return (logits.unflatten(1, queries.shape[1:3]) + bias[:, None]).logsumexp(-1).transpose(0, 1).flatten(1)
