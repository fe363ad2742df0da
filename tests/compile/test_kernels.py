"""Every kernel compiles for Ampere, Hopper and Blackwell without a GPU, and fits their shared memory.

`pytest -s` prints registers, stack (spills) and shared memory of each.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest

SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
MOST_SPILLED_BYTES = 256
"""Of a thread of a walk on Hopper, of decoding or in fp32. By children in fp32 the first took 2.7 KB with one warp."""


@dataclass(frozen=True)
class Case:
    """A kernel, the pointer types that are not int32, its constants and its launch shape."""

    name: str
    kernel: Callable[[], Any]
    pointers: dict[str, str]
    constants: dict[str, object]
    warps: int
    stages: int
    newest_only: bool = False
    registers: int | None = None
    multiples: tuple[str, ...] = ()
    """Integers that a launch always makes multiples of 16."""


def attention(
    name: str, *, dim: int, query_tile: int, block: int, rows: int, dtype: str = "bf16", tma: bool = False
) -> Case:
    from pyramidbench.kernels.attention_portable import _attend_fwd, attend_tile

    tile = attend_tile(rows, block, dim, dim, 4 if dtype == "fp32" else 2, tma=tma)
    padded = 1 << (dim - 1).bit_length()
    blocks = f"tensordesc<{dtype}[1,1,{tile.BLOCK_N},{padded}]>" if tma else "constexpr"
    constants: dict[str, object] = {} if tma else {"k_blocks": None, "v_blocks": None}
    constants |= {"QUERY_TILE": query_tile, "BLOCK_SIZE": block, "HEAD_DIM": dim, "HEAD_DIM_V": dim}
    constants |= {"BLOCK_M": tile.BLOCK_M, "BLOCK_N": tile.BLOCK_N, "BLOCK_D": padded, "BLOCK_DV": padded}
    constants |= {"IS_CAUSAL": True, "USE_TMA": tma}
    pointers = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), f"*{dtype}")
    pointers |= {"lse_ptr": "*fp32", "k_blocks": blocks, "v_blocks": blocks, "scale_log2": "fp32"}
    return Case(name, lambda: _attend_fwd, pointers, constants, tile.num_warps, tile.num_stages, newest_only=tma)


def walk(
    name: str,
    *,
    slots: int,
    summed: bool,
    heads: int = 1,
    rows: int = 16,
    query_tile: int = 128,
    children: bool = False,
    pooled: bool = False,
    dim: int = 128,
    dtype: str = "bf16",
    bounds: bool = True,
) -> Case:
    from pyramidbench.kernels import route_walk

    tile = route_walk.walk_tile(heads * rows, dim, 4 if dtype == "fp32" else 2, slots)
    constants = {"GROUP": heads, "QUERY_TILE": query_tile, "BLOCK_SIZE": 64, "HEAD_DIM": dim, "BLOCK_D": dim}
    constants |= {"BRANCHING": 2, "SLOTS": slots, "CHUNK": tile.CHUNK, "HEADS": heads, "ROWS": rows}
    constants |= {"SCORE_ROWS": rows, "KEEPS_ROWS": tile.keeps_rows, "HAS_BOUNDS": bounds, "IS_CAUSAL": True}
    constants |= {"IS_POOLED": pooled, "SUMMED": summed, "CHILDREN": children, "WITH_FORCED": summed}
    constants |= {"FORCED_IN_BUDGET": False, "RESUMES": summed}
    pointers = {"q_ptr": "*fp32" if pooled else f"*{dtype}", "nodes_ptr": f"*{dtype}"}
    pointers |= {"score_ptr": "*fp32", "scale": "fp32"}
    return Case(name, lambda: route_walk._walk, pointers, constants, tile.num_warps, tile.num_stages)


def scores(
    name: str,
    *,
    rows: int,
    group: int = 1,
    query_tile: int = 128,
    dim: int = 128,
    dtype: str = "bf16",
    bounds: bool = True,
) -> Case:
    from pyramidbench.kernels import route_scores

    tile = route_scores.score_tile(0 if rows == 1 else rows, group, dim, 4 if dtype == "fp32" else 2)
    constants = {"GROUP": group, "QUERY_TILE": query_tile, "BLOCK_SIZE": 64, "HEAD_DIM": dim, "BLOCK_D": dim}
    constants |= {"IS_CAUSAL": True, "BRANCHING": 2, "SLICE": tile.SLICE, "CHUNK": tile.CHUNK, "BAND": tile.BAND}
    constants |= {"HAS_BOUNDS": bounds}
    pointers = dict.fromkeys(("q_ptr", "nodes_ptr", "terms_ptr"), f"*{dtype}")
    pointers |= {"score_ptr": "*fp32", "scale": "fp32"}
    if rows > 1:
        constants |= {"HEADS": tile.HEADS, "ROWS": tile.ROWS, "SCORE_ROWS": rows}
        return Case(name, lambda: route_scores._score_rows, pointers, constants, tile.num_warps, tile.num_stages)
    constants |= {"TERMS": 1 if dtype == "fp32" else 2}
    launch = (tile.num_warps, tile.num_stages)
    return Case(name, lambda: route_scores._score_terms, pointers, constants, *launch, multiples=("columns",))


def query_terms(name: str, *, group: int, query_tile: int) -> Case:
    from pyramidbench.kernels import route_scores

    runs, rows = route_scores.query_shape(query_tile, 128, 2)
    constants = {"GROUP": group, "QUERY_TILE": query_tile, "HEAD_DIM": 128, "BLOCK_D": 128, "RUNS": runs, "ROWS": rows}
    constants |= {"TERMS": 2, "HAS_BOUNDS": True}
    pointers = {"q_ptr": "*bf16", "terms_ptr": "*bf16", "scale": "fp32"}
    return Case(name, lambda: route_scores._query_terms, pointers, constants, 4, 3)


def descend(name: str, *, places: int, scan: bool = False, edged: bool = True) -> Case:
    from pyramidbench.kernels import route_descend

    constants = {"QUERY_TILE": 128, "BLOCK_SIZE": 64, "SLOTS": places, "IS_CAUSAL": True, "WITH_FORCED": True}
    constants |= {"FORCED_IN_BUDGET": False}
    warps = max(1, places // route_descend.PLACES_PER_WARP)
    pointers = {"score_ptr": "*fp32"}
    if scan:
        return Case(name, lambda: route_descend._scan, pointers, constants, warps, 1)
    constants |= {"BRANCHING": 2, "EDGED": edged}
    return Case(name, lambda: route_descend._descend, pointers, constants, warps, 1)


def leaf(name: str, *, reduce: str, group: int = 1, rows: int = 16) -> Case:
    from pyramidbench.kernels import route_leaf

    constants = {"GROUP": group, "QUERY_TILE": 128, "BLOCK_SIZE": 64, "ROWS": rows, "SLOTS": 128, "FORCED_SLOTS": 4}
    constants |= {"CHUNK": min(rows, route_leaf.LEAF_ELEMENTS // 128), "IS_CAUSAL": True, "FORCED_IN_BUDGET": False}
    return Case(
        name, lambda: route_leaf._leaf, {"mass_ptr": "*fp32"}, {**constants, "REDUCE": reduce}, route_leaf.LEAF_WARPS, 1
    )


def leaf_pairs(name: str, *, mean: bool) -> Case:
    from pyramidbench.kernels import route_pairs

    constants = {"GROUP": 1, "QUERY_TILE": 128, "BLOCK_SIZE": 64, "HEAD_DIM": 128, "BLOCK_D": 128, "IS_CAUSAL": True}
    constants |= {"ROWS": 1 if mean else 16, "TERMS": 3 if mean else 1, "IS_MEAN": mean, "WITH_FORCED": True}
    constants |= {"FORCED_IN_BUDGET": False, "SLOTS": 256}
    pointers = {"q_ptr": "*fp32" if mean else "*bf16", "rows_ptr": "*bf16"}
    return Case(name, lambda: route_pairs._list, pointers, constants, route_pairs.LIST_WARPS, 1)


def leaf_mass(
    name: str, *, dtype: str = "bf16", dim: int = 128, rows: int = 16, terms: int = 1, parts: int = 64
) -> Case:
    from pyramidbench.kernels import route_mass

    tile = route_mass.mass_tile(dim, 4 if dtype == "fp32" else 2, terms)
    constants = {
        "BIASED": parts < 64,
        "TALL": rows,
        "TERMS": terms,
        "QUERY_TILE": 128,
        "BLOCK_SIZE": 64,
        "PARTS": parts,
        "IS_CAUSAL": True,
    }
    constants |= {"BLOCK_M": tile.BLOCK_M, "BLOCK_N": max(16, parts), "HEAD_DIM": dim, "BLOCK_D": dim}
    pointers = {"k_ptr": f"*{dtype}", "rows_ptr": f"*{dtype}", "mass_ptr": "*fp32", "scale_log2": "fp32"}
    return Case(name, lambda: route_mass._mass, pointers, constants, tile.num_warps, tile.num_stages)


def build(name: str, *, rest: bool, branching: int = 2) -> Case:
    from pyramidbench.kernels import pyramid_build

    base = pyramid_build.base_levels(branching)
    shared = {"BLOCK_SIZE": 64, "HEAD_DIM": 128, "BRANCHING": branching, "BASE": base, "SPAN": branching**base}
    shared |= {"HAS_BOUNDS": True}
    pointers = {"k_ptr": "*bf16", "nodes_ptr": "*bf16", "stats_ptr": "*fp32", "weight": "fp32"}
    if rest:
        return Case(name, lambda: pyramid_build._build_rest, pointers, {**shared, "BLOCK_D": 32, "ROWS": 32}, 4, 1)
    tile = pyramid_build.base_tile(128, 2)
    own = {"ROWS": tile.ROWS, "BLOCK_D": 128, "HAS_REST": True, "STAGES": tile.STAGES}
    return Case(name, lambda: pyramid_build._build_base, pointers, {**shared, **own}, tile.num_warps, 1)


def pool(name: str, *, size: int, parts: int, out: str) -> Case:
    from pyramidbench.kernels import pooled_queries

    runs, rows = pooled_queries.pool_shape(size // parts, 128, 2)
    if parts > 1:
        runs, rows = runs * rows // pooled_queries.KEY_RUNS, 1
    constants: dict[str, object] = {"BLOCK_SIZE": size, "PARTS": parts, "RUNS": runs, "ROWS": rows}
    constants |= {"HEAD_DIM": 128, "BLOCK_D": 128}
    pointers = {"x_ptr": "*bf16", "out_ptr": out}
    return Case(name, lambda: pooled_queries._mean_runs, pointers, constants, pooled_queries.POOL_WARPS, 1)


def mass(name: str, *, dim: int, query_tile: int, block: int, dtype: str = "bf16") -> Case:
    from pyramidbench.kernels.mass import _block_mass, mass_tile

    rows, padded, width = (1 << (size - 1).bit_length() for size in (query_tile, block, dim))
    tile = mass_tile(1 << 20, rows, block, dim, 4 if dtype == "fp32" else 2)
    constants = {"QUERY_TILE": query_tile, "ROWS": rows, "BLOCK_SIZE": block, "PADDED": padded, "HEAD_DIM": dim}
    constants |= {"BLOCK_M": tile.BLOCK_M, "BLOCK_N": tile.BLOCK_N, "BLOCK_D": width, "PART_D": tile.PART_D}
    constants |= {"IS_CAUSAL": True}
    pointers = {"q_ptr": f"*{dtype}", "k_ptr": f"*{dtype}", "out_ptr": "*fp32", "scale_log2": "fp32"}
    return Case(name, lambda: _block_mass, pointers, constants, tile.num_warps, tile.num_stages)


def by_key(name: str, *, dim: int = 128, group: int = 4, dtype: str = "bf16") -> Case:
    """`_band`, `_partial` or `_combine`, by the name's first word."""
    from pyramidbench.kernels import attention_band, attention_partials
    from pyramidbench.kernels.attention_by_key import key_tile

    step = name.split("-")[0]
    tile = key_tile(group, 19, 1024, dim, dim, 4 if dtype == "fp32" else 2)
    rows = {"band": tile.band_rows, "partial": tile.BLOCK_M, "combine": tile.combine_rows}[step]
    constants = {"GROUP": group, "QUERY_TILE": 1, "HEAD_DIM_V": dim, "BLOCK_M": rows, "BLOCK_DV": dim}
    pointers = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr", "partial_ptr"), f"*{dtype}")
    pointers |= {"lse_ptr": "*fp32", "partial_lse_ptr": "*fp32", "scale_log2": "fp32"}
    if step == "combine":
        constants |= {"SLOTS": attention_partials.LSE_SLOTS, "UNROLL": tile.combine_slots}
        return Case(name, lambda: attention_partials._combine, pointers, constants, tile.combine_warps, 3)
    constants |= {"BLOCK_SIZE": 64, "HEAD_DIM": dim, "BLOCK_N": 64, "BLOCK_D": dim, "IS_CAUSAL": True}
    kernel = attention_band._band if step == "band" else attention_partials._partial
    return Case(name, lambda: kernel, pointers, constants, tile.num_warps, tile.num_stages, registers=tile.registers)


