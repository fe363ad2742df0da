"""BlockSelection, the list of key blocks that each query tile attends to, and the operations on such lists.

Lists are ascending, int32, padded with -1 at the end. `heads` is the number of sets kept apart: the key/value heads
when a GQA group shares its set, the query heads when each has its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from pyramidbench.tiling import Forced, Tiling

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


@dataclass(frozen=True)
class BlockSelection:
    """Which key blocks each query tile attends to.

    indices: int32 [B, heads, tiles, S], ascending, padded with -1. counts: int32 [B, heads, tiles], the blocks listed.
    A tile with count 0 attends to nothing: its output is 0.
    """

    indices: Tensor
    counts: Tensor
    block_size: int
    query_tile: int
    seq_len_q: int
    seq_len_kv: int
    causal: bool

    @property
    def tiling(self) -> Tiling:
        return Tiling(self.seq_len_q, self.seq_len_kv, self.block_size, self.query_tile, self.causal)

    @classmethod
    def from_indices(cls, indices: Tensor, tiling: Tiling) -> BlockSelection:
        """Wrap lists [B, heads, tiles, S] that are ascending and padded with -1 at the end."""
        return cls.of(indices.to(torch.int32), (indices >= 0).sum(-1, dtype=torch.int32), tiling)

    @classmethod
    def of(cls, indices: Tensor, counts: Tensor, tiling: Tiling) -> BlockSelection:
        """Wrap lists whose lengths are known already; both int32."""
        return cls(
            indices,
            counts,
            tiling.block_size,
            tiling.query_tile,
            tiling.seq_len_q,
            tiling.seq_len_kv,
            tiling.causal,
        )

    def mask(self) -> Tensor:
        """Block mask, bool [B, heads, tiles, blocks]: True where a block is listed."""
        shape = (*self.indices.shape[:-1], self.tiling.blocks + 1)
        mask = torch.zeros(shape, dtype=torch.bool, device=self.indices.device)
        slot = torch.where(self.indices < 0, self.tiling.blocks, self.indices).long()
        return mask.scatter_(-1, slot, True)[..., :-1]

    def pairs(self) -> Tensor:
        """Attended (query, key) pairs, int64 [B, heads]."""
        tile = torch.arange(self.tiling.tiles, device=self.indices.device)[:, None]
        return self.tiling.pairs(tile, self.indices.long()).sum((-1, -2))

    def density(self) -> float:
        """Attended pairs ÷ pairs that dense attention computes, mean over heads. Dense is 1, causal or not."""
        return float(self.pairs().double().mean()) / max(1, self.tiling.visible_pairs())

    def check(self) -> None:
        """Raise ValueError unless every list is in range, ascending, without repeats, padded at the end, and causal."""
        indices, tiling = self.indices.long(), self.tiling
        listed = indices >= 0
        if bool((indices >= tiling.blocks).any()) or bool((indices < -1).any()):
            raise ValueError(f"a selected block is outside 0 … {tiling.blocks - 1}")
        if bool((listed.sum(-1) != self.counts).any()) or bool((listed[..., 1:] & ~listed[..., :-1]).any()):
            raise ValueError("counts disagree with the lists, or padding stands before a listed block")
        if bool((listed[..., 1:] & (indices[..., 1:] <= indices[..., :-1])).any()):
            raise ValueError("a list is not strictly ascending: a block is repeated or out of order")
        tile = torch.arange(tiling.tiles, device=indices.device)[:, None]
        if tiling.causal and bool((listed & (indices * tiling.block_size > tiling.last_position(tile))).any()):
            raise ValueError("a selected block starts after the tile's last query")

    def parted(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Counts and lists of the blocks that some query of a tile sees in part, then of those that every query sees whole.

        int32 [B, heads, tiles] and [B, heads, tiles, S'], S' at most the number of blocks; behind the counts stand zeros.
        """
        tiling, indices = self.tiling, self.indices[..., : self.tiling.blocks]
        tile = torch.arange(tiling.tiles, device=indices.device)[:, None]
        whole = (indices >= 0) & tiling.complete(indices, tile, tiling.block_size)
        whole &= (indices + 1) * tiling.block_size <= tiling.seq_len_kv
        # Lists ascend, so the blocks that are seen whole come first.
        first = whole.sum(-1, dtype=torch.int32)
        slot = torch.arange(indices.shape[-1], device=indices.device)
        partly = indices.gather(-1, (slot + first[..., None]).clamp(max=indices.shape[-1] - 1).long())
        counts = self.counts - first
        return counts, partly.where(slot < counts[..., None], 0), first, indices.where(whole, 0)

    def to_block_mask(self, heads: int | None = None, *, compiled: bool = False) -> BlockMask:
        """The same sets as a FlexAttention BlockMask, repeated over `heads` query heads (default: the sets' own number).

        FlexAttention's compiled kernels want both block sizes to be multiples of 16, and 128 × 128 for best speed. They visit
        the listed blocks alone; with `compiled` the mask's function leaves the lists out, which eager FlexAttention needs.
        """
        from torch.nn.attention.flex_attention import BlockMask

        tiling = self.tiling
        group = (heads or self.indices.shape[1]) // self.indices.shape[1]
        counts, partly, whole_counts, whole = (x.repeat_interleave(group, dim=1) for x in self.parted())
        # Its transposition takes the width of a list for the number of blocks.
        partly, whole = (pad(x, (0, tiling.blocks - x.shape[-1])) for x in (partly, whole))
        listed = None if compiled else self.mask().repeat_interleave(group, dim=1)
        offset, causal = tiling.offset, tiling.causal

        def before(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001
            return key <= query + offset if causal else key >= 0

        def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            # Without torch.compile, FlexAttention looks at this function alone and not at the lists.
            assert listed is not None
            kept = listed[batch, head, query // tiling.query_tile, key // tiling.block_size]
            return kept & before(batch, head, query, key)

        return BlockMask.from_kv_blocks(
            counts,
            partly,
            whole_counts,
            whole,
            BLOCK_SIZE=(self.query_tile, self.block_size),
            mask_mod=before if compiled else seen,
            seq_lengths=(self.seq_len_q, self.seq_len_kv),
        )


SORTED_ELEMENTS = 1 << 14
"""Scores that are sorted whole: a decoded token's are few, and whether some of them are tied is then not asked, for which a
GPU would have to be waited for."""


def top_indices(scores: Tensor, count: int) -> Tensor:
    """Positions of the `count` highest scores in the last dimension, ties to the lower position, int64.

    -inf marks what may not be taken and NaN counts as worst; the positions come in ascending order, padded with -1.
    """
    scores = torch.where(scores.isnan(), torch.finfo(scores.dtype).min, scores)
    width = min(count, scores.shape[-1])
    if width == 0:
        return torch.full((*scores.shape[:-1], 0), -1, dtype=torch.int64, device=scores.device)
    if scores.numel() <= SORTED_ELEMENTS:
        values, positions = (x[..., :width] for x in scores.sort(dim=-1, descending=True, stable=True))
        return _ascending(values, positions, scores.shape[-1])
    values, positions = scores.topk(width, dim=-1)
    worst = values[..., -1:]
    tied = ((scores >= worst).sum(-1, keepdim=True) > width) & (worst > -torch.inf)
    if bool(tied.any()):
        ordered = scores[tied[..., 0]].sort(dim=-1, descending=True, stable=True)
        positions[tied[..., 0]] = ordered.indices[..., :width]
        values[tied[..., 0]] = ordered.values[..., :width]
    return _ascending(values, positions, scores.shape[-1])


def _ascending(values: Tensor, positions: Tensor, outside: int) -> Tensor:
    """Positions in ascending order; -1, behind them, for those whose value is -inf."""
    positions = positions.masked_fill(values == -torch.inf, outside).sort(dim=-1).values
    return positions.masked_fill(positions == outside, -1)


def merge(*lists: Tensor) -> Tensor:
    """Union of block lists that share no block: one ascending list, padded with -1 and trimmed to its widest row."""
    joined = torch.cat(lists, dim=-1)
    end = torch.iinfo(joined.dtype).max
    joined = joined.masked_fill(joined < 0, end).sort(dim=-1).values
    joined = joined.masked_fill(joined == end, -1)
    width = int((joined >= 0).sum(-1).max()) if joined.numel() else 0
    return joined[..., :width]


def stack_lists(lists: Sequence[Tensor]) -> Tensor:
    """Lists [T_i, S_i] below one another, padded with -1 to the widest: [ΣT, S]."""
    width = max(part.shape[-1] for part in lists)
    return torch.cat([torch.nn.functional.pad(part, (0, width - part.shape[-1]), value=-1) for part in lists])


def ranked_count(top_k: int, forced: Forced, forced_in_budget: bool) -> Tensor:
    """Blocks that each tile keeps by rank, int64 [T]: K, or K less its forced blocks when K counts them."""
    full = torch.full_like(forced.sink_end, top_k)
    return (full - forced.count()).clamp(min=0) if forced_in_budget else full


def top_blocks(scores: Tensor, tile: Tensor, tiling: Tiling, forced: Forced, keep: Tensor) -> Tensor:
    """Forced blocks and the best `keep` eligible blocks of each tile.

    scores: [..., T, blocks]; tile: int64 [T]; keep: int64 [T]. Returns int64 lists [..., T, S], padded with -1.
    """
    block = torch.arange(tiling.blocks, device=scores.device).expand(len(tile), -1)
    may = tiling.complete(block, tile[:, None], tiling.block_size) & ~forced.contains(block, 1)
    scores = torch.where(may, scores.clamp(min=torch.finfo(scores.dtype).min), -torch.inf)
    best = top_n_indices(scores, keep)
    listed = forced.list().expand(*scores.shape[:-1], -1)
    return merge(best, listed)


def top_n_indices(scores: Tensor, keep: Tensor) -> Tensor:
    """`top_indices` with a count of its own for each row of the second-last dimension (keep: int64 [T])."""
    narrowest, widest = torch.stack(keep.aminmax()).tolist() if keep.numel() else (0, 0)
    if narrowest == widest:
        return top_indices(scores, widest)
    best = torch.full((*scores.shape[:-1], min(widest, scores.shape[-1])), -1, dtype=torch.int64, device=scores.device)
    for count in keep.unique().tolist():
        rows = keep == count
        part = top_indices(scores[..., rows, :], count)
        best[..., rows, : part.shape[-1]] = part
    return best


@contextmanager
def frozen(device: torch.device) -> Iterator[None]:
    """What is computed inside is a constant to gradients, in its own dtypes: autocast does not reach it."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield
