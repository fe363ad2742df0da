"""Budget: how much attention a sweep asks a method to keep, and the K that this comes to for a problem."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import cache

import torch

from pyramidbench.axes import Keep, parse_keep
from pyramidbench.cost import planned_blocks
from pyramidbench.method import BlockMethod, Method
from pyramidbench.problem import Problem
from pyramidbench.selection import BlockSelection
from pyramidbench.tiling import Tiling


@dataclass(frozen=True)
class Budget:
    """K itself (an int), the share of pairs left out (a float), or tokens, blocks or a share of blocks (a Keep)."""

    asked: int | float | Keep

    @property
    def text(self) -> str:
        """The budget as it was asked for, such as "top_k=8", "sparsity=0.9" or "keep=5%"."""
        name = {int: "top_k", float: "sparsity", Keep: "keep"}[type(self.asked)]
        return f"{name}={self.asked}"

    def top_k(self, method: BlockMethod, problem: Problem) -> int:
        """K for this method's blocks and forced blocks.

        Raises:
            UserError: tokens that are no whole number of the method's blocks.
        """
        tiling = method.tiling(problem)
        if isinstance(self.asked, Keep):
            return self.asked.blocks(method.block_size, tiling.blocks)
        if isinstance(self.asked, int):
            return self.asked
        return nearest_top_k(
            tiling, method.sinks(problem), method.locals(problem), method.forced_in_budget, 1.0 - self.asked
        )


def reached(asked: str | None, method: Method, problem: Problem, selection: BlockSelection | None) -> str | None:
    """What a selection came to, in the terms of a budget's text: mean blocks by rank for "top_k=8", the share of pairs left
    out for "sparsity=0.9", tokens, blocks or per cent of all blocks for "keep=…". None where nothing was asked or chosen.

    A rule that counts K otherwise (`BlockMethod.own_top_k`) is counted as the others are, unless its own K was asked for.
    """
    if asked is None or selection is None or not isinstance(method, BlockMethod):
        return None
    name, _, amount = asked.partition("=")
    if name == "sparsity":
        return f"sparsity={1 - selection.density():.4g}"
    own = method.shared_top_k(problem) == method.top_k or amount == str(method.top_k)
    ranked = _ranked_blocks(method, problem, selection, own_count=own)
    if name == "top_k":
        return f"top_k={ranked:.4g}"
    unit = parse_keep(amount).unit
    per_block = {"tok": method.block_size, "blk": 1, "%": 100 / selection.tiling.blocks}[unit]
    return f"keep={ranked * per_block:.4g}{unit}"


def _ranked_blocks(method: BlockMethod, problem: Problem, selection: BlockSelection, *, own_count: bool) -> float:
    """Blocks that count as kept by rank, mean over tiles and sets: all but the forced ones, unless K counts these too.

    The forced ones are those of the method where its own count is wanted, else those of the budget that all share.
    """
    counts = selection.counts.double()
    tile = torch.arange(selection.tiling.tiles, device=counts.device)
    if not own_count:
        counts = counts - method.shared_forced(tile, problem)
    elif not method.forced_in_budget:
        counts = counts - selection.tiling.forced(tile, method.sinks(problem), method.locals(problem)).count()
    return float(counts.mean())


@cache
def nearest_top_k(tiling: Tiling, sink_blocks: int, local_blocks: int, forced_in_budget: bool, density: float) -> int:
    """The K whose planned density is nearest to `density`, the smallest of those that are equally near.

    Density is attended pairs ÷ visible pairs, forced blocks included. K is 0 where the forced blocks alone exceed it.
    """

    @cache
    def planned(top_k: int) -> float:
        pairs = planned_blocks(tiling, top_k, sink_blocks, local_blocks, forced_in_budget).pairs
        return pairs / max(1, tiling.visible_pairs())

    every = range(tiling.blocks + 1)
    above = bisect_left(every, density, hi=tiling.blocks, key=planned)
    below = max(0, above - 1)
    nearer = above if planned(above) - density < density - planned(below) else below
    if not forced_in_budget:
        return nearer
    return bisect_left(every, planned(nearer), key=planned)
