"""Block-Sparse-Attention over our lists, as a mask of blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pyramidbench.method import Positive
from pyramidbench.problem import Problem
from pyramidbench.selection import BlockSelection
from pyramidbench.upstream import importing
from pyramidbench.upstream.blocks import FedBlocks
from pyramidbench.upstream.layout import Packed, first
from pyramidbench.upstream.limits import capability_gap, device_limit, dtype_limit

WHAT = "Block-Sparse-Attention"
MODULE = "block_sparse_attn"
INSTALL = "no wheel exists: build it from the repository mit-han-lab/Block-Sparse-Attention"
BLOCK = 128
HEAD_DIMS = (32, 64, 128)


@dataclass(frozen=True)
class BlockSparseAttn(FedBlocks):
    """Keeps what `rule` keeps, and attends by Block-Sparse-Attention, the kernel under XAttention and others: 128 × 128.

    Parameters besides the budget: rule, the method whose lists are attended to.
    Cost: that of the rule; a mask of all blocks of all heads, one byte each, and its sorting are part of every call.
    Differs from the source: nothing.
    """

    kernel: ClassVar[str] = "block-sparse-attn"
    source: ClassVar[str] = "Block Sparse Attention, mit-han-lab/Block-Sparse-Attention 0.0.2"
    granularity: ClassVar[str] = "128 × 128"

    block_size: Positive = BLOCK
    query_tile: Positive = BLOCK

    def gap(self) -> str | None:
        missing = importing.gap(WHAT, (MODULE,), "block_sparse_attn_func", INSTALL)
        return missing or capability_gap(WHAT, (8, 9, 10))

    def limit(self, problem: Problem) -> str | None:
        reason = device_limit(WHAT, problem) or dtype_limit(WHAT, problem)
        if reason is None and (problem.head_dim not in HEAD_DIMS or problem.head_dim_v != problem.head_dim):
            dims = f"{problem.head_dim} and {problem.head_dim_v}"
            reason = f"{WHAT} takes one head dim of 32, 64 or 128 for q and v, not {dims}"
        return reason or self.sizes_limit(BLOCK, BLOCK)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, selection: BlockSelection | None, problem: Problem) -> Tensor:
        assert selection is not None
        packed = Packed.of(q, k, v)
        mask = selection.mask().repeat_interleave(problem.heads // selection.indices.shape[1], 1)
        output = first(
            importing.function((MODULE,), "block_sparse_attn_func")(
                packed.q,
                packed.k,
                packed.v,
                packed.starts_q,
                packed.starts_k,
                torch.ones(problem.heads, dtype=torch.int32, device=q.device),  # 1: a head with a mask of its own
                None,
                mask,
                problem.seq_len_q,
                problem.seq_len_kv,
                0.0,
                softmax_scale=problem.scale,
                is_causal=problem.causal,
            )
        )
        return Packed.unpacked(output, problem)
