"""Summary scores of all nodes of short levels, for a window of query tiles: what `kernels.route_descend` walks through.

On a level of a few thousand nodes it costs less to score all nodes for many tiles at once, by matrix products, than to
gather the nodes that each tile may rank: a gathered node is 4·D bytes, its score 4. The scores of a window of tiles are
bounded scratch (kernels.route_window), never a matrix over all queries.
With one scoring row per head `kernels.route_terms` does it; with more, `_score_rows`: Σ_h logsumexp over rows.
Tiling: one program = the rows of a band of neighbouring tiles × a slice of a level, cut where the band sees no more.
Cost: 4·D operations and one exponential per row and node. Bound by the reduction over rows. `kernels.scores` is the twin.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyramidbench.kernels.pooled_queries import POOL_WARPS, pool_shape
from pyramidbench.kernels.route_call import Call, is_summed, score_rows
from pyramidbench.kernels.route_nodes import join_rows, load_nodes, log_keys, query_rows, summary_logits
from pyramidbench.kernels.route_terms import _query_terms, _score_terms
from pyramidbench.kernels.route_window import Levels, Window, window_part

MOST_TILES = 32
"""Tiles whose queries one program of `_query_terms` sums, at most: it holds a positive and a negative sum of each."""

SUMMED_WARPS = 8
"""Warps of a program of `_score_terms` in 16 bits: two a scheduler, since one program fills a multiprocessor's shared memory,
and nothing else runs while a chunk's scores leave. Four were no faster at 16k to 1M keys on an H200."""


def query_shape(query_tile: int, head_dim: int, itemsize: int) -> tuple[int, int]:
    """Tiles whose queries one program sums, and rows of each that it loads at a time."""
    tiles, rows = pool_shape(query_tile, head_dim, itemsize)
    return min(tiles, MOST_TILES), rows


