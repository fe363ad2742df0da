"""The oracle: exact attention of whole rows, streamed over query tiles, and the mass that each key block holds.

It shares no code with the kernels that it judges. Memory: the logits of a few rows at a time, never a whole N × N matrix.
A faster source of block mass may widen it to more tiles, but only after it has agreed with this one on some of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from pyramidbench import oracle_rows
from pyramidbench.oracle_rows import TileRows, allowed_blocks, row_chunks
from pyramidbench.problem import Problem, check_tensors
from pyramidbench.selection import BlockSelection
from pyramidbench.tiling import Tiling

HEAD_ELEMENTS = 1 << 26
"""Numbers of keys and values that several heads have together at most: 512 MiB in fp64."""
FEW_ROWS = 16
"""Rows of a head up to which several heads are taken at once: those of a step of decoding."""
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

    Everything is computed in `precision` (default fp32, or fp64 for fp64 inputs), one key/value head at a time, or several
    where their keys and logits are few.
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
    every = list(product(range(batch), range(kv_heads)))
    step = heads_at_once(q, k, tiling, tiles)
    for pairs in (every[first : first + step] for first in range(0, len(every), step)):
        keys = _heads(k, pairs, wide)
        values = None if v is None else _heads(v, pairs, wide)
        places = [(b, slice(g * group, (g + 1) * group)) for b, g in pairs]
        queries = torch.cat([q[place] for place in places]).to(wide) * scale
        for part in row_chunks(tiling, tiles, group):
            allowed = None
            if selection is not None:
                lists = [allowed_blocks(selection, b, mine, heads, tiles[part]) for b, mine in places]
                allowed = lists[0] if len(lists) == 1 else torch.cat([x.expand(group, -1, -1) for x in lists])
            rows = TileRows(tiling, tiles[part])
            weights = rows.weights(queries, keys, allowed)
            masses = rows.block_means(weights).split(group)
            exact = None if values is None else rows.outputs(weights, values).split(group)
            for index, (b, mine) in enumerate(places):
                mass[b, mine, part] = masses[index]
                if exact is not None and output is not None:
                    output[b, mine, part] = exact[index]
    return ExactRows(mass, output)


def heads_at_once(q: Tensor, k: Tensor, tiling: Tiling, tiles: Tensor) -> int:
    """Key/value heads of few rows whose logits are no more than a chunk, and keys and values HEAD_ELEMENTS; else 1.

    A step of decoding has a row a head: 512 heads of 64 sequences, each by itself, would be launching and little else.
    """
    rows = len(tiles) * tiling.query_tile
    if rows > FEW_ROWS:
        return 1
    logits = max(1, q.shape[1] // k.shape[1] * rows * tiling.seq_len_kv)
    return max(1, min(oracle_rows.CHUNK_ELEMENTS // logits, HEAD_ELEMENTS // max(1, 2 * k.shape[2] * k.shape[3])))


def _heads(x: Tensor, pairs: Sequence[tuple[int, int]], dtype: torch.dtype) -> Tensor:
    """Keys or values [P, N, D] of (sequence, head) pairs; of one alone no copy is made beside that in `dtype`."""
    return (x[pairs[0]][None] if len(pairs) == 1 else torch.stack([x[pair] for pair in pairs])).to(dtype)


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
