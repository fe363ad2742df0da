"""FlexAttention over our lists: torch's own block-sparse attention, compiled for the call."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from pyramidbench.cost import Cost
from pyramidbench.method import Positive
from pyramidbench.problem import Problem
from pyramidbench.selection import BlockSelection
from pyramidbench.upstream.blocks import FedBlocks
from pyramidbench.upstream.layout import first

SMALLEST = 128
"""Keys and queries of a block, at least and in steps, on a GPU: what its kernels take at every head dim."""


@dataclass(frozen=True)
class Flex(FedBlocks):
    """Keeps what `rule` keeps, and attends by FlexAttention, fed with a BlockMask made of the lists.

    Parameters besides the budget: rule, the method whose lists are attended to; mode, "compiled" by torch.compile, "eager", or
    "auto": compiled on a GPU, and eager on a CPU, where each shape would take some 12 s to compile.
    Cost: that of the rule; making the BlockMask, with its transposition, is part of the call and of every timing. Eager
    computes all M × N logits and holds them, whatever is listed.
    Differs from the source: nothing. On a CPU it runs forward only.
    """

    kernel: ClassVar[str] = "flex"
    source: ClassVar[str] = "FlexAttention, arXiv 2412.05496, torch.nn.attention.flex_attention"
    granularity: ClassVar[str] = "128s × 128s"

    block_size: Positive = 128
    query_tile: Positive = 128

    mode: Literal["auto", "compiled", "eager"] = "auto"

    def gap(self) -> str | None:
        return None

    def limit(self, problem: Problem) -> str | None:
        if problem.device == "cpu" and problem.needs_gradients:
            return "FlexAttention has no backward on a CPU; give --pass forward"
        if self._is_eager(problem):
            return None
        if problem.dtype == "float64":
            return "FlexAttention has no float64 when compiled"
        if problem.device == "cuda" and (self.block_size % SMALLEST or self._tile(problem) % SMALLEST):
            return (
                f"FlexAttention wants blocks and tiles in multiples of {SMALLEST} on a GPU, not {self.block_size} and "
                f"{self.query_tile}; give --block-size {SMALLEST} --query-tile {SMALLEST}"
            )
        return None

    def _tile(self, problem: Problem) -> int:
        """Queries of a tile as the mask says it. A single query, as in decoding, is all of its tile, however long that is."""
        return SMALLEST if problem.seq_len_q == 1 else self.query_tile

    def _is_eager(self, problem: Problem) -> bool:
        return self.mode == "eager" or (self.mode == "auto" and problem.device == "cpu")

    def backend(self, problem: Problem) -> str:
        return super().backend(problem) + ("-eager" if self._is_eager(problem) else "")

    def attend(self, q: Tensor, k: Tensor, v: Tensor, selection: BlockSelection | None, problem: Problem) -> Tensor:
        assert selection is not None
        eager = self._is_eager(problem)
        call = _eager if eager else _compiled(problem, self.block_size, self._tile(problem))
        mask = replace(selection, query_tile=self._tile(problem)).to_block_mask(problem.heads, compiled=not eager)
        return first(call(q, k, v, block_mask=mask, scale=problem.scale, enable_gqa=problem.group > 1))

    def cost(self, problem: Problem) -> Cost:
        cost = super().cost(problem)
        matrices = 12.0 * problem.batch * problem.heads * problem.seq_len_q * problem.seq_len_kv
        return replace(cost, workspace_bytes=cost.workspace_bytes + matrices) if self._is_eager(problem) else cost


def _eager(q: Tensor, k: Tensor, v: Tensor, **others: Any) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    with warnings.catch_warnings():
        # That this is slow is why the row's backend says "eager".
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile", UserWarning)
        return flex_attention(q, k, v, **others)


@lru_cache(maxsize=1)
def _compiled(problem: Problem, block_size: int, query_tile: int) -> Callable[..., Any]:  # noqa: ARG001 - what it is compiled for
    """FlexAttention, compiled anew for each problem and size of block when first called with it.

    torch compiles a function for eight sets of shapes and then, with a word in its log only, no longer: so what was compiled
    before is dropped, and with `fullgraph` it fails where it cannot compile.
    """
    from torch.nn.attention.flex_attention import flex_attention

    torch.compiler.reset()
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)
