"""What the launches of one walk share: the call itself, and sizes that follow from its rules alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from torch import Tensor

from pyramidbench.kernels.pyramid import Pyramid, walked_levels
from pyramidbench.kernels.walk_rules import WalkRules
from pyramidbench.selection import ranked_count
from pyramidbench.tiling import Tiling


@dataclass(frozen=True)
class Call:
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

    @property
    def group(self) -> int:
        """Query heads of a set."""
        return int(self.shape["GROUP"])

    @property
    def dtype(self) -> str:
        return str(self.q.dtype).removeprefix("torch.")


def call_of(q: Tensor, k: Tensor, pyramid: Pyramid, tiling: Tiling, rules: WalkRules, scale: float) -> Call:
    """The call of a walk over q [B, H, M, D] and k [B, G, N, D]."""
    batch, heads, _, head_dim = q.shape
    sets = heads if rules.head_reduce == "none" else k.shape[1]
    items = batch * sets * tiling.tiles
    shape = {
        "GROUP": heads // sets,
        "QUERY_TILE": tiling.query_tile,
        "BLOCK_SIZE": tiling.block_size,
        "HEAD_DIM": head_dim,
        "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
        "SCORE_ROWS": score_rows(rules, tiling),
        "IS_CAUSAL": tiling.causal,
    }
    sizes = (items, sets, k.shape[1], tiling.tiles, tiling.seq_len_q, tiling.seq_len_kv)
    return Call(q, pyramid, tiling, rules, scale, sizes, shape)


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


def scoring_rows(rules: WalkRules, tiling: Tiling) -> int:
    """Rows of a tile, or of its mean query, that meet the nodes, per head."""
    return 1 if rules.tile_reduce == "mean" else score_rows(rules, tiling)


def is_summed(rules: WalkRules, tiling: Tiling) -> bool:
    """Whether the heads' one scoring row each may be summed before it meets the nodes, as summaries allow."""
    single = rules.tile_reduce == "mean" or tiling.query_tile == 1
    return single and (rules.node_score == "summary" or scored_levels(rules, tiling) == 1)


def slots(rules: WalkRules, tiling: Tiling, opened: int = 2) -> int:
    """Places for a level's candidates: the children of the kept nodes and of `opened` forced ones, or the start level."""
    levels = scored_levels(rules, tiling)
    start = -(-tiling.blocks // rules.branching ** (levels - 1))
    below = rules.branching * (rules.inner_width() + opened) if levels > 1 else 1
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


def head_shape(rows: int, group: int, tallest: int) -> tuple[int, int]:
    """Heads and rows of one matrix product: powers of two whose product is at least 16."""
    padded = triton.next_power_of_2(rows)
    heads = min(triton.next_power_of_2(group), max(1, tallest // padded))
    return heads, max(padded, 16 // heads)


def programs(items: int, device: torch.device, per_sm: int) -> int:
    """Programs of a persistent grid."""
    if device.type != "cuda":
        return min(items, 4)
    return min(items, torch.cuda.get_device_properties(device).multi_processor_count * per_sm)
