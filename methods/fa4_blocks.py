"""FlashAttention-4's block-sparse attention over our lists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pyramidbench.method import Positive
from pyramidbench.problem import Problem
from pyramidbench.selection import BlockSelection
from pyramidbench.upstream import fa4, importing
from pyramidbench.upstream.blocks import FedBlocks
from pyramidbench.upstream.layout import by_token, first

WHAT = "FlashAttention-4's block-sparse attention"
SPARSITY = ("flash_attn.cute.block_sparsity",)
LARGEST_HEAD_DIM = 128
BLOCK = 128
SMALL = (64, 128)
TILES = {9: 128, 10: 256, 11: 256}
"""Queries of a tile by generation: on Blackwell a program takes two tiles of 128 at once."""


@dataclass(frozen=True)
class Fa4Blocks(FedBlocks):
    """Keeps what `rule` keeps, and attends by FlashAttention-4 over the blocks that are listed, whole ones without a mask.

    Parameters besides the budget: rule, the method whose lists are attended to.
    Cost: that of the rule; parting the lists into whole and partly seen blocks, and with gradients their transposition, is
    part of the call and of every timing.
    Differs from the source: nothing. Blocks of 128 keys; tiles of 128 queries, on Blackwell of 256. On Hopper, without
    gradients, blocks of 64 as well, and tiles of 64 (interface.py, _fit_sm90_fwd_tile_to_block_sparsity; the backward there
    goes by 128 keys).
    """

    kernel: ClassVar[str] = "fa4-blocks"
    source: ClassVar[str] = "FlashAttention-4, flash-attn-4, flash_attn.cute.block_sparsity"
    granularity: ClassVar[str] = "128 × 128"

    block_size: Positive = BLOCK
    query_tile: Positive = 128

    def gap(self) -> str | None:
        return fa4.gap() or importing.gap(WHAT, SPARSITY, "BlockSparseTensorsTorch", fa4.INSTALL)

    def limit(self, problem: Problem) -> str | None:
        dims = max(problem.head_dim, problem.head_dim_v)
        if dims > LARGEST_HEAD_DIM:
            return f"{WHAT} is called with head dims up to {LARGEST_HEAD_DIM}, not {dims}"
        small = _tile() == BLOCK and not problem.needs_gradients
        if small and self.block_size in SMALL and self.query_tile in SMALL:
            return fa4.limit(problem)
        return fa4.limit(problem) or self.sizes_limit(BLOCK, _tile())

    def attend(self, q: Tensor, k: Tensor, v: Tensor, selection: BlockSelection | None, problem: Problem) -> Tensor:
        assert selection is not None
        tensors = importing.function(SPARSITY, "BlockSparseTensorsTorch")
        sizes = (selection.query_tile, selection.block_size)
        group = problem.heads // selection.indices.shape[1]
        by_query = (x.repeat_interleave(group, 1).contiguous() for x in selection.parted())
        output = first(
            importing.function(fa4.MODULES, "flash_attn_func")(
                *by_token(q, k, v),
                softmax_scale=problem.scale,
                causal=problem.causal,
                block_sparse_tensors=tensors(*by_query, block_size=sizes),
                block_sparse_tensors_bwd=self._by_key(selection, problem) if problem.needs_gradients else None,
            )
        )
        return output.transpose(1, 2)

    def _by_key(self, selection: BlockSelection, problem: Problem) -> object:
        """Counts and lists of the tiles that see a block in part, then of those that see it whole."""
        mask = selection.to_block_mask(problem.heads, compiled=True)
        lists = (mask.q_num_blocks, mask.q_indices, mask.full_q_num_blocks, mask.full_q_indices)
        sizes = (selection.query_tile, selection.block_size)
        return importing.function(SPARSITY, "BlockSparseTensorsTorch")(*lists, block_size=sizes)


def _tile() -> int:
    """Queries of a tile on this machine's device; that of Hopper without one."""
    return TILES.get(torch.cuda.get_device_capability()[0], 128) if torch.cuda.is_available() else 128
