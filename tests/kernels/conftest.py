"""The walk of docs/selection.md in plain numpy, one node at a time, written from the definition and not from the code."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
import pytest
from torch import Tensor

from pyramidbench.kernels.walk_rules import WalkRules
from pyramidbench.tiling import Tiling

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


@dataclass
class Outcome:
    """Kept blocks as [batch][set][tile], and the smallest relative gap between the last kept and the first dropped."""

    lists: list[list[list[list[int]]]]
    gap: float


@pytest.fixture(scope="session")
def walk_by_definition() -> Callable[[Tensor, Tensor, Tiling, WalkRules, float], Outcome]:
    def walk(q: Tensor, k: Tensor, tiling: Tiling, rules: WalkRules, scale: float) -> Outcome:
        heads, kv_heads = q.shape[1], k.shape[1]
        width = 1 if rules.head_reduce == "none" else heads // kv_heads
        outcome = Outcome([], math.inf)
        for b in range(q.shape[0]):
            outcome.lists.append([])
            for first in range(0, heads, width):
                key_head = first * kv_heads // heads
                one = _OneSet(q[b, first : first + width].numpy(), k[b, key_head].numpy(), tiling, rules, scale)
                outcome.lists[b].append([one.tile(t) for t in range(tiling.tiles)])
                outcome.gap = min(outcome.gap, one.gap)
        return outcome

    return walk


def log_sum_exp(values: Array) -> float:
    high = float(values.max(initial=-math.inf))
    return high if high == -math.inf else high + math.log(float(np.exp(values - high).sum()))


class _OneSet:
    """Query heads q [g, M, D] that share one set of blocks over keys k [N, D]."""

    def __init__(self, q: Array, k: Array, tiling: Tiling, rules: WalkRules, scale: float) -> None:
        self.q, self.k, self.tiling, self.rules = q * scale, k, tiling, rules
        self.gap = math.inf
        alpha = min(1.0, 4 / math.sqrt(k.shape[1])) if rules.bound_weight == "auto" else float(rules.bound_weight)
        sizes = [-(-len(k) // tiling.block_size)]
        while sizes[-1] > 1:
            sizes.append(-(-sizes[-1] // rules.branching))
        if rules.levels == "full":
            walked = len(sizes)
        elif rules.levels == "auto":
            walked = next(level for level, size in enumerate(sizes) if size <= rules.start_width or size == 1) + 1
        else:
            walked = min(rules.levels, len(sizes))
        self.sizes = sizes[:walked]
        self.summaries = [
            [self._summary(level, j, alpha) for j in range(size)] for level, size in enumerate(self.sizes)
        ]

    def _keys(self, level: int, node: int) -> range:
        width = self.tiling.block_size * self.rules.branching**level
        return range(node * width, min((node + 1) * width, len(self.k)))

    def _summary(self, level: int, node: int, alpha: float) -> tuple[Array, Array, float]:
        keys = self.k[self._keys(level, node)]
        mean, high, low = keys.mean(0), keys.max(0), keys.min(0)
        return (1 - alpha) * mean + alpha * high, (1 - alpha) * mean + alpha * low, math.log(len(keys))

    def tile(self, number: int) -> list[int]:
        rules, tiling = self.rules, self.tiling
        rows = list(range(tiling.seq_len_q))[number * tiling.query_tile : (number + 1) * tiling.query_tile]
        self.first, self.last = rows[0] + len(self.k) - tiling.seq_len_q, rows[-1] + len(self.k) - tiling.seq_len_q
        if rules.tile_reduce == "mean":
            self.queries = self.q[:, rows].mean(1, keepdims=True)
        else:
            count = min(rules.score_rows or len(rows), len(rows))
            self.queries = self.q[:, [rows[(2 * i + 1) * len(rows) // (2 * count)] for i in range(count)]]
        forced = self._forced()
        arrived = set(range(self.sizes[-1]))
        for level in range(len(self.sizes) - 1, 0, -1):
            ranked = self._rankable(level, arrived, forced)
            kept = self._best(ranked, math.ceil(rules.beam * rules.top_k), {j: self._inner(level, j) for j in ranked})
            opened = kept | {leaf // rules.branching**level for leaf in forced}
            children = {j * rules.branching + child for j in opened for child in range(rules.branching)}
            arrived = {j for j in children if j < self.sizes[level - 1]}
        return sorted(forced | self._leaves(self._rankable(0, arrived, forced), forced))

    def _forced(self) -> set[int]:
        """The sinks and the last `local_blocks` up to the own block, and every block that the tile overlaps."""
        size, rules = self.tiling.block_size, self.rules
        if not self.tiling.causal:
            return set(range(min(rules.sink_blocks, self.sizes[0])))
        local = {b for b in range(self.sizes[0]) if self.first // size - rules.local_blocks < b <= self.last // size}
        return {b for b in range(self.sizes[0]) if b * size <= self.last and (b < rules.sink_blocks or b in local)}

    def _rankable(self, level: int, nodes: Collection[int], forced: set[int]) -> list[int]:
        """Complete nodes that hold no forced block."""
        holders = {leaf // self.rules.branching**level for leaf in forced}
        seen = self.first if self.tiling.causal else len(self.k)
        return sorted(j for j in nodes if j not in holders and self._keys(level, j)[-1] <= seen)

    def _best(self, nodes: Collection[int], count: int, scores: dict[int, float]) -> set[int]:
        order = sorted(nodes, key=lambda j: (-scores[j], j))
        if 0 < count < len(order):
            kept, dropped = scores[order[count - 1]], scores[order[count]]
            self.gap = min(self.gap, abs(kept - dropped) / max(abs(kept), abs(dropped), 1e-300))
        return set(order[:count])

    def _estimate(self, level: int, node: int) -> Array:
        """Estimated log-mass of a node for each head and row, [g, R]."""
        upper, lower, log_count = self.summaries[level][node]
        positive, negative = np.maximum(self.queries, 0), np.minimum(self.queries, 0)
        result: Array = positive @ upper + negative @ lower + log_count
        return result

    def _inner(self, level: int, node: int) -> float:
        nodes = [(level, node)]
        if level and self.rules.node_score == "children":
            first = node * self.rules.branching
            below = range(first, min(first + self.rules.branching, self.sizes[level - 1]))
            nodes = [(level - 1, child) for child in below]
        terms = np.stack([self._estimate(*where) for where in nodes])
        return sum(log_sum_exp(terms[:, head]) for head in range(len(self.queries)))

    def _leaves(self, ranked: Collection[int], forced: set[int]) -> set[int]:
        rules = self.rules
        keep = max(0, rules.top_k - len(forced)) if rules.forced_in_budget else rules.top_k
        by_summary = {j: self._inner(0, j) for j in ranked}
        if rules.leaf_score == "summary":
            return self._best(ranked, keep, by_summary)
        if rules.leaf_candidates is not None:
            ranked = self._best(ranked, rules.leaf_candidates * rules.top_k, by_summary)
        mass = {j: self._log_mass(j, hide=False) for j in ranked}
        normaliser = None
        if rules.head_reduce == "sum_prob" and ranked:
            every = np.stack([*mass.values(), *(self._log_mass(j, hide=self.tiling.causal) for j in forced)])
            normaliser = np.array([[log_sum_exp(column) for column in head] for head in every.transpose(1, 2, 0)])
        return self._best(ranked, keep, {j: self._join(rows, normaliser) for j, rows in mass.items()})

    def _join(self, rows: Array, normaliser: Array | None) -> float:
        if normaliser is not None:
            return float(np.exp(rows - normaliser).sum())
        if self.rules.head_reduce == "sum_lse":
            return sum(log_sum_exp(head) for head in rows)
        return log_sum_exp(rows)

    def _log_mass(self, block: int, *, hide: bool) -> Array:
        """Log-mass of a block for each head and row, [g, R]; `hide` hides what the tile's first query may not see."""
        keys = self._keys(0, block)
        parts = [range(x, x + 1) for x in keys]
        if self.rules.leaf_score == "sub":
            size = -(-self.tiling.block_size // self.rules.sub_blocks)
            parts = [range(x, min(x + size, keys.stop)) for x in range(keys.start, keys.stop, size)]
        logits = np.stack([self.queries @ self.k[part].mean(0) + math.log(len(part)) for part in parts], axis=-1)
        if hide:
            logits[..., [part[-1] > self.first for part in parts]] = -math.inf
        return np.array([[log_sum_exp(row) for row in head] for head in logits])