def queries_gradient(
    name: str, *, dim: int = 128, query_tile: int, block: int = 64, rows: int, dtype: str = "bf16", tma: bool = False
) -> Case:
    from pyramidbench.kernels.attention_dq import _attend_dq, dq_tile

    tile = dq_tile(rows, block, dim, dim, 4 if dtype == "fp32" else 2, tma=tma)
    padded = 1 << (dim - 1).bit_length()
    blocks = f"tensordesc<{dtype}[1,1,{tile.BLOCK_N},{padded}]>" if tma else "constexpr"
    constants: dict[str, object] = {} if tma else {"k_blocks": None, "v_blocks": None}
    constants |= {"QUERY_TILE": query_tile, "BLOCK_SIZE": block, "HEAD_DIM": dim, "HEAD_DIM_V": dim}
    constants |= {"BLOCK_M": tile.BLOCK_M, "BLOCK_N": tile.BLOCK_N, "BLOCK_D": padded, "BLOCK_DV": padded}
    constants |= {"IS_CAUSAL": True, "USE_TMA": tma}
    pointers = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr", "d_out_ptr", "dq_ptr"), f"*{dtype}")
    pointers |= dict.fromkeys(("lse_ptr", "log_sums_ptr", "delta_ptr"), "*fp32")
    pointers |= {"k_blocks": blocks, "v_blocks": blocks, "scale": "fp32", "scale_log2": "fp32"}
    return Case(name, lambda: _attend_dq, pointers, constants, tile.num_warps, tile.num_stages, newest_only=tma)


