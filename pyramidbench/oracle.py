"""The oracle: exact attention of whole rows, streamed over query tiles, and the mass that each key block holds.

It shares no code with the kernels that it judges. Memory: the logits of a few rows at a time, never a whole N × N matrix.
A faster source of block mass may widen it to more tiles, but only after it has agreed with this one on some of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from pyramidbench.problem import Problem, check_tensors
from pyramidbench.selection import BlockSelection
from pyramidbench.tiling import Tiling

CHUNK_ELEMENTS = 1 << 22
MASS_ELEMENTS = 1 << 26
"""Masses that are held at a time where a faster source makes them: every tile of 128 queries of 32 heads at 128k keys."""
MASS_RELATIVE, MASS_ABSOLUTE = 1e-6, 1e-6
"""How far a faster source's mass may be from the oracle's: absolute, and of the mass per unit of the largest logit that a
head's norms allow, since a weight's relative error is its logit's rounding. Ten times what the Triton kernel was measured
to differ from fp64 on an H200: 1e-7, and 1.7e-6 in bf16 and fp16, 3.2e-6 in fp32, where norms allow logits of 30."""


@dataclass(frozen=True)
class ExactRows:
    """What exact attention does on some query tiles.

    mass: [B, H, T, blocks], the share of a tile's attention that each block holds, mean over its rows (0 where a row has
    no key). output: [B, H, T, query_tile, Dv], NaN in rows that a ragged tile lacks; None when no values were given.
    """

    mass: Tensor
    output: Tensor | None


@dataclass(frozen=True)
class TileMass:
    """Block mass on some query tiles: tiles int64 [T], ascending; mass fp32 [B, H, T, blocks]."""

    tiles: Tensor
    mass: Tensor


@runtime_checkable
class MassSource(Protocol):
    """What may compute block mass faster than `exact_rows`: a method, since the engine knows no kernel."""

    def fast_mass(self, q: Tensor, k: Tensor, problem: Problem, tiles: Tensor) -> Tensor | None:
        """Mass of the tiles, fp32 [B, H, T, blocks]; None where nothing faster can run."""
        ...


class OracleDisagreement(Exception):
    """A faster source of block mass differs from the oracle; nothing that it says may be used."""


def block_mass(
    q: Tensor,
    k: Tensor,
    *,
    block_size: int,
    query_tile: int,
    causal: bool = True,
    scale: float | None = None,
    tiles: Tensor | None = None,
) -> Tensor:
    """Exact share of attention that each key block receives, mean over a tile's rows: fp32 [B, H, tiles, blocks].

    q: [B, H, M, D], k: [B, G, N, D]. `tiles` limits the work to some query tiles (int64, default all). A row without a
    key (causal, M > N) contributes 0. Sums run in fp32 (fp64 for fp64 inputs).

    Raises:
        ValueError: tensors that do not form one attention call.
    """
    problem = Problem.of(q, k, causal=causal, scale=scale)
    tiling = Tiling(problem.seq_len_q, problem.seq_len_kv, block_size, query_tile, causal)
    chosen = torch.arange(tiling.tiles, device=q.device) if tiles is None else tiles
    return exact_rows(q, k, None, tiling, problem.scale, chosen).mass


def exact_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    tiling: Tiling,
    scale: float,
    tiles: Tensor,
    selection: BlockSelection | None = None,
    precision: torch.dtype | None = None,
) -> ExactRows:
    """Exact attention on the given tiles; with a selection, restricted to its blocks.

    Everything is computed in `precision` (default fp32, or fp64 for fp64 inputs), one head at a time.
    """
    check_tensors(q, k, v)
    wide = precision or torch.promote_types(q.dtype, torch.float32)
    batch, heads, kv_heads = q.shape[0], q.shape[1], k.shape[1]
    group = heads // kv_heads
    mass = torch.zeros((batch, heads, len(tiles), tiling.blocks), dtype=wide, device=q.device)
    output = None
    if v is not None:
        output = torch.full(
            (batch, heads, len(tiles), tiling.query_tile, v.shape[-1]), torch.nan, dtype=wide, device=q.device
        )
    for b in range(batch):
        for g in range(kv_heads):
            mine = slice(g * group, (g + 1) * group)
            keys = k[b, g].to(wide)
            values = None if v is None else v[b, g].to(wide)
            for part in row_chunks(tiling, tiles, group):
                allowed = None if selection is None else allowed_blocks(selection, b, mine, heads, tiles[part])
                rows = TileRows(tiling, tiles[part])
                weights = rows.weights(q[b, mine].to(wide) * scale, keys, allowed)
                mass[b, mine, part] = rows.block_means(weights)
                if values is not None and output is not None:
                    exact = (weights @ values[: weights.shape[-1]]).view(group, -1, tiling.query_tile, values.shape[-1])
                    output[b, mine, part] = exact.masked_fill(~rows.real[None, :, :, None], torch.nan)
    return ExactRows(mass, output)


def sample_tiles(tiling: Tiling, heads: int, elements: int, device: torch.device, *, fewest: int = 16) -> Tensor:
    """Evenly spaced tiles whose rows × keys × heads stay within `elements` (but `fewest` at least), ascending."""
    affordable = elements // max(1, tiling.query_tile * tiling.seq_len_kv * heads)
    count = min(tiling.tiles, max(fewest, affordable))
    return ((2 * torch.arange(count, device=device) + 1) * tiling.tiles) // (2 * count)


def widened(
    q: Tensor, k: Tensor, problem: Problem, tiling: Tiling, source: MassSource, checked: TileMass
) -> TileMass | None:
    """Mass from a faster source on all tiles, or on as many as fit in MASS_ELEMENTS; None where it cannot run.

    `checked` holds the oracle's own mass of some tiles: they are among those returned, and must agree.

    Raises:
        OracleDisagreement: they do not.
    """
    affordable = max(1, MASS_ELEMENTS // max(1, problem.batch * problem.heads * tiling.blocks))
    count = min(tiling.tiles, affordable)
    spread = ((2 * torch.arange(count, device=q.device) + 1) * tiling.tiles) // (2 * count)
    tiles = torch.cat([spread, checked.tiles]).unique()
    mass = source.fast_mass(q, k, problem, tiles)
    if mass is None:
        return None
    again = mass[:, :, torch.searchsorted(tiles, checked.tiles)]
    apart = (again - checked.mass).abs()
    relative = MASS_RELATIVE * _largest_logit(q, k, problem.scale)[..., None, None].clamp(min=1)
    if not bool((apart <= relative * checked.mass + MASS_ABSOLUTE).all()):
        raise OracleDisagreement(
            f"the fast block mass is up to {float(apart.max()):.3g} from the oracle's on {len(checked.tiles)} tiles; "
            f"allowed: {float(relative.max()):.2g} of it + {MASS_ABSOLUTE:g}. Report this; nothing was judged."
        )
    return TileMass(tiles, mass)


def _largest_logit(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Bound on any |logit| of each head by the norms of its queries and keys: fp32 [B, H]."""
    queries, keys = (torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).amax(-1) for x in (q, k))
    return queries * keys.repeat_interleave(q.shape[1] // k.shape[1], dim=1) * abs(scale)


class TileRows:
    """The query rows of some tiles: [T, query_tile], ragged ones marked unreal."""

    def __init__(self, tiling: Tiling, tiles: Tensor) -> None:
        self.tiling = tiling
        row = tiles[:, None] * tiling.query_tile + torch.arange(tiling.query_tile, device=tiles.device)
        self.real = row < tiling.seq_len_q
        self.row = row.clamp(max=tiling.seq_len_q - 1)
        self.position = self.row + tiling.offset

    def weights(self, q: Tensor, keys: Tensor, allowed: Tensor | None) -> Tensor:
        """Softmax weights [g, T·query_tile, seen keys]; a row that sees nothing is all 0."""
        tiling = self.tiling
        seen = min(tiling.seq_len_kv, int(self.position.max()) + 1) if tiling.causal else tiling.seq_len_kv
        seen = min(tiling.seq_len_kv, max(1, -(-seen // tiling.block_size)) * tiling.block_size)
        logits = q[:, self.row.flatten()] @ keys[:seen].mT
        key = torch.arange(seen, device=q.device)
        if tiling.causal:
            logits.masked_fill_(key > self.position.flatten()[:, None], -torch.inf)
        if allowed is not None:
            hidden = ~allowed[..., key // tiling.block_size]
            logits.masked_fill_(hidden.repeat_interleave(tiling.query_tile, 1), -torch.inf)
        return logits.softmax(-1).masked_fill_(self.blind(allowed)[..., None], 0)

    def blind(self, allowed: Tensor | None) -> Tensor:
        """Rows that see no key at all: bool [T·query_tile], or [g or 1, T·query_tile] under a selection."""
        if allowed is None:
            return (self.position < 0).flatten() & self.tiling.causal
        if not self.tiling.causal:
            return ~allowed.any(-1).repeat_interleave(self.tiling.query_tile, 1)
        started = torch.arange(self.tiling.blocks, device=allowed.device) * self.tiling.block_size
        first = torch.where(allowed, started, self.tiling.seq_len_kv).amin(-1)
        return first.repeat_interleave(self.tiling.query_tile, 1) > self.position.flatten()

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
