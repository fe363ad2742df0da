"""Block selection by the walk on the GPU: `_walk`, and `_leaf` where leaves are scored exactly.

Returns exactly what `kernels.walk.route_reference` returns (near-ties in fp32 apart).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from torch import Tensor

from pyramidbench.kernels.pyramid import Pyramid, walked_levels
from pyramidbench.kernels.route_leaf import _leaf
from pyramidbench.kernels.route_walk import _walk
from pyramidbench.kernels.walk import WalkRules
from pyramidbench.selection import ranked_count
from pyramidbench.tiling import Tiling

WIDEST_LEVEL = 8192
"""Candidates of a level that one program holds in registers, at most."""
WALK_CHUNK = 32
WALK_PROGRAMS = 8
WALK_STAGES = 2
"""One warp a tile, 8 programs per multiprocessor, chunks of 32 nodes; at 256k keys, 16 heads, K 64, β 4, H200: 4.5 ms. With
a register cap for 12 programs 5.8, without prefetch 6.3, chunks of 16 on 12 programs 6.3, of 64 7.4, two warps 8.6."""
LEAF_WARPS = 2
LEAF_STAGES = 2
LEAF_PROGRAMS = 8
"""At 256k keys, 16 heads, 128 candidates, 16 rows, H200, with the walk: 14.5 ms; 17.3 with 11 programs, 17.0 with three
stages and 6, 19.0 with one warp, 22.0 with four."""


def route_gap(rules: WalkRules, tiling: Tiling, head_dim: int, dtype: str) -> str | None:
    """Why these kernels cannot do a walk, or None."""
    if dtype not in ("float16", "bfloat16", "float32"):
        return f"the Triton walk takes float16, bfloat16 and float32, not {dtype}"
    if head_dim > 256:
        return f"the Triton walk takes head dims up to 256, not {head_dim}"
    if rules.tile_reduce == "mean" and rules.node_score == "children" and walked_levels_of(rules, tiling) > 1:
        return "the Triton walk has no kernel for node_score='children' with tile_reduce='mean' yet"
    if rules.leaf_score == "sub":
        return "the Triton walk has no kernel for leaf_score='sub' yet; accepted: 'exact', 'summary'"
    if rules.tile_reduce == "mean" and rules.leaf_score == "exact":
        return "the Triton walk has no kernel for exact leaves with tile_reduce='mean' yet"
    if rules.tile_reduce == "lse" and score_rows(rules, tiling) > 128:
        return f"the Triton walk scores up to 128 rows a tile, not {score_rows(rules, tiling)}; set score_rows"
    if slots(rules, tiling) > WIDEST_LEVEL:
        return (
            f"the Triton walk holds up to {WIDEST_LEVEL} candidates of a level, not {slots(rules, tiling)}; "
            "lower beam or top_k, or raise levels"
        )
    return None


def walked_levels_of(rules: WalkRules, tiling: Tiling) -> int:
    return walked_levels(rules.levels, tiling.blocks, rules.branching, rules.start_width)


def scored_levels(rules: WalkRules, tiling: Tiling) -> int:
    """Levels left when those at the top that keep all their nodes are passed over: the walk may start below them."""
    levels = walked_levels_of(rules, tiling)
    while levels > 1 and -(-tiling.blocks // rules.branching ** (levels - 1)) <= rules.inner_width():
        levels -= 1
    return levels


def score_rows(rules: WalkRules, tiling: Tiling) -> int:
    """Rows of a tile that score, per head."""
    return min(rules.score_rows or tiling.query_tile, tiling.query_tile)


def slots(rules: WalkRules, tiling: Tiling) -> int:
    """Places for a level's candidates: the children of the kept nodes and of two forced ones, or the start level."""
    levels = scored_levels(rules, tiling)
    start = -(-tiling.blocks // rules.branching ** (levels - 1))
    below = rules.branching * (rules.inner_width() + 2) if levels > 1 else 1
    return triton.next_power_of_2(max(start, below, 16))


@lru_cache(maxsize=64)
def list_widths(rules: WalkRules, tiling: Tiling) -> tuple[int, int]:
    """The longest list of any tile, and the most candidates that reach the exact leaf: known before the walk runs."""
    tile = torch.arange(tiling.tiles)
    forced = tiling.forced(tile, rules.sink_blocks, rules.local_blocks)
    eligible = tiling.eligible(tile, forced)
    kept = torch.minimum(ranked_count(rules.top_k, forced, rules.forced_in_budget), eligible)
    arriving = int(eligible.max())
    if walked_levels_of(rules, tiling) > 1:
        arriving = min(arriving, rules.branching * (rules.inner_width() + 2))
    if rules.leaf_candidates is not None:
        arriving = min(arriving, rules.leaf_candidates * rules.top_k)
    return int((kept + forced.count()).max()), arriving


def _head_shape(rows: int, group: int, tallest: int) -> tuple[int, int]:
    """Heads and rows of one matrix product: powers of two whose product is at least 16."""
    padded = triton.next_power_of_2(rows)
    heads = min(triton.next_power_of_2(group), max(1, tallest // padded))
    return heads, max(padded, 16 // heads)


def _programs(items: int, device: torch.device, per_sm: int) -> int:
    """Programs of a persistent grid."""
    if device.type != "cuda":
        return min(items, 4)
    return min(items, torch.cuda.get_device_properties(device).multi_processor_count * per_sm)


def route(q: Tensor, k: Tensor, pyramid: Pyramid, tiling: Tiling, rules: WalkRules, scale: float) -> Tensor:
    """Blocks of every tile: int32 [B, sets, T, S], ascending, padded with -1. Arguments as for `route_reference`."""
    batch, heads, _, head_dim = q.shape
    sets = heads if rules.head_reduce == "none" else k.shape[1]
    width, arriving = list_widths(rules, tiling)
    items = batch * sets * tiling.tiles
    lists = torch.empty(batch, sets, tiling.tiles, width, dtype=torch.int32, device=q.device)
    counts = torch.empty(batch, sets, tiling.tiles, dtype=torch.int32, device=q.device)
    call = _Call(
        q,
        pyramid,
        tiling,
        rules,
        scale,
        (items, sets, k.shape[1], tiling.tiles, tiling.seq_len_q, tiling.seq_len_kv),
        {
            "GROUP": heads // sets,
            "QUERY_TILE": tiling.query_tile,
            "BLOCK_SIZE": tiling.block_size,
            "HEAD_DIM": head_dim,
            "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
            "SCORE_ROWS": score_rows(rules, tiling),
            "IS_CAUSAL": tiling.causal,
        },
    )
    if rules.leaf_score == "summary":
        _run_walk(call, lists, counts, rules.top_k)
        return lists
    candidates = torch.empty(items, arriving, dtype=torch.int32, device=q.device)
    candidate_counts = torch.empty(items, dtype=torch.int32, device=q.device)
    passed = arriving if rules.leaf_candidates is None else rules.leaf_candidates * rules.top_k
    _run_walk(call, candidates, candidate_counts, passed)
    _run_leaf(call, k, candidates, candidate_counts, lists, counts)
    return lists


@dataclass(frozen=True)
class _Call:
    """What the launches of one walk share."""

    q: Tensor
    pyramid: Pyramid
    tiling: Tiling
    rules: WalkRules
    scale: float
    sizes: tuple[int, ...]
    shape: dict[str, int | bool]

    @property
    def items(self) -> int:
        """(set, tile) pairs."""
        return self.sizes[0]


def _run_walk(call: _Call, out: Tensor, counts: Tensor, leaf_width: int) -> None:
    """Walk the levels that are left and write the best `leaf_width` leaves, with the forced ones unless more follows."""
    rules, device = call.rules, call.q.device
    places = slots(rules, call.tiling)
    warps = max(1, places // 1024)
    programs = _programs(call.items, device, WALK_PROGRAMS)
    heads, rows = _head_shape(score_rows(rules, call.tiling), call.shape["GROUP"], 64)
    opened = torch.empty(programs, rules.inner_width() + 2, dtype=torch.int32, device=device)
    levels = scored_levels(rules, call.tiling)
    last = rules.leaf_score == "summary"
    _walk[(programs,)](
        call.q,
        call.pyramid.nodes,
        opened,
        torch.empty(programs, places, device=device),
        out,
        counts,
        call.q.stride()[:3],
        call.scale,
        *call.sizes,
        call.pyramid.offsets[-1],
        call.pyramid.offsets[levels],
        levels,
        rules.branching ** (levels - 1),
        rules.inner_width(),
        leaf_width,
        rules.sink_blocks,
        rules.local_blocks,
        opened.shape[1],
        out.shape[-1],
        BRANCHING=rules.branching,
        SLOTS=places,
        CHUNK=WALK_CHUNK,
        HEADS=heads,
        ROWS=rows,
        HAS_BOUNDS=call.pyramid.has_bounds,
        IS_MEAN=rules.tile_reduce == "mean",
        CHILDREN=rules.node_score == "children",
        WITH_FORCED=last,
        FORCED_IN_BUDGET=rules.forced_in_budget and last,
        num_warps=warps,
        num_stages=WALK_STAGES,
        **call.shape,
    )


def _run_leaf(
    call: _Call, k: Tensor, candidates: Tensor, candidate_counts: Tensor, lists: Tensor, counts: Tensor
) -> None:
    """Of each tile's candidates, the best K by exact score, and the forced blocks, into `lists`."""
    rules, device = call.rules, call.q.device
    places = triton.next_power_of_2(max(16, candidates.shape[1]))
    heads, rows = _head_shape(score_rows(rules, call.tiling), call.shape["GROUP"], 64)
    programs = _programs(call.items, device, LEAF_PROGRAMS)
    _leaf[(programs,)](
        call.q,
        k,
        candidates,
        candidate_counts,
        torch.empty(programs, places, heads * rows, device=device),
        torch.empty(programs, places, device=device),
        lists,
        counts,
        call.q.stride()[:3],
        k.stride()[:3],
        call.scale,
        *call.sizes,
        candidates.shape[1],
        rules.top_k,
        rules.sink_blocks,
        rules.local_blocks,
        lists.shape[-1],
        BLOCK_N=triton.next_power_of_2(call.tiling.block_size),
        SLOTS=places,
        CHUNK=16,
        HEADS=heads,
        ROWS=rows,
        REDUCE=rules.head_reduce,
        FORCED_IN_BUDGET=rules.forced_in_budget,
        num_warps=LEAF_WARPS,
        num_stages=LEAF_STAGES,
        **call.shape,
    )
