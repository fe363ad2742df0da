"""Bytes that the Triton kernels hold besides inputs and output: the formula that a measured peak is compared with.

The pyramid, lists and candidates live through the call; the scores of a window (kernels.route_window) and the masses of a
portion of leaves (kernels.route_portions) follow one another, so the larger counts. `kernels.walk_cost` has the twins'.
"""

from __future__ import annotations

from pyramidbench.kernels.pyramid import walked_levels
from pyramidbench.kernels.route import lowest_scored_level
from pyramidbench.kernels.route_call import is_summed, list_widths, score_rows, scored_levels, slots
from pyramidbench.kernels.route_descend import scan_places
from pyramidbench.kernels.route_portions import PORTION_BYTES
from pyramidbench.kernels.route_window import Levels, windows
from pyramidbench.kernels.walk_cost import nodes_in
from pyramidbench.kernels.walk_rules import WalkRules
from pyramidbench.problem import Problem
from pyramidbench.tiling import Tiling


def route_bytes(problem: Problem, tiling: Tiling, rules: WalkRules) -> float:
    """Peak bytes of build and route, the lists included."""
    walked = walked_levels(rules.levels, tiling.blocks, rules.branching, rules.start_width)
    width = problem.head_dim * (2 if rules.bounds(problem.head_dim) > 0 and rules.needs_summaries(walked) else 1)
    nodes = problem.batch * problem.kv_heads * nodes_in(tiling.blocks, rules.branching, scored_levels(rules, tiling))
    items = _sets(problem, rules) * tiling.tiles
    _, arriving = list_widths(rules, tiling)
    held = nodes * width * problem.itemsize + lists_bytes(problem, tiling, rules)
    if rules.leaf_score == "summary":
        return held + _window_bytes(problem, tiling, rules)
    leaf = _leaf_bytes(problem, tiling, rules, arriving)
    return held + 4.0 * items * (arriving + 1) + max(leaf, _window_bytes(problem, tiling, rules))


def lists_bytes(problem: Problem, tiling: Tiling, rules: WalkRules) -> float:
    """Bytes of the chosen blocks of every tile, int32, with their counts."""
    longest, _ = list_widths(rules, tiling)
    return 4.0 * _sets(problem, rules) * tiling.tiles * (longest + 1)


def _sets(problem: Problem, rules: WalkRules) -> int:
    return problem.batch * (problem.heads if rules.head_reduce == "none" else problem.kv_heads)


def _window_bytes(problem: Problem, tiling: Tiling, rules: WalkRules) -> float:
    """Scores, summed queries and lists of the largest window, and what is kept where the walk goes on by gathering."""
    sets = _sets(problem, rules)
    lowest = lowest_scored_level(rules, tiling, problem.heads * problem.batch // sets, problem.dtype)
    if lowest is None:
        return 0.0
    top = scored_levels(rules, tiling)
    bounds = 2 if rules.bounds(problem.head_dim) > 0 else 1
    terms = 2 * bounds * problem.head_dim * problem.itemsize if is_summed(rules, tiling) else 0
    listed = 4 * (scan_places(rules.top_k) if top == 1 else rules.inner_width() + 2)
    kept = 4.0 * sets * tiling.tiles * (rules.inner_width() + 1) if lowest > 0 else 0.0
    parts = windows(tiling, Levels(lowest, top, rules.branching), sets, listed + terms, 1)
    return kept + max(sets * part.tiles * (4.0 * part.columns + listed + terms) for part in parts)


def _leaf_bytes(problem: Problem, tiling: Tiling, rules: WalkRules, arriving: int) -> float:
    """Masses, pairs and rows of a portion."""
    sets = _sets(problem, rules)
    group = problem.heads * problem.batch // sets
    rows = group * (1 if rules.tile_reduce == "mean" else score_rows(rules, tiling))
    row_bytes = rows * problem.head_dim * problem.itemsize * (3 if rules.tile_reduce == "mean" else 1)
    places = min(arriving, slots(rules, tiling)) + rules.sink_blocks + rules.local_blocks
    whole = float(sets * tiling.tiles) * (places * (4 * rows + 16) + row_bytes)
    means = (
        4.0 * problem.batch * problem.heads * tiling.tiles * problem.head_dim if rules.tile_reduce == "mean" else 0.0
    )
    return min(whole, PORTION_BYTES) + means