def queries_gradient_by_key(name: str, *, dim: int = 128, group: int = 4, dtype: str = "bf16") -> Case:
    """`_row_stats`, `_dq_partial` or `_dq_sum`, by the name's first words."""
    from pyramidbench.kernels import attention_dq_by_key as by_key

    step = "_".join(name.split("-")[:2])
    tile = by_key.gradient_tile(group, 19, 1024, dim, dim, 4 if dtype == "fp32" else 2)
    pointers = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr", "d_out_ptr", "dq_ptr", "partial_ptr"), f"*{dtype}")
    pointers |= dict.fromkeys(("lse_ptr", "log_sums_ptr", "delta_ptr"), "*fp32")
    pointers |= {"scale": "fp32", "scale_log2": "fp32"}
    if step == "row_stats":
        constants: dict[str, object] = {"HEAD_DIM_V": dim, "BLOCK_M": by_key.STATS_ROWS, "BLOCK_DV": dim}
        return Case(name, lambda: by_key._row_stats, pointers, constants, 4, 3)
    constants = {"GROUP": group, "QUERY_TILE": 1, "HEAD_DIM": dim, "BLOCK_D": dim}
    if step == "dq_sum":
        constants |= {"BLOCK_M": tile.sum_rows, "UNROLL": tile.sum_slots}
        return Case(name, lambda: by_key._dq_sum, pointers, constants, tile.sum_warps, 3)
    constants |= {"BLOCK_SIZE": 64, "HEAD_DIM_V": dim, "BLOCK_M": tile.BLOCK_M, "BLOCK_N": 64, "BLOCK_DV": dim}
    constants |= {"IS_CAUSAL": True}
    kernel = by_key._dq_partial
    return Case(name, lambda: kernel, pointers, constants, tile.num_warps, tile.num_stages, registers=tile.registers)


