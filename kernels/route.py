"""Block selection by the walk on the GPU: `_walk`, and `_leaf` where leaves are scored exactly.

Returns exactly what `kernels.walk.route_reference` returns (near-ties in fp32 apart).
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyramidbench.kernels.pyramid import Pyramid
from pyramidbench.kernels.route_call import Call, call_of, is_summed, list_widths, score_rows, scored_levels, slots
from pyramidbench.kernels.route_descend import Descent, scan_places
from pyramidbench.kernels.route_leaf import run_leaf
from pyramidbench.kernels.route_scores import Scorer
from pyramidbench.kernels.route_walk import Start, run_walk
from pyramidbench.kernels.route_window import Levels, windows
from pyramidbench.kernels.walk_rules import WalkRules
from pyramidbench.selection import BlockSelection
from pyramidbench.stages import part
from pyramidbench.tiling import Tiling

SCORED_NODES = 4096
"""The longest level whose nodes are all scored. H200, 16 heads, tile 128, K 64, β 2, walk of a mean query: 256k keys 2.06 ms
with all levels scored, 2.33 with the last gathered, 2.77 with all gathered; 1M keys 12.4 with levels up to 4096 scored, 13.0
up to 8192, 14.8 with all, 14.9 with none. So too with the products of today: up to 8192 and 16384 there was no gain at 1M.
Walks by many rows are gathered: 16 rows, 256k keys 4.8 ms against 10."""
TALLEST_BAND = 128
TALLEST_BAND_FP32 = 32
"""Scoring rows of a tile and group, at most, that a program of `_score_rows` holds."""
WIDEST_LEVEL = 8192
"""Candidates of a level that one program holds in registers, at most."""


def route_gap(rules: WalkRules, tiling: Tiling, head_dim: int, dtype: str, group: int) -> str | None:
    """Why these kernels cannot do a walk, or None."""
    if dtype not in ("float16", "bfloat16", "float32"):
        return f"the Triton walk takes float16, bfloat16 and float32, not {dtype}"
    if head_dim > 256:
        return f"the Triton walk takes head dims up to 256, not {head_dim}"
    # In fp32 the positive and the negative parts of 128 wide rows fill a multiprocessor's shared memory.
    tallest = 64 if dtype == "float32" and head_dim > 128 and rules.bounds(head_dim) > 0 else 128
    if rules.tile_reduce == "lse" and score_rows(rules, tiling) > tallest:
        at = " of float32 at such a head dim" if tallest < 128 else ""
        return (
            f"the Triton walk scores up to {tallest} rows a tile{at}, not {score_rows(rules, tiling)}; set score_rows"
        )
    places = _places(rules, tiling, group, dtype)
    if places > WIDEST_LEVEL:
        return (
            f"the Triton walk holds up to {WIDEST_LEVEL} candidates of a level, not {places}; "
            "lower beam or top_k, or raise levels"
        )
    return None


def _places(rules: WalkRules, tiling: Tiling, group: int, dtype: str) -> int:
    """Candidates that one program holds at a time."""
    if scored_levels(rules, tiling) > 1 or lowest_scored_level(rules, tiling, group, dtype) is None:
        return slots(rules, tiling)
    return scan_places(rules.top_k * (1 if rules.leaf_score == "summary" else rules.leaf_candidates or 1))


def route(q: Tensor, k: Tensor, pyramid: Pyramid, tiling: Tiling, rules: WalkRules, scale: float) -> BlockSelection:
    """Blocks of every tile of every set. Arguments as for `route_reference`."""
    batch, sets = q.shape[0], q.shape[1] if rules.head_reduce == "none" else k.shape[1]
    width, arriving = list_widths(rules, tiling)
    items = batch * sets * tiling.tiles
    lists = torch.empty(batch, sets, tiling.tiles, width, dtype=torch.int32, device=q.device)
    counts = torch.empty(batch, sets, tiling.tiles, dtype=torch.int32, device=q.device)
    call = call_of(q, k, pyramid, tiling, rules, scale)
    if rules.leaf_score == "summary":
        _walk_to_leaves(call, lists, counts, rules.top_k)
        return BlockSelection.of(lists, counts, tiling)
    # A place at least: where every block is forced nothing arrives, and buffers of no size would be read past their end.
    candidates = torch.empty(items, max(1, arriving), dtype=torch.int32, device=q.device)
    candidate_counts = torch.empty(items, dtype=torch.int32, device=q.device)
    passed = arriving if rules.leaf_candidates is None else rules.leaf_candidates * rules.top_k
    _walk_to_leaves(call, candidates, candidate_counts, passed)
    with part("leaf scores"):
        run_leaf(call, k, candidates, candidate_counts, lists, counts)
    return BlockSelection.of(lists, counts, tiling)


def _walk_to_leaves(call: Call, out: Tensor, counts: Tensor, width: int) -> None:
    """Short levels by scores of all their nodes, longer ones below them by gathering each tile's nodes."""
    is_last = call.rules.leaf_score == "summary"
    lowest = lowest_scored_level(call.rules, call.tiling, call.group, call.dtype)
    top = scored_levels(call.rules, call.tiling) - 1
    if lowest is None:
        with part(_named(top, 0, "gathered")):
            run_walk(call, out, counts, width)
    elif lowest == 0:
        with part(_named(top, 0, "scored")):
            _walk_scored(call, 0, out, counts, width, is_last=is_last)
    else:
        inner = call.rules.inner_width()
        kept = torch.empty(call.items, inner, dtype=torch.int32, device=out.device)
        kept_counts = torch.empty(call.items, dtype=torch.int32, device=out.device)
        with part(_named(top, lowest, "scored")):
            _walk_scored(call, lowest, kept, kept_counts, inner, is_last=False)
        with part(_named(lowest - 1, 0, "gathered")):
            run_walk(call, out, counts, width, Start(lowest, kept, kept_counts))


