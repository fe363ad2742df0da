"""NSA's selected attention by fla-core's kernel, over our lists or over those that fla's own kernels choose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor
from torch.nn.functional import pad

from pyramidbench.method import Positive
from pyramidbench.problem import Problem
from pyramidbench.selection import BlockSelection
from pyramidbench.stages import stage
from pyramidbench.upstream import importing
from pyramidbench.upstream.blocks import FedBlocks
from pyramidbench.upstream.layout import by_token
from pyramidbench.upstream.limits import causal_limit, device_limit, dtype_limit

WHAT = "fla-core's parallel_nsa"
MODULE = "fla.ops.nsa.parallel"
INSTALL = "pip install 'pyramidbench[nsa]'"
LARGEST_HEAD_DIM = 256
SMALLEST_GROUP = 16


@dataclass(frozen=True)
class FlaNsa(FedBlocks):
    """Keeps what `rule` keeps for every token, and attends by the kernel of NSA's selection branch in fla-core.

    Parameters besides the budget: rule, the method whose lists are attended to; choose, "rule", or "fla": fla's kernels
    choose as NSA does, by the softmax over mean keys, summed over the group, with the first block and the last two.
    The gates of the other two branches (compression, window) are left out, so that the output is a softmax over the blocks.
    Cost: that of the rule, which stands in for fla's own choice too: 2·D·H·M·n₁ for the softmax, and again to rank.
    Differs from the paper: one branch of three. fla pools keys and values in every call, needed or not.
    """

    kernel: ClassVar[str] = "fla-nsa"
    source: ClassVar[str] = "Native Sparse Attention, arXiv 2502.11089; fla-core 0.6, fla.ops.nsa"
    granularity: ClassVar[str] = "1 × any"
    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {"default": {}, "own": {"choose": "fla"}}

    query_tile: Positive = 1
    choose: Literal["rule", "fla"] = "rule"

    def gap(self) -> str | None:
        return importing.gap(WHAT, (MODULE,), "parallel_nsa", INSTALL)

    def limit(self, problem: Problem) -> str | None:
        reason = device_limit(WHAT, problem) or dtype_limit(WHAT, problem) or causal_limit(WHAT, problem)
        return reason or self._shape_limit(problem) or self._own_limit(problem)

    def _shape_limit(self, problem: Problem) -> str | None:
        group, gradients = problem.group, problem.needs_gradients
        if group < SMALLEST_GROUP or group & (group - 1):
            return f"{WHAT} wants groups of {SMALLEST_GROUP} query heads or a higher power of two, not {group}"
        if self.query_tile != 1:
            return f"{WHAT} chooses for every token, not for tiles of {self.query_tile}; give --query-tile 1"
        if self.block_size < 16 or self.block_size & (self.block_size - 1):
            return f"{WHAT} takes blocks of 16 keys or a higher power of two, not {self.block_size}"
        if max(problem.head_dim, problem.head_dim_v) > LARGEST_HEAD_DIM:
            return f"{WHAT} takes head dims up to {LARGEST_HEAD_DIM}, not {problem.head_dim}"
        if problem.seq_len_q > problem.seq_len_kv or (gradients and problem.seq_len_q < problem.seq_len_kv):
            return (
                f"{WHAT} cannot do {problem.seq_len_q} queries on {problem.seq_len_kv} keys in pass {problem.direction}"
            )
        return None

    def _own_limit(self, problem: Problem) -> str | None:
        """What holds besides of the rule, or where fla chooses."""
        if self.choose == "rule":
            apart = getattr(self.chooser(), "head_reduce", None) == "none"
            return (
                f"{WHAT} gives a group one set of blocks, and '{self.rule}' one to each query head" if apart else None
            )
        if (self.sinks(problem), self.locals(problem)) != (1, 2):
            return (
                "fla's own choice always keeps the first block and the last two; leave sink_blocks and local_blocks out"
            )
        if 2 * _next_power(self._listed()) > self.block_size:
            return f"fla's own choice lists at most {self.block_size // 2} blocks of {self.block_size} keys, forced included"
        return None

    def _listed(self) -> int:
        """Blocks that a query lists, forced ones included."""
        return max(3, self.top_k) if self.forced_in_budget else self.top_k + 3

    def backend(self, problem: Problem) -> str:
        return self.kernel if self.choose == "fla" else super().backend(problem)

    def select(self, q: Tensor, k: Tensor, problem: Problem) -> BlockSelection | None:
        if self.choose == "rule":
            return super().select(q, k, problem)
        pool = importing.function(("fla.ops.utils.pooling",), "mean_pooling")
        compress = importing.function(("fla.ops.nsa.compression",), "parallel_nsa_compression")
        rank = importing.function((MODULE,), "parallel_nsa_topk")
        queries, keys = (x.contiguous() for x in by_token(q, k))
        sizes = {"TK": problem.seq_len_kv, "block_size": self.block_size, "scale": problem.scale}
        with stage("build"):
            means = pool(keys, self.block_size)
        with stage("route"):
            _, lse = compress(q=queries, k=means, v=means, **sizes)
            best = rank(q=queries, k=means, lse=lse, block_counts=self._listed(), **sizes)
        with stage("index"):
            return self._as_selection(best[..., : self._listed()], problem)

    def _as_selection(self, best: Tensor, problem: Problem) -> BlockSelection:
        """fla's lists [B, M, G, S], by falling score with -1 for none, as ascending ones."""
        blocks = self.tiling(problem).blocks
        listed = best.transpose(1, 2).masked_fill(best.transpose(1, 2) < 0, blocks).sort(dim=-1).values
        return BlockSelection.from_indices(listed.masked_fill(listed == blocks, -1), self.tiling(problem))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, selection: BlockSelection | None, problem: Problem) -> Tensor:
        assert selection is not None
        assert selection.indices.shape[1] == problem.kv_heads, "a group's heads share their blocks"
        call, lists = importing.function((MODULE,), "parallel_nsa"), selection.indices
        if problem.needs_gradients:
            # Its backward has a tile of all slots of a list, which must be a power of two.
            lists = pad(lists, (0, _next_power(lists.shape[-1]) - lists.shape[-1]), value=-1)
        queries, keys, values, lists = (x.transpose(1, 2).contiguous() for x in (q, k, v, lists))
        output: Tensor = call(
            queries,
            keys,
            values,
            block_indices=lists,
            block_counts=selection.counts.transpose(1, 2).contiguous(),
            block_size=self.block_size,
            scale=problem.scale,
        )
        return output.transpose(1, 2)


def _next_power(count: int) -> int:
    """The lowest power of two that is no lower."""
    return 1 << (count - 1).bit_length()
