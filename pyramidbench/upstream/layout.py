"""Tensors as other packages want them: tokens before heads, or all sequences of a batch packed into one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyramidbench.problem import Problem


def by_token(*tensors: Tensor) -> tuple[Tensor, ...]:
    """[B, H, S, D] seen as [B, S, H, D], or back; no copy."""
    return tuple(tensor.transpose(1, 2) for tensor in tensors)


@dataclass(frozen=True)
class Packed:
    """The sequences of a batch one behind another, without padding: q [B·M, H, D], k and v [B·N, G, D], and where each
    sequence starts and the last one ends, int32 [B + 1]."""

    q: Tensor
    k: Tensor
    v: Tensor
    starts_q: Tensor
    starts_k: Tensor

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor) -> Packed:
        """Pack [B, H, M, D], [B, G, N, D] and [B, G, N, Dv]; a copy where memory is not by token already."""
        packed_q, packed_k, packed_v = (x.flatten(0, 1) for x in by_token(q, k, v))
        return cls(packed_q, packed_k, packed_v, _starts(q), _starts(k))

    @staticmethod
    def unpacked(output: Tensor, problem: Problem) -> Tensor:
        """[B·M, H, Dv] as [B, H, M, Dv]."""
        return output.unflatten(0, (problem.batch, problem.seq_len_q)).transpose(1, 2)


def _starts(tensor: Tensor) -> Tensor:
    batch, _, length, _ = tensor.shape
    return torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=tensor.device)


def first(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    """The output alone: some versions of a function return the log-sum-exp besides."""
    return result[0] if isinstance(result, tuple) else result


def rescaled(q: Tensor, problem: Problem) -> Tensor:
    """Queries for a kernel whose softmax scale is always 1/√D; the same tensor where that is the problem's scale."""
    factor = problem.scale * problem.head_dim**0.5
    return q if abs(factor - 1) < 1e-12 else q * factor
