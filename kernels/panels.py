"""Panels: how the torch twins batch query tiles. A panel is one or more neighbouring tiles and the union of their nodes.

Neighbouring queries choose mostly the same nodes. At token level, gathering keys once per query would copy each block up to 64
times over, so 64 neighbouring queries share one gather of the union and a mask keeps their sets apart; at tile level the
panel is the tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pyramidbench.tiling import Tiling

PANEL_QUERIES = 64
CHUNK_ELEMENTS = 1 << 22
"""Logits held at a time, 16 MiB in fp32: the fastest of 2^18 to 2^22 on two cores at 64k tokens (docs/performance.md)."""
CUDA_CHUNKS = 16
"""Times as many on a GPU, 256 MiB as for the torch rules (kernels.attending): at 256k tokens a walk over 128 rows a tile would
otherwise be thousands of chunks of hundreds of launches each."""


@dataclass(frozen=True)
class Panels:
    """P panels of `share` tiles with `rows` query rows each. All index tensors are int64.

    tile: [P, share] tile numbers (repeats of the last tile fill the last panel). row: [P, share, R] query numbers, and
    real: False where a ragged tile has no such row (then `row` repeats the tile's last query).
    """

    tile: Tensor
    row: Tensor
    real: Tensor
    ragged: bool

    def queries(self, q: Tensor) -> Tensor:
        """Rows of q [G, M, D] as [P, share, G, R, D]."""
        return q[:, self.row].permute(1, 2, 0, 3, 4)


def chunk_elements(device_type: str) -> int:
    """Logits that the twins hold at a time on a kind of device."""
    return CHUNK_ELEMENTS if device_type == "cpu" else CUDA_CHUNKS * CHUNK_ELEMENTS


def panels_of(
    tiling: Tiling,
    rows_per_tile: int | None,
    columns: int,
    group: int,
    head_dim: int,
    device: torch.device,
    elements: int | None = None,
) -> Iterator[Panels]:
    """Cut all tiles into chunks of panels: `columns` keys × rows of logits, and × D of gathered keys, fit `elements`.

    rows_per_tile: evenly spaced rows that stand for each tile; None: all of them. elements: `chunk_elements` if None.
    """
    share = min(max(1, PANEL_QUERIES // tiling.query_tile), tiling.tiles)
    rows = min(rows_per_tile or tiling.query_tile, tiling.query_tile)
    panels = -(-tiling.tiles // share)
    chunk = max(1, (elements or chunk_elements(device.type)) // max(1, max(share * rows * group, head_dim) * columns))
    for start in range(0, panels, chunk):
        panel = torch.arange(start, min(start + chunk, panels), device=device)
        tile = (panel[:, None] * share + torch.arange(share, device=device)).clamp(max=tiling.tiles - 1)
        first = tile * tiling.query_tile
        held = (tiling.seq_len_q - first).clamp(max=tiling.query_tile)[..., None]
        spaced = torch.minimum(held, torch.full_like(held, rows))
        step = torch.arange(rows, device=device)
        row = first[..., None] + ((2 * step + 1) * held) // (2 * spaced)
        real = step < spaced
        yield Panels(tile, torch.where(real, row, first[..., None] + held - 1), real, not bool(real.all()))


def unite(nodes: Tensor) -> tuple[Tensor, Tensor]:
    """Union of the node lists of each panel's tiles.

    nodes: int64 [P, share, A], padded with -1. Returns the union [P, U], ascending and padded with -1, and the place of
    every entry of `nodes` in it, [P, share, A] (0 for padding).
    """
    panels, share, width = nodes.shape
    if share == 1:
        return nodes[:, 0], torch.arange(width, device=nodes.device).expand(panels, 1, width)
    end = torch.iinfo(torch.int64).max
    ordered = nodes.masked_fill(nodes < 0, end).flatten(1).sort(dim=-1).values
    fresh = torch.ones_like(ordered, dtype=torch.bool)
    fresh[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    fresh &= ordered != end
    place = fresh.cumsum(-1) - 1
    union_width = max(1, int(fresh.sum(-1).max()))
    union = torch.full((panels, union_width + 1), -1, dtype=torch.int64, device=nodes.device)
    union.scatter_(1, torch.where(fresh, place, union_width), torch.where(fresh, ordered, -1))
    union = union[:, :union_width]
    slot = torch.searchsorted(union.masked_fill(union < 0, end), nodes.clamp(min=0).flatten(1))
    return union, slot.clamp(max=union_width - 1).view(panels, share, width)


def gather(nodes: Tensor, union: Tensor) -> Tensor:
    """Rows of `nodes` [n, …] for each place of the union [P, U]: [P, U, …]; padding gets node 0.

    index_select copies whole rows; indexing with a tensor is five times slower here on a CPU.
    """
    return nodes.index_select(0, union.clamp(min=0).flatten()).unflatten(0, union.shape)


def membership(nodes: Tensor, slot: Tensor, width: int) -> Tensor:
    """Which places of the union each tile lists: bool [P, share, U]."""
    member = torch.zeros((*nodes.shape[:2], width + 1), dtype=torch.bool, device=nodes.device)
    return member.scatter_(-1, torch.where(nodes < 0, width, slot), True)[..., :width]