def keys_gradient(
    name: str,
    *,
    dim: int = 128,
    query_tile: int = 128,
    block: int = 64,
    group: int = 1,
    several: bool = False,
    dtype: str = "bf16",
    tma: bool = False,
) -> Case:
    from pyramidbench.kernels.attention_dkdv import _attend_dkdv, dkdv_tile

    tile = dkdv_tile(group * query_tile, query_tile, block, dim, dim, 4 if dtype == "fp32" else 2, tma=tma)
    assert tile.tma == tma
    padded = 1 << (dim - 1).bit_length()
    box = (max(1, tile.BLOCK_M // query_tile), min(tile.BLOCK_M, query_tile), padded)
    rows = f"tensordesc<{dtype}[1,{box[0]},{box[1]},{box[2]}]>" if tma else "constexpr"
    constants: dict[str, object] = {} if tma else {"q_rows": None, "d_out_rows": None}
    constants |= {"GROUP": group, "QUERY_TILE": query_tile, "BLOCK_SIZE": block, "HEAD_DIM": dim, "HEAD_DIM_V": dim}
    constants |= {"BLOCK_M": tile.BLOCK_M, "BLOCK_N": tile.BLOCK_N, "BLOCK_D": padded, "BLOCK_DV": padded}
    constants |= {"IS_CAUSAL": True, "SEVERAL": several, "ADDS": several, "USE_TMA": tma}
    wide = ("log_sums_ptr", "delta_ptr", "dk_pieces_ptr", "dv_pieces_ptr")
    pointers = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "d_out_ptr"), f"*{dtype}") | dict.fromkeys(wide, "*fp32")
    pointers |= dict.fromkeys(("dk_ptr", "dv_ptr"), "*fp32" if several else f"*{dtype}")
    pointers |= {"q_rows": rows, "d_out_rows": rows, "scale": "fp32", "scale_log2": "fp32"}
    return Case(name, lambda: _attend_dkdv, pointers, constants, tile.num_warps, tile.num_stages, newest_only=tma)


def pieces(name: str) -> Case:
    from pyramidbench.kernels import attention_pieces

    constants = {"BLOCK_SIZE": 64, "HEAD_DIM": 128, "ADDS": False, "ELEMENTS": attention_pieces.PIECE_ELEMENTS}
    pointers = {"pieces_ptr": "*fp32", "out_ptr": "*bf16"}
    return Case(name, lambda: attention_pieces._add_pieces, pointers, constants, 4, 3)


def transposition(name: str) -> Case:
    from pyramidbench.kernels import transpose

    kernels: dict[str, tuple[Callable[[], Any], dict[str, object]]] = {
        "mark": (transpose._mark, {"SLOTS": 32}),
        "count": (transpose._count, {"PARTS": transpose.COUNT_PARTS, "BLOCKS": transpose.COUNT_BLOCKS}),
        "chunks": (transpose._chunks, {"BLOCKS": transpose.SCAN_BLOCKS}),
        "fill": (transpose._fill, {"SLOTS": 32}),
    }
    step = name.split("-")[1]
    kernel, constants = kernels[step]
    pointers = {} if step == "mark" else {"table_ptr": "*i64"}
    return Case(name, lambda: kernel, pointers, constants, 8 if step == "chunks" else 4, 3)


