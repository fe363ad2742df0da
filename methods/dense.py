"""Dense attention, by one forced kernel of torch or of another package. What everything is measured against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor

from pyramidbench.cost import Cost, attention_cost
from pyramidbench.method import Kind, Method
from pyramidbench.problem import Problem
from pyramidbench.selection import BlockSelection
from pyramidbench.tiling import Tiling
from pyramidbench.upstream.dense_kernel import DenseKernel, KernelName
from pyramidbench.upstream.fa2 import FA2
from pyramidbench.upstream.fa3 import FA3
from pyramidbench.upstream.fa4 import FA4
from pyramidbench.upstream.sdpa import SDPA

KERNELS: Mapping[KernelName, DenseKernel] = {kernel.name: kernel for kernel in (*SDPA, FA2, FA3, FA4)}
LARGEST_WORKSPACE = 1 << 30
"""Bytes up to which a kernel that holds the whole matrix, "math", is tried beside one that does not."""


@dataclass(frozen=True)
class Dense(Method):
    """Attends to every visible key. Nothing is chosen, so recall and mass are 1 by definition.

    Parameters: kernel. "cudnn", "flash", "efficient" and "math" are those of torch, "fa2", "fa3" and "fa4" FlashAttention
    of these versions from the packages flash-attn, fa3-fwd and flash-attn-4; torch is never left to choose. "auto" is the
    fastest that is valid here: a sweep checks and times all of them on the cell's own tensors before it measures, and the
    row's `backend` names the one that then ran, its `reason` the times of all. Called apart from a sweep, "auto" is the
    first of torch's kernels that the problem allows, in the order above.
    Cost: 4·D·H·P operations for P visible pairs.
    Differs from the sources: causal means bottom-right alignment, also where M and N differ.
    """

    kind: ClassVar[Kind] = "dense"
    source: ClassVar[str] = (
        "torch.nn.functional.scaled_dot_product_attention; FlashAttention-2, arXiv 2307.08691; "
        "FlashAttention-3, arXiv 2407.08608; FlashAttention-4, flash-attn-4"
    )
    granularity: ClassVar[str] = "all keys"
    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {
        "default": {},
        **{name: {"kernel": name} for name in KERNELS},
    }

    kernel: Literal["auto", KernelName] = "auto"

    def unavailable(self) -> str | None:
        return None if self.kernel == "auto" else KERNELS[self.kernel].gap()

    def unsupported(self, problem: Problem) -> str | None:
        return None if self.kernel == "auto" else KERNELS[self.kernel].limit(problem)

    def alternatives(self, problem: Problem) -> tuple[Method, ...]:
        if self.kernel != "auto":
            return ()
        valid = [kernel for kernel in KERNELS.values() if kernel.limit(problem) is None and kernel.gap() is None]
        slim = [kernel for kernel in valid if kernel.workspace(problem) <= LARGEST_WORKSPACE]
        return tuple(replace(self, kernel=kernel.name) for kernel in slim or valid)

    def chosen(self, problem: Problem) -> DenseKernel:
        """The kernel that runs: the forced one, or the first of torch's that the problem allows."""
        if self.kernel != "auto":
            return KERNELS[self.kernel]
        return next(kernel for kernel in SDPA if kernel.limit(problem) is None)

    def backend(self, problem: Problem) -> str:
        return self.chosen(problem).backend

    def select(self, q: Tensor, k: Tensor, problem: Problem) -> None:  # noqa: ARG002 - part of the contract
        return None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, selection: BlockSelection | None, problem: Problem) -> Tensor:
        assert selection is None
        return self.chosen(problem).attend(q, k, v, problem)

    def cost(self, problem: Problem) -> Cost:
        tiling = Tiling(problem.seq_len_q, problem.seq_len_kv, 128, 128, problem.causal)
        # Every key is read at least once, also by a single query.
        listed = max(tiling.visible_pairs() / (128 * 128), float(tiling.blocks))
        attend = attention_cost(problem, tiling.visible_pairs(), listed, 128)
        return Cost((attend,), self.chosen(problem).workspace(problem))
