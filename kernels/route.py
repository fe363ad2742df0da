"""Block selection by the walk on the GPU: `_walk`, and `_leaf` where leaves are scored exactly.

Returns exactly what `kernels.walk.route_reference` returns (near-ties in fp32 apart).
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from pyramidbench.kernels.pyramid import Pyramid
from pyramidbench.kernels.route_call import Call, list_widths, score_rows, slots, walked_levels_of
from pyramidbench.kernels.route_leaf import run_leaf
from pyramidbench.kernels.route_walk import run_walk
from pyramidbench.kernels.walk import WalkRules
from pyramidbench.tiling import Tiling

WIDEST_LEVEL = 8192
"""Candidates of a level that one program holds in registers, at most."""


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


def route(q: Tensor, k: Tensor, pyramid: Pyramid, tiling: Tiling, rules: WalkRules, scale: float) -> Tensor:
    """Blocks of every tile: int32 [B, sets, T, S], ascending, padded with -1. Arguments as for `route_reference`."""
    batch, heads, _, head_dim = q.shape
    sets = heads if rules.head_reduce == "none" else k.shape[1]
    width, arriving = list_widths(rules, tiling)
    items = batch * sets * tiling.tiles
    lists = torch.empty(batch, sets, tiling.tiles, width, dtype=torch.int32, device=q.device)
    counts = torch.empty(batch, sets, tiling.tiles, dtype=torch.int32, device=q.device)
    call = Call(
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
        run_walk(call, lists, counts, rules.top_k)
        return lists
    candidates = torch.empty(items, arriving, dtype=torch.int32, device=q.device)
    candidate_counts = torch.empty(items, dtype=torch.int32, device=q.device)
    passed = arriving if rules.leaf_candidates is None else rules.leaf_candidates * rules.top_k
    run_walk(call, candidates, candidate_counts, passed)
    run_leaf(call, k, candidates, candidate_counts, lists, counts)
    return lists