def decode(
    name: str,
    *,
    dim: int = 128,
    group: int = 4,
    block: int = 64,
    dtype: str = "bf16",
    slots: int = 256,
    paged: bool = False,
    children: bool = False,
    bounds: bool = True,
    parts: int = 0,
) -> Case:
    """A kernel of the decoding step, by the name's second word; a cache of up to 1M tokens of 8 key/value heads."""
    from pyramidbench.kernels import (
        decode_append,
        decode_attend,
        decode_each,
        decode_leaf,
        decode_prompt,
        decode_tokens,
        decode_walk,
    )
    from pyramidbench.kernels.decode_call import launch_shape

    step, launch = name.split("-")[1], launch_shape(block * dim * (4 if dtype == "fp32" else 2))
    small = block * dim * (4 if dtype == "fp32" else 2) <= decode_attend.SMALL_BLOCK_BYTES
    pages: dict[str, object] = {} if paged else {"pages_ptr": None}
    shape = {"BLOCK_SIZE": block, "HEAD_DIM": dim, "BLOCK_D": dim}
    values = {"HEAD_DIM_V": dim, "BLOCK_DV": dim}
    rows = {"GROUP": group, "ROWS": 16, "BLOCK_N": block, "IS_PAGED": paged}
    nodes = {
        "GROUP": group,
        "HEADS": max(16, group) if children else group,
        "BRANCHING": 2,
        "HAS_BOUNDS": bounds,
        "CHILDREN": children,
    }
    summary = dim * (4 if dtype == "fp32" else 2) * (2 if bounds else 1)
    warps = decode_walk.walk_warps(slots, summary if children else 0)
    chunk = decode_walk.node_chunk(summary * (2 if children else 1), warps, by_children=children)
    nodes |= {"BUDGETED": False, "CHUNK": chunk, "SLOTS": slots, "NARROW": min(256, slots)}
    written = {
        "HAS_BOUNDS": bounds,
        "IS_PAGED": paged,
        "ROWS": decode_tokens.LOAD_ROWS,
        "COPY": decode_tokens.COPY_ROWS,
    }
    written |= {"PARTS": parts} | ({} if parts else {"parts_ptr": None})
    padded, run = decode_leaf.part_rows(max(1, parts))
    kernels: dict[str, tuple[Callable[[], Any], dict[str, object], int]] = {
        "append": (
            lambda: decode_append._append,
            {**shape, **values, **written, **pages, "counts_ptr": None, "BRANCHING": 2, "LEVELS": 16, "HAS_COUNTS": False,
             "FINISH": False},
            decode_tokens.APPEND_WARPS,
        ),
        "blocks": (
            lambda: decode_prompt._append_blocks,
            {**shape, **values, **written, **pages},
            decode_tokens.APPEND_WARPS,
        ),
        "level": (
            lambda: decode_prompt._compose_level,
            {**shape, "BRANCHING": 2, "ROWS": decode_prompt.NODE_ROWS, "HAS_BOUNDS": True},
            decode_tokens.APPEND_WARPS,
        ),
        "scan": (lambda: decode_walk._scan, {**shape, **nodes}, warps),
        "gather": (lambda: decode_walk._gather, {**shape, **nodes}, warps),
        "leaf": (lambda: decode_leaf._leaf, {**shape, **rows, **pages, "BUDGETED": False}, launch.num_warps),
        "parts": (
            lambda: decode_leaf._leaf_parts,
            {**shape, **pages, "GROUP": group, "ROWS": 16, "IS_PAGED": paged, "BUDGETED": False, "PARTS": parts,
             "PADDED": padded, "RUN": run},
            launch.num_warps,
        ),
        "attend": (
            lambda: decode_attend._attend,
            {**shape, **values, **rows, **pages, "HEADS": group, "SLOTS": 128, "FORCED_SLOTS": 4, "REDUCE": "sum_prob",
             "IS_EXACT": True, "BUDGETED": False},
            launch.num_warps,
        ),
        "each": (
            lambda: decode_each._attend_each,
            {**shape, **values, **rows, **pages, "PIECE": block // 2 if small else block},
            launch.num_warps,
        ),
        "best": (
            lambda: decode_each._combine_best,
            {"GROUP": group, "HEADS": group, "BLOCK_SIZE": block, "HEAD_DIM_V": dim, "SLOTS": slots if slots < 512 else 128,
             "COLUMNS": decode_each.WARP_NUMBERS // 128, "REDUCE": "sum_prob", "BUDGETED": False},
            1,
        ),
        "combine": (
            lambda: decode_attend._combine, {"GROUP": group, **values, "SPLITS": 64}, decode_attend.COMBINE_WARPS,
        ),
    }  # fmt: skip
    kernel, constants, warps = kernels[step]
    names = ("q_ptr", "k_ptr", "v_ptr", "k_cache_ptr", "v_cache_ptr", "nodes_ptr", "parts_ptr", "out_ptr")
    walks = step in ("scan", "gather")
    pointers = dict.fromkeys(("q_ptr", "nodes_ptr") if walks else names, f"*{dtype}")
    constants |= {} if step in ("blocks", "level") else {"OVERLAPS": True}
    floats = ("stats_ptr", "scan_ptr", "score_ptr", "mass_ptr", "part_ptr", "part_lse_ptr")
    pointers |= dict.fromkeys(floats, "*fp32") | dict.fromkeys(("scale", "scale_log2", "weight"), "fp32")
    registers = decode_walk.walk_registers(summary if children else 0) if walks else None
    if step == "attend" and small:
        registers = decode_attend.MOST_REGISTERS
    stages = decode_each.PIECES + 1 if step == "each" else launch.num_stages
    return Case(name, kernel, pointers, constants, warps, stages, registers=registers)


CASES = {
    "attention-tile-128": partial(attention, dim=128, query_tile=128, block=64, rows=128),
    "attention-tile-128-tma": partial(attention, dim=128, query_tile=128, block=64, rows=128, tma=True),
    "attention-token-level": partial(attention, dim=128, query_tile=1, block=64, rows=16),
    "attention-head-dim-256": partial(attention, dim=256, query_tile=64, block=64, rows=64),
    "attention-head-dim-96-tma": partial(attention, dim=96, query_tile=64, block=128, rows=128, tma=True),
    "attention-fp32": partial(attention, dim=128, query_tile=64, block=64, rows=64, dtype="fp32"),
    "walk-summed-k64": partial(walk, slots=1024, summed=True),
    "walk-rows-k64": partial(walk, slots=512, summed=False),
    "walk-token-level-by-children": partial(
        walk, slots=64, summed=False, heads=16, rows=1, query_tile=1, children=True
    ),
    "walk-fp32-16-rows": partial(walk, slots=64, summed=False, dtype="fp32"),
    "walk-fp32-heads": partial(walk, slots=64, summed=False, dtype="fp32", heads=4, dim=64),
    "walk-fp32-tall": partial(walk, slots=64, summed=False, dtype="fp32", rows=128),
    "walk-fp32-wide": partial(walk, slots=64, summed=False, dtype="fp32", rows=64, dim=256),
    "walk-fp32-wide-without-bounds": partial(
        walk, slots=64, summed=False, dtype="fp32", rows=128, dim=256, bounds=False
    ),
    "walk-paper": partial(walk, slots=256, summed=False, children=True),
    "walk-paper-mean-query": partial(walk, slots=256, summed=False, heads=4, rows=4, children=True, pooled=True),
    "scores-mean-query": partial(scores, rows=1),
    "scores-mean-query-fp32": partial(scores, rows=1, dtype="fp32"),
    "scores-head-dim-256": partial(scores, rows=1, dim=256),
    "scores-no-bounds": partial(scores, rows=1, bounds=False),
    "scores-token-level-group-16": partial(scores, rows=1, group=16, query_tile=1),
    "scores-16-rows": partial(scores, rows=16),
    "scores-16-rows-group-4": partial(scores, rows=16, group=4),
    "scores-32-rows-fp32": partial(scores, rows=32, dtype="fp32"),
    "query-terms-token-level-group-16": partial(query_terms, group=16, query_tile=1),
    "query-terms-tile-128": partial(query_terms, group=1, query_tile=128),
    "descend-beam-1": partial(descend, places=128),
    "descend-beam-2": partial(descend, places=256),
    "descend-beam-4": partial(descend, places=512),
    "descend-k-100": partial(descend, places=512, edged=False),
    "scan-k64": partial(descend, places=512, scan=True),
    "scan-widest": partial(descend, places=8192, scan=True),
    "leaf-sum-prob": partial(leaf, reduce="sum_prob"),
    "leaf-sum-lse-group-4": partial(leaf, reduce="sum_lse", group=4),
    "leaf-pairs": partial(leaf_pairs, mean=False),
    "leaf-pairs-mean": partial(leaf_pairs, mean=True),
    "leaf-mass": partial(leaf_mass),
    "leaf-mass-mean": partial(leaf_mass, rows=1, terms=3),
    "leaf-mass-token-level": partial(leaf_mass, rows=1),
    "leaf-mass-group-3": partial(leaf_mass, rows=3),
    "leaf-mass-sub": partial(leaf_mass, parts=4),
    "leaf-mass-head-dim-256": partial(leaf_mass, dim=256),
    "leaf-mass-fp32": partial(leaf_mass, dtype="fp32"),
    "build-base": partial(build, rest=False),
    "build-base-branching-4": partial(build, rest=False, branching=4),
    "build-rest": partial(build, rest=True),
    "mass-tile-128": partial(mass, dim=128, query_tile=128, block=64),
    "mass-token-level": partial(mass, dim=128, query_tile=1, block=64),
    "mass-head-dim-256-tile-16-block-48": partial(mass, dim=256, query_tile=16, block=48),
    "mass-fp32-head-dim-256": partial(mass, dim=256, query_tile=128, block=64, dtype="fp32"),
    **{f"{step}-by-key": partial(by_key) for step in ("band", "partial", "combine")},
    **{f"{step}-by-key-head-dim-256": partial(by_key, dim=256, group=1) for step in ("band", "partial", "combine")},
    **{f"{step}-by-key-fp32": partial(by_key, dtype="fp32") for step in ("band", "partial", "combine")},
    **{f"{step}-by-key": partial(queries_gradient_by_key) for step in ("row-stats", "dq-partial", "dq-sum")},
    "dq-partial-by-key-group-1": partial(queries_gradient_by_key, group=1),
    "dq-partial-by-key-head-dim-256": partial(queries_gradient_by_key, dim=256, group=1),
    "dq-partial-by-key-fp32": partial(queries_gradient_by_key, dtype="fp32"),
    "dq-partial-by-key-fp32-head-dim-256": partial(queries_gradient_by_key, dim=256, dtype="fp32"),
    "dq-tile-128": partial(queries_gradient, query_tile=128, rows=128),
    "dq-tile-128-tma": partial(queries_gradient, query_tile=128, rows=128, tma=True),
    "dq-tile-64-blocks-of-128-tma": partial(queries_gradient, query_tile=64, rows=64, block=128, tma=True),
    "dq-token-level": partial(queries_gradient, query_tile=1, rows=16),
    "dq-head-dim-256": partial(queries_gradient, dim=256, query_tile=128, block=128, rows=128),
    "dq-head-dim-256-tma": partial(queries_gradient, dim=256, query_tile=128, block=128, rows=128, tma=True),
    "dq-fp32": partial(queries_gradient, query_tile=64, rows=64, dtype="fp32"),
    "dq-fp32-head-dim-256": partial(queries_gradient, dim=256, query_tile=64, block=128, rows=64, dtype="fp32"),
    "dkdv-tile-128": partial(keys_gradient),
    "dkdv-tile-128-tma": partial(keys_gradient, tma=True),
    "dkdv-tile-16-group-8-tma": partial(keys_gradient, query_tile=16, group=8, tma=True),
    "dkdv-token-level": partial(keys_gradient, query_tile=1, group=4),
    "dkdv-several-lists-added": partial(keys_gradient, query_tile=64, several=True, tma=True),
    "dkdv-blocks-of-128-tma": partial(keys_gradient, block=128, tma=True),
    "dkdv-head-dim-256": partial(keys_gradient, dim=256, block=128),
    "dkdv-fp32": partial(keys_gradient, dtype="fp32"),
    "dkdv-fp32-head-dim-256": partial(keys_gradient, dim=256, block=128, dtype="fp32"),
    **{
        f"decode-{step}": decode
        for step in ("append", "blocks", "level", "scan", "gather", "leaf", "attend", "combine", "each", "best")
    },
    **{f"decode-{step}-paged": partial(decode, paged=True) for step in ("append", "blocks", "leaf", "attend", "each")},
    **{
        f"decode-{step}-fp32-head-dim-256": partial(decode, dim=256, dtype="fp32")
        for step in ("append", "scan", "gather", "leaf", "attend", "each", "best")
    },
    "decode-attend-head-dim-256-blocks-of-128": partial(decode, dim=256, block=128),
    "decode-attend-group-16": partial(decode, group=16),
    "decode-best-group-16": partial(decode, group=16),
    "decode-best-of-256": partial(decode, slots=256),
    "decode-scan-1024": partial(decode, slots=1024),
    "decode-scan-2048": partial(decode, slots=2048),
    "decode-scan-flat-256k": partial(decode, slots=4096),
    "decode-gather-flat-1M": partial(decode, slots=16384),
    "decode-scan-paper": partial(decode, slots=128, children=True, bounds=False),
    "decode-gather-paper": partial(decode, slots=128, children=True, bounds=False),
    "decode-gather-children-group-16": partial(decode, children=True, group=16),
    "decode-gather-children-fp32-head-dim-256": partial(decode, children=True, dim=256, dtype="fp32"),
    "decode-scan-children-fp32-head-dim-256": partial(decode, children=True, dim=256, dtype="fp32"),
    "decode-append-parts": partial(decode, parts=4),
    "decode-blocks-parts-paged": partial(decode, parts=4, paged=True),
    "decode-parts": partial(decode, parts=4),
    "decode-parts-of-128-paged": partial(decode, parts=128, block=128, paged=True),
    "decode-parts-fp32-head-dim-256": partial(decode, parts=4, dim=256, dtype="fp32"),
    "add-pieces": pieces,
    **{f"transpose-{step}": transposition for step in ("mark", "count", "chunks", "fill")},
    "pooled-queries": partial(pool, size=128, parts=1, out="*fp32"),
    "sub-block-means": partial(pool, size=64, parts=4, out="*bf16"),
}


# Warp-specialised kernels, for Hopper alone: D, Dv, block size, tile, rows that share a list, dtype.
HOPPER = {
    "tile-128": (128, 128, 64, 128, 128, "bf16"),
    "tile-128-fp16": (128, 128, 64, 128, 128, "fp16"),
    "tile-64": (128, 128, 64, 64, 64, "bf16"),
    "tile-16-group-8": (128, 128, 64, 16, 128, "bf16"),
    "head-dim-64": (64, 64, 64, 128, 128, "bf16"),
    "head-dim-64-tile-64": (64, 64, 64, 64, 64, "bf16"),
    "head-dims-64-and-128": (64, 128, 64, 128, 128, "bf16"),
    "blocks-of-128": (128, 128, 128, 128, 128, "bf16"),
    "blocks-of-128-tile-64": (128, 128, 128, 64, 64, "bf16"),
}


@pytest.mark.parametrize("name", HOPPER)
def test_hopper_compiles_and_fits(name: str) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from pyramidbench.kernels.attention_hopper import _attend_hopper, hopper_tile

    dim, dim_v, block, query_tile, rows, dtype = HOPPER[name]
    tile = hopper_tile(rows, block, dim, dim_v)
    constants = {"QUERY_TILE": query_tile, "BLOCK_SIZE": block, "HEAD_DIM": dim, "HEAD_DIM_V": dim_v, "IS_CAUSAL": True}
    constants |= {field.name: getattr(tile, field.name) for field in fields(tile)}
    queries = min(query_tile, 64)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    types = {
        "q_rows": f"tensordesc<{dtype}[1,{64 // queries},{queries},{dim}],{layout!r}>",
        **dict.fromkeys(("k_blocks", "v_blocks"), f"tensordesc<{dtype}[1,1,{block},64],{layout!r}>"),
        **{"out_ptr": f"*{dtype}", "lse_ptr": "*fp32", "scale_log2": "fp32"},
        **dict.fromkeys(("indices_ptr", "counts_ptr"), "*i32"),
        **dict.fromkeys(constants, "constexpr"),
    }
    signature = {argument: types.get(argument, "i32") for argument in _attend_hopper.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind[0] == "*"}
    source = GluonASTSource(_attend_hopper, signature, constants, aligned)
    options = {"num_warps": 4, "maxnreg": tile.max_registers}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    registers, stack = used(compiled.asm["cubin"], Path(triton.__file__).parent)
    shared = compiled.metadata.shared
    print(f"\nsm_90 {name}: {registers} registers, {stack} bytes of stack, {shared} bytes of shared memory")
    # Launches of one warp group count on two programs a multiprocessor.
    room = SHARED_BYTES[90] // 2 - 1024 if tile.BLOCK_N == 64 else SHARED_BYTES[90]
    assert shared <= room


@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize("name", CASES)
def test_compiles_and_fits(name: str, capability: int) -> None:
    case = CASES[name](name)
    if case.newest_only and capability < 90:
        pytest.skip("the copy engine for tiles came with Hopper; the launcher takes pointers before it")
    registers, stack, shared = resources(case, capability)
    print(f"\nsm_{capability} {name}: {registers} registers, {stack} bytes of stack, {shared} bytes of shared memory")
    assert shared <= SHARED_BYTES[capability]
    if capability == 90 and name.startswith(("decode-scan", "decode-gather", "walk-fp32")):
        assert stack <= MOST_SPILLED_BYTES


@pytest.mark.parametrize("slots", [16, 32, 64, 128])
@pytest.mark.parametrize("step", ["attend", "best"])
def test_scores_that_are_compared_are_added_once(step: str, slots: int) -> None:
    """A sum over heads that the compiler makes twice, in two layouts, may differ in its last bits: no order of places then."""
    case = decode(f"decode-{step}", dim=64, group=2, block=16)
    case.constants["SLOTS"] = slots
    stages = compiled(case, 90).asm
    added = r'tt\.reduce"\([^)]*\) <\{axis = 1 : i32\}> \(\{\s*\^bb0[^\n]*: f32[^\n]*\n[^\n]*arith\.addf'
    written, made = (len(re.findall(added, stages[stage])) for stage in ("ttir", "ttgir"))
    assert written > 0
    assert made == written


def resources(case: Case, capability: int) -> tuple[int, int, int]:
    """Registers a thread, bytes of stack a thread, bytes of shared memory."""
    import triton

    kernel = compiled(case, capability)
    return *used(kernel.asm["cubin"], Path(triton.__file__).parent), kernel.metadata.shared


def compiled(case: Case, capability: int) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = case.kernel()
    signature: dict[str, object] = {}
    aligned = {}
    constants = dict(case.constants)
    if "OVERLAPS" in constants:
        constants["OVERLAPS"] = capability >= 90
    for place, argument in enumerate(kernel.arg_names):
        if argument in case.constants:
            signature[argument] = "constexpr"
        elif argument.endswith("_strides"):
            signature[argument] = ("i32",) * 3
            aligned |= {(place, part): [["tt.divisibility", 16]] for part in range(3)}
        elif argument.endswith("_ptr"):
            signature[argument] = case.pointers.get(argument, "*i32")
            aligned[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[argument] = case.pointers.get(argument, "i32")
        if argument in case.multiples:
            aligned[(place,)] = [["tt.divisibility", 16]]
    options = {"num_warps": case.warps, "num_stages": case.stages, "maxnreg": case.registers, "enable_fp_fusion": True}
    source = ASTSource(kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def used(cubin: bytes, triton_folder: Path) -> tuple[int, int]:
    """Registers and stack bytes that the disassembler in Triton's package reports."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton_folder / "backends" / "nvidia" / "bin" / "cuobjdump"
        report = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", report)
    assert found is not None, report
    return int(found[1]), int(found[2])
