"""VSA's block-sparse attention by fastvideo-kernel, over our lists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from pyramidbench.problem import Problem
from pyramidbench.selection import BlockSelection
from pyramidbench.upstream import importing
from pyramidbench.upstream.blocks import FedBlocks
from pyramidbench.upstream.layout import first, rescaled
from pyramidbench.upstream.limits import device_limit, dtype_limit, full_limit
from pyramidbench.upstream.lists import per_query_head

WHAT = "fastvideo-kernel's block-sparse attention"
MODULE = "fastvideo_kernel.block_sparse_attn"
INSTALL = "pip install --no-deps fastvideo-kernel (it pins one version of torch, which --no-deps leaves alone)"
BLOCK = 64
HEAD_DIMS = (64, 128)


@dataclass(frozen=True)
class FastvideoVsa(FedBlocks):
    """Keeps what `rule` keeps, and attends by the sparse branch of Video Sparse Attention: no causal mask, blocks of 64 × 64.

    Parameters besides the budget: rule, the method whose lists are attended to.
    Cost: that of the rule; ragged ends are padded to whole blocks, and key/value heads that a group shares are repeated for
    it, in every call.
    Differs from the paper: the compressed branch, which adds attention over block means to the output, is left out.
    """

    kernel: ClassVar[str] = "vsa"
    source: ClassVar[str] = "VSA, arXiv 2505.13389; fastvideo-kernel 0.3"
    granularity: ClassVar[str] = "64 × 64"

    def gap(self) -> str | None:
        return importing.gap(WHAT, (MODULE,), "block_sparse_attn_from_indices", INSTALL)

    def limit(self, problem: Problem) -> str | None:
        reason = full_limit(WHAT, problem) or device_limit(WHAT, problem) or dtype_limit(WHAT, problem, ("bfloat16",))
        if reason is None and (problem.head_dim not in HEAD_DIMS or problem.head_dim_v != problem.head_dim):
            dims = f"{problem.head_dim} and {problem.head_dim_v}"
            reason = f"{WHAT} takes one head dim of 64 or 128 for q and v, not {dims}"
        return reason or self.sizes_limit(BLOCK, BLOCK)

    def backend(self, problem: Problem) -> str:
        """With the kernel: upstream has one for Hopper, and one in Triton, elsewhere and where the other does not load."""
        return f"{super().backend(problem)}-{'hopper' if _has_hopper_kernel() else 'triton'}"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, selection: BlockSelection | None, problem: Problem) -> Tensor:
        assert selection is not None
        call = importing.function((MODULE,), "block_sparse_attn_from_indices")
        keys, values = (_whole_blocks(x.repeat_interleave(problem.group, 1)) for x in (k, v))
        lists, counts = per_query_head(selection, problem.heads)
        block = torch.arange(selection.tiling.blocks, device=q.device)
        lengths = (problem.seq_len_kv - block * BLOCK).clamp(max=BLOCK).to(torch.int32)
        queries = _whole_blocks(rescaled(q, problem))
        output = first(call(queries, keys, values, lists.contiguous(), counts.contiguous(), lengths))
        return output[:, :, : problem.seq_len_q]


def _whole_blocks(tensor: Tensor) -> Tensor:
    """The tensor with zeros up to a whole number of blocks."""
    missing = -tensor.shape[2] % BLOCK
    return pad(tensor, (0, 0, 0, missing)) if missing else tensor


def _has_hopper_kernel() -> bool:
    """Whether upstream takes its compiled kernel: on compute capability 9.0, where its extension loads and no variable of the
    environment asks for Triton."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return False
    try:
        forward, backward = importing.function((MODULE,), "_get_sm90_ops")()
        asks_for_triton = importing.function((MODULE,), "_force_triton")()
    except ImportError:
        return False
    return forward is not None and backward is not None and not asks_for_triton