def _named(top: int, lowest: int, how: str) -> str:
    """A part of the walk as a profile shows it: a kernel takes several levels at once."""
    return f"level {lowest}, {how}" if top == lowest else f"levels {top} to {lowest}, {how}"


def _walk_scored(call: Call, lowest: int, out: Tensor, counts: Tensor, width: int, *, is_last: bool) -> None:
    """The walk down to `lowest`, window by window of tiles whose scores fit into the scratch."""
    levels = Levels(lowest, scored_levels(call.rules, call.tiling), call.rules.branching)
    scorer = Scorer(call, levels)
    descent = Descent(call, levels, out, counts, width, is_last=is_last)
    sets = call.items // call.tiling.tiles
    scratch_bytes = 4 * descent.list_width + call.q.element_size() * scorer.terms_width
    parts = windows(call.tiling, levels, sets, scratch_bytes, scorer.tile.BAND)
    most = sets * max(window.tiles for window in parts)
    scores = torch.empty(sets * max(window.tiles * window.columns for window in parts), device=out.device)
    terms = torch.empty(most * scorer.terms_width, dtype=call.pyramid.nodes.dtype, device=out.device)
    lists = torch.empty(most * descent.list_width, dtype=torch.int32, device=out.device)
    for window in parts:
        scorer.score(window, terms, scores)
        descent.choose(window, scores, lists)


def lowest_scored_level(rules: WalkRules, tiling: Tiling, group: int, dtype: str) -> int | None:
    """The lowest level that is short enough to be scored whole; None where the walk gathers all its nodes."""
    levels = scored_levels(rules, tiling)
    if levels == 1:
        return 0 if _scores_blocks(rules, tiling, group, dtype) else None
    if not is_summed(rules, tiling):
        return None
    return next((level for level in range(levels) if -(-tiling.blocks // rules.branching**level) <= SCORED_NODES), None)


def _scores_blocks(rules: WalkRules, tiling: Tiling, group: int, dtype: str) -> bool:
    """Whether a single pass has anything to rank by summaries, and rows that fit into a band."""
    if rules.leaf_candidates is None and rules.leaf_score != "summary":
        return False
    rows = 1 if is_summed(rules, tiling) else score_rows(rules, tiling)
    return rows == 1 or rows * group <= (TALLEST_BAND_FP32 if dtype == "float32" else TALLEST_BAND)
