"""Quality of a selection: recall of the important blocks, attention mass kept, and what the output loses.

The oracle is exact attention in fp32 on the sampled query tiles; mass may be known on more of them, from a source that
agrees with it there. A block's mass is its share of a tile's attention, and exact Top-K ranks by it. Forced blocks are kept
by every method, so recall leaves them out on both sides; a tile with no more eligible blocks than K is trivial: any method
keeps all of them, so it says nothing and is left out too. A method that chooses how many blocks it keeps (Top-p) is compared
with as many of the best blocks, tile by tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyramidbench.gate import tile_rows
from pyramidbench.method import BlockMethod, Method
from pyramidbench.oracle import ExactRows, TileMass
from pyramidbench.problem import Problem
from pyramidbench.selection import BlockSelection, ranked_count, top_blocks
from pyramidbench.tiling import Tiling


@dataclass(frozen=True)
class Quality:
    """The quality columns of a record; docs/results.md says what each is. None: nothing to measure it on."""

    recall: float | None = None
    recall_p5: float | None = None
    recall_worst_head: float | None = None
    recall_with_forced: float | None = None
    mass_kept: float | None = None
    mass_kept_p5: float | None = None
    mass_kept_worst_head: float | None = None
    mass_ratio: float | None = None
    mass_ratio_p5: float | None = None
    mass_outside_forced: float | None = None
    output_error: float | None = None
    output_error_p95: float | None = None
    output_error_worst_head: float | None = None
    trivial_share: float | None = None
    sampled_tiles: int | None = None
    recall_by_head: list[float | None] | None = None
    mass_kept_by_head: list[float | None] | None = None


def measure_quality(
    output: Tensor,
    selection: BlockSelection | None,
    method: Method,
    problem: Problem,
    tiling: Tiling,
    exact: ExactRows,
    tiles: Tensor,
    wide: TileMass | None = None,
) -> Quality:
    """Judge one output and its selection against exact attention on `tiles`.

    output: [B, H, M, Dv]; `exact` holds the mass and output of those tiles under `tiling`. Without a selection everything
    was attended to: recall and mass are 1, and only the output's error is measured. `wide` holds the mass of more tiles:
    recall and mass are then judged on those, and `sampled_tiles` counts them.
    """
    assert exact.output is not None
    error = _output_error(tile_rows(output, tiling, tiles).to(exact.output.dtype), exact.output)
    judged_tiles = len(tiles)
    if selection is None or not isinstance(method, BlockMethod):
        judged = Quality(recall=1.0, mass_kept=1.0, mass_outside_forced=1.0)
    else:
        known = TileMass(tiles, exact.mass) if wide is None else wide
        judged_tiles = len(known.tiles)
        judged = _Judged.of(selection, method, problem, tiling, known.mass, known.tiles).quality()
    return replace(
        judged,
        output_error=_mean(error),
        output_error_p95=_quantile(error, 0.95),
        output_error_worst_head=_extreme(error, max),
        sampled_tiles=judged_tiles,
    )


@dataclass(frozen=True)
class _Judged:
    """Masks and masses of the sampled tiles. mass: [B, sets, T, blocks]; masks bool of that shape.

    ranked: blocks kept besides the forced ones, int64 [T]; [B, sets, T] of a method that chooses how many.
    """

    mass: Tensor
    listed: Tensor
    best: Tensor
    forced: Tensor
    ranked: Tensor
    trivial: Tensor

    @classmethod
    def of(
        cls,
        selection: BlockSelection,
        method: BlockMethod,
        problem: Problem,
        tiling: Tiling,
        mass: Tensor,
        tiles: Tensor,
    ) -> _Judged:
        sets = selection.indices.shape[1]
        mass = mass.unflatten(1, (sets, problem.heads // sets)).mean(2)
        forced = tiling.forced(tiles, method.sinks(problem), method.locals(problem))
        block = torch.arange(tiling.blocks, device=mass.device).expand(len(tiles), -1)
        is_forced = forced.contains(block, 1).expand_as(mass)
        listed = _mask(selection.indices[:, :, tiles].long(), tiling.blocks)
        if method.adaptive:
            keep = (listed & ~is_forced).sum(-1)
            may = tiling.complete(block, tiles[:, None], tiling.block_size) & ~is_forced
            best = is_forced | _best_of(mass.masked_fill(~may, -1.0), keep)
        else:
            keep = ranked_count(method.top_k, forced, method.forced_in_budget)
            best = _mask(top_blocks(mass, tiles, tiling, forced, keep), tiling.blocks)
        return cls(
            mass=mass,
            listed=listed,
            best=best,
            forced=is_forced,
            ranked=keep,
            trivial=tiling.eligible(tiles, forced) <= keep,
        )

    def quality(self) -> Quality:
        """All columns that need no output."""
        kept = (self.mass * self.listed).sum(-1)
        most = (self.mass * self.best).sum(-1)
        ratio = self._where_chosen(kept / most)
        outside = self._where_chosen((self.mass * ~self.forced).sum(-1))
        outside_kept = self._where_chosen((self.mass * (self.listed & ~self.forced)).sum(-1))
        recall, with_forced = self._recall()
        return Quality(
            recall=_mean(recall),
            recall_p5=_quantile(recall, 0.05),
            recall_worst_head=_extreme(recall, min),
            recall_with_forced=_mean(with_forced),
            mass_kept=_mean(kept),
            mass_kept_p5=_quantile(kept, 0.05),
            mass_kept_worst_head=_extreme(kept, min),
            mass_ratio=_mean(ratio),
            mass_ratio_p5=_quantile(ratio, 0.05),
            mass_outside_forced=_ratio(outside_kept, outside),
            trivial_share=float(self.trivial.double().mean()),
            recall_by_head=_by_head(recall),
            mass_kept_by_head=_by_head(kept),
        )

    def _recall(self) -> tuple[Tensor, Tensor]:
        """Recall without and with the forced blocks, [B, sets, T]; NaN where the tile had no choice.

        A chosen block counts when its mass reaches that of the last block of exact Top-K, so ties are no misses.
        """
        ranked_best = self.best & ~self.forced
        last = self.mass.masked_fill(~ranked_best, torch.inf).amin(-1, keepdim=True)
        hits = (self.listed & ~self.forced & (self.mass >= last)).sum(-1).minimum(self.ranked)
        forced = self.forced.sum(-1)
        recall = hits / self.ranked.clamp(min=1)
        with_forced = (hits + (self.listed & self.forced).sum(-1)) / (self.ranked + forced).clamp(min=1)
        return self._where_chosen(recall), self._where_chosen(with_forced)

    def _where_chosen(self, values: Tensor) -> Tensor:
        """NaN where a tile had nothing to choose."""
        return values.masked_fill(self.trivial | (self.ranked == 0), torch.nan)


def _mask(indices: Tensor, blocks: int) -> Tensor:
    mask = torch.zeros((*indices.shape[:-1], blocks + 1), dtype=torch.bool, device=indices.device)
    return mask.scatter_(-1, torch.where(indices < 0, blocks, indices), True)[..., :-1]


def _best_of(mass: Tensor, count: Tensor) -> Tensor:
    """The `count` highest of the last dimension, a count for each row: bool like `mass`; ties to the lower block."""
    order = mass.sort(dim=-1, descending=True, stable=True).indices
    taken = torch.arange(mass.shape[-1], device=mass.device) < count[..., None]
    return torch.zeros_like(taken).scatter_(-1, order, taken)


def _output_error(got: Tensor, exact: Tensor) -> Tensor:
    """Relative L2 error of each tile's rows together, [B, H, T]; 0 where both are 0."""
    real = ~exact.isnan()
    difference = torch.where(real, got - exact, 0).square().sum((-1, -2)).sqrt()
    size = torch.where(real, exact, 0).square().sum((-1, -2)).sqrt()
    return torch.where(difference == 0, 0, difference / size)


def _mean(values: Tensor) -> float | None:
    return None if bool(values.isnan().all()) else float(values.double().nanmean())


def _quantile(values: Tensor, at: float) -> float | None:
    known = values[~values.isnan()].double()
    return (
        None
        if known.numel() == 0
        else float(known.kthvalue(max(1, min(known.numel(), round(at * known.numel())))).values)
    )


def _ratio(part: Tensor, whole: Tensor) -> float | None:
    total = float(whole.double().nansum())
    return float(part.double().nansum()) / total if total > 0 else None


def _by_head(values: Tensor) -> list[float | None]:
    """Mean over batch and tiles, head by head; None for a head without any value."""
    means = values.double().movedim(1, 0).flatten(1).nanmean(-1)
    return [None if math.isnan(mean) else mean for mean in means.tolist()]


def _extreme(values: Tensor, of: Callable[[list[float]], float]) -> float | None:
    """The highest or lowest of the heads' means, or None where no head has any."""
    known = [mean for mean in _by_head(values) if mean is not None]
    return of(known) if known else None
