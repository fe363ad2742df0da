"""What the walk's twin reads of one key/value head: summaries of nodes, and the rows (keys or means) that score a block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyramidbench.kernels.pyramid import Pyramid, sub_block_means
from pyramidbench.kernels.walk_rules import WalkRules


@dataclass(frozen=True)
class WalkKeys:
    """nodes: [n, D or 2·D], all levels; blocks: [blocks, rows, D]; log_weight: added to each row's logit, or None for zeros."""

    pyramid: Pyramid
    nodes: Tensor
    blocks: Tensor
    log_weight: Tensor | None

    @classmethod
    def of(cls, k: Tensor, pyramid: Pyramid, index: tuple[int, int], rules: WalkRules) -> WalkKeys:
        wide = torch.promote_types(k.dtype, torch.float32)
        nodes = pyramid.nodes[index].to(wide)
        if rules.leaf_score == "sub":
            means, counts = sub_block_means(k, block_size=pyramid.block_size, parts=rules.sub_blocks)
            return cls(pyramid, nodes, means.to(wide), counts.log())
        tail = -k.shape[0] % pyramid.block_size
        blocks = torch.nn.functional.pad(k.to(wide), (0, 0, 0, tail)).unflatten(0, (-1, pyramid.block_size))
        return cls(pyramid, nodes, blocks, _tail_weight(blocks, tail) if tail else None)

    def level(self, level: int) -> Tensor:
        return self.nodes[self.pyramid.offsets[level] : self.pyramid.offsets[level + 1]]


def _tail_weight(blocks: Tensor, tail: int) -> Tensor:
    weight = torch.zeros(blocks.shape[:2], dtype=blocks.dtype, device=blocks.device)
    weight[-1, -tail:] = -torch.inf
    return weight