@triton.jit
def _score_rows(
    q_ptr, nodes_ptr, score_ptr, q_strides, scale, tiles, first_tile, window_tiles, limit, slices, columns, sets, kv_heads,
    seq_len_q, seq_len_kv, node_count, lowest_node, lowest_span,
    GROUP: tl.constexpr, QUERY_TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    SCORE_ROWS: tl.constexpr, IS_CAUSAL: tl.constexpr, BRANCHING: tl.constexpr, SLICE: tl.constexpr, CHUNK: tl.constexpr,
    BAND: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, HAS_BOUNDS: tl.constexpr,
):  # fmt: skip
    pair, start_tile, level, column, span, start, end = window_part(
        first_tile, window_tiles, limit, slices, lowest_node, lowest_span, seq_len_q, seq_len_kv, QUERY_TILE, BLOCK_SIZE,
        BRANCHING, BAND, SLICE, IS_CAUSAL,
    )  # fmt: skip
    if end <= start:
        return
    WIDTH: tl.constexpr = 2 * HEAD_DIM if HAS_BOUNDS else HEAD_DIM
    batch, which = pair // sets, pair % sets
    q_base = q_ptr + batch * q_strides[0] + which * GROUP * q_strides[1]
    level_ptr = nodes_ptr + ((batch * kv_heads + which * kv_heads // sets) * node_count + level) * WIDTH
    offs_d = tl.arange(0, BLOCK_D)
    high, low, row_real = query_rows(
        q_base, 0, first_tile + start_tile, tiles, q_strides, seq_len_q, QUERY_TILE, HEAD_DIM, offs_d, GROUP, BAND, HEADS,
        ROWS, SCORE_ROWS, False, HAS_BOUNDS,
    )  # fmt: skip
    tile = start_tile + tl.arange(0, BAND)
    score_at = score_ptr + (pair * window_tiles + tile)[:, None] * columns + column
    for begin in range(start, end, CHUNK):
        node = begin + tl.arange(0, CHUNK)
        inside = node < end
        weight = log_keys(node, span, seq_len_kv, BLOCK_SIZE)
        # of shape [CHUNK, BLOCK_D]
        node_at = level_ptr + node.to(tl.int64)[:, None] * WIDTH + offs_d[None, :]
        u, w = load_nodes(node_at, inside[:, None] & (offs_d < HEAD_DIM)[None, :], HEAD_DIM, HAS_BOUNDS)
        logits = summary_logits(high, low, u, w, HAS_BOUNDS) * scale + weight[None, :]
        # of shape [BAND, CHUNK]
        score = join_rows(logits, row_real, GROUP, BAND, HEADS, ROWS)
        tl.store(score_at + node[None, :], score, mask=(tile < window_tiles)[:, None] & inside[None, :])


@dataclass(frozen=True)
class ScoreTile:
    """Tile sizes of the scoring kernels: BAND tiles × HEADS × ROWS rows meet CHUNK nodes, SLICE nodes a program."""

    BAND: int
    HEADS: int
    ROWS: int
    CHUNK: int
    SLICE: int
    num_warps: int = 4
    num_stages: int = 2


def score_tile(rows: int, group: int, head_dim: int, itemsize: int) -> ScoreTile:
    """Tile sizes for `rows` scoring rows of each of `group` heads; rows 0: the heads' one row each is summed first."""
    height, chunk = (64 if head_dim <= 128 else 32, 64) if itemsize == 2 else (16, 32)
    if rows == 0:
        warps = SUMMED_WARPS if itemsize == 2 else 4
        return ScoreTile(height, 1, 1, chunk, 512, warps, num_stages=3 if head_dim <= 128 else 2)
    heads, padded = triton.next_power_of_2(group), triton.next_power_of_2(rows)
    return ScoreTile(max(1, height // (heads * padded)), heads, padded, 32, 1024)


class Scorer:
    """Scores windows of tiles against the nodes of some levels."""

    def __init__(self, call: Call, levels: Levels) -> None:
        self.call = call
        self.is_summed = is_summed(call.rules, call.tiling)
        rows = 0 if self.is_summed else score_rows(call.rules, call.tiling)
        self.tile = score_tile(rows, call.group, call.q.shape[-1], call.q.element_size())
        self.terms = 1 if call.q.dtype == torch.float32 else 2
        self.sizes = (*call.sizes[1:3], *call.sizes[4:6], call.pyramid.offsets[-1], call.pyramid.offsets[levels.lowest],
                      call.pyramid.span(levels.lowest))  # fmt: skip
        self.shape = {name: value for name, value in call.shape.items() if name != "SCORE_ROWS"}
        self.own = {"BRANCHING": call.rules.branching, "SLICE": self.tile.SLICE, "CHUNK": self.tile.CHUNK,
                    "BAND": self.tile.BAND, "HAS_BOUNDS": call.pyramid.has_bounds, "num_warps": self.tile.num_warps,
                    "num_stages": self.tile.num_stages}  # fmt: skip

    @property
    def terms_width(self) -> int:
        """Elements that stand for a tile's queries, where they are summed first."""
        return self.terms * (1 + self.call.pyramid.has_bounds) * self.call.q.shape[-1] if self.is_summed else 0

    def score(self, window: Window, terms: Tensor, scores: Tensor) -> None:
        """Scores of a window's tiles, fp32: row (set, tile) of window.columns. terms: scratch of terms_width a tile."""
        call, tile = self.call, self.tile
        slices = sum(triton.cdiv(seen, tile.SLICE) for seen in window.seen)
        sets = call.items // call.tiling.tiles
        grid = (sets * triton.cdiv(window.tiles, tile.BAND) * slices,)
        if slices == 0:
            return
        where = (window.first_tile, window.tiles, window.limit, slices, window.columns, *self.sizes)
        if self.is_summed:
            self._sum_queries(window, sets, terms)
            _score_terms[grid](terms, call.pyramid.nodes, scores, *where, TERMS=self.terms, **self.shape, **self.own)
            return
        rows = {"HEADS": tile.HEADS, "ROWS": tile.ROWS, "SCORE_ROWS": call.shape["SCORE_ROWS"]}
        strides = call.q.stride()[:3]
        _score_rows[grid](
            call.q,
            call.pyramid.nodes,
            scores,
            strides,
            call.scale,
            call.tiling.tiles,
            *where,
            **self.shape,
            **self.own,
            **rows,
        )

    def _sum_queries(self, window: Window, sets: int, terms: Tensor) -> None:
        call = self.call
        runs, rows = query_shape(call.tiling.query_tile, call.q.shape[-1], call.q.element_size())
        _query_terms[(sets * triton.cdiv(window.tiles, runs),)](
            call.q,
            terms,
            call.q.stride()[:3],
            call.scale,
            window.first_tile,
            window.tiles,
            call.sizes[1],
            call.sizes[4],
            GROUP=call.group,
            QUERY_TILE=call.shape["QUERY_TILE"],
            HEAD_DIM=call.shape["HEAD_DIM"],
            BLOCK_D=call.shape["BLOCK_D"],
            RUNS=runs,
            ROWS=rows,
            TERMS=self.terms,
            HAS_BOUNDS=call.pyramid.has_bounds,
            num_warps=POOL_WARPS,
        )
