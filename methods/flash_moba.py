"""FlashMoBA's attention over our lists, token by token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from pyramidbench.method import Positive
from pyramidbench.problem import Problem
from pyramidbench.selection import BlockSelection
from pyramidbench.upstream import importing
from pyramidbench.upstream.blocks import FedBlocks
from pyramidbench.upstream.layout import Packed, first
from pyramidbench.upstream.limits import capability_gap, device_limit, dtype_limit, head_dim_limit
from pyramidbench.upstream.lists import Columns

WHAT = "FlashMoBA"
MODULE = "flash_moba.flash_moba_interface"
INSTALL = "no wheel exists: build it from the repository mit-han-lab/flash-moba"


@dataclass(frozen=True)
class FlashMoba(FedBlocks):
    """Keeps what `rule` keeps for every token, and attends by FlashMoBA, which gathers for each block the queries that list it.

    Parameters besides the budget: rule, the method whose lists are attended to. `flat` (mean keys) is MoBA's own rule, but for
    the first block and the last but one, which all methods here keep.
    Cost: that of the rule; turning the lists into columns is a sort of M · S numbers a head, in every call.
    Differs from the paper: the fused Top-K of the package is not used, so that the blocks are those of the other methods.
    """

    kernel: ClassVar[str] = "flash-moba"
    source: ClassVar[str] = "Optimizing Mixture of Block Attention, arXiv 2511.11571; flash-moba 2.0"
    granularity: ClassVar[str] = "1 × any"

    query_tile: Positive = 1

    def gap(self) -> str | None:
        missing = importing.gap(WHAT, (MODULE,), "flash_moba_attn_varlen_func", INSTALL)
        return missing or capability_gap(WHAT, (8, 9, 10, 12))

    def limit(self, problem: Problem) -> str | None:
        if self.query_tile != 1:
            return f"{WHAT} chooses for every token, not for tiles of {self.query_tile}; give --query-tile 1"
        return device_limit(WHAT, problem) or dtype_limit(WHAT, problem) or head_dim_limit(WHAT, problem, 256)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, selection: BlockSelection | None, problem: Problem) -> Tensor:
        assert selection is not None
        packed, columns = Packed.of(q, k, v), Columns.of(selection, problem.heads)
        rows = importing.function((MODULE,), "decide_lg_block_m")(
            selection.indices.shape[-1], self.block_size, problem.seq_len_kv, problem.causal
        )
        output = first(
            importing.function((MODULE,), "flash_moba_attn_varlen_func")(
                packed.q,
                packed.k,
                packed.v,
                packed.starts_q,
                packed.starts_k,
                problem.seq_len_q,
                problem.seq_len_kv,
                columns.first,
                columns.counts,
                columns.rows,
                lg_block_m=rows,
                lg_block_n=self.block_size,
                softmax_scale=problem.scale,
                causal=problem.causal,
            )
        )
        return Packed.unpacked(output, problem)
