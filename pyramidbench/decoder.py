"""Decoder: what holds a batch of sequences while they grow, and attends for their newest tokens. `--pass decode` measures it.

`Method.decoder` makes one. By default it is a `RepeatingDecoder`, which keeps keys and values and calls the method's own
`select` and `attend` on them for every step; a method that can keep more between steps (summaries) brings its own, as
`pyramid` does. `TokenCache` is a decoder for sequences of different lengths, which `pyramidbench.PyramidCache` shows to users.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from pyramidbench.errors import UserError
from pyramidbench.problem import DTYPES, Problem
from pyramidbench.selection import BlockSelection

if TYPE_CHECKING:
    from pyramidbench.method import Method


@dataclass(frozen=True)
class CacheLayout:
    """Where a cache lies and how: contiguous, or in `pages` pages of a block each where `paged` (None: enough for all)."""

    device: torch.device
    paged: bool = False
    pages: int | None = None


class Decoder(Protocol):
    """A batch of equally long sequences that grow. k: [B, G, T, D]; v: [B, G, T, Dv]; q: [B, H, M, D], M up to 16."""

    captures: bool
    """Whether a step may be captured by a CUDA graph and replayed, with lengths that are read on the device."""

    def append(self, k: Tensor, v: Tensor, *, at: int | None = None) -> None:
        """Write T tokens from position `at` on (None: behind the last one); the sequences end behind them."""
        ...

    def attend(self, q: Tensor) -> Tensor:
        """Attention of the last M tokens of each sequence, causal among themselves: [B, H, M, Dv]."""
        ...

    def select(self, q: Tensor) -> BlockSelection | None:
        """The blocks that `attend` attends to; None for all of them."""
        ...

    def step(self, q: Tensor) -> tuple[Tensor, BlockSelection | None]:
        """What `attend` and `select` give, chosen once."""
        ...

    def tokens(self) -> tuple[Tensor, Tensor]:
        """Keys [B, G, length, D] and values [B, G, length, Dv] so far; views where they lie in one piece."""
        ...


@runtime_checkable
class TokenCache(Decoder, Protocol):
    """A decoder for sequences of different lengths."""

    @property
    def lengths(self) -> Tensor:
        """Tokens of each sequence, int64 [B], a copy."""
        ...

    @property
    def bytes(self) -> int:
        """Bytes of all that is allocated."""
        ...

    def append(
        self, k: Tensor, v: Tensor, *, at: int | None = None, counts: Sequence[int] | Tensor | None = None
    ) -> None:
        """As `Decoder.append`; of sequence b only the first counts[b] tokens (None: all)."""
        ...

    def lists(self, q: Tensor) -> Tensor:
        """The blocks of each query: int32 [B, sets, M, S], ascending, padded with -1."""
        ...

    def summaries(self, sequence: int) -> tuple[Tensor, ...]:
        """Copies of the summaries of a sequence's nodes, level by level, [G, nodes, D or 2·D]."""
        ...

    def truncate(self, lengths: int | Sequence[int] | Tensor) -> None:
        """Cut sequences off behind so many tokens."""
        ...

    def reorder(self, sources: Sequence[int] | Tensor) -> None:
        """Make sequence b what sources[b] is; a source may come more than once, or not at all."""
        ...

    def reserve(self, tokens: int) -> None:
        """Assign the pages that `tokens` more tokens of every sequence need."""
        ...

    def check(self) -> None:
        """Raise UserError where a replayed append found the cache full."""
        ...


class RepeatingDecoder:
    """Keys and values of equally long sequences, on which a method selects and attends anew at every step."""

    captures = False

    def __init__(self, method: Method, problem: Problem, layout: CacheLayout) -> None:
        """Room for the problem's seq_len_kv tokens.

        Raises:
            UserError: a paged layout.
        """
        if layout.paged:
            raise UserError(f"method '{method.name}' has no paged cache; accepted: a contiguous one")
        shape, dtype = (problem.batch, problem.kv_heads, problem.seq_len_kv), DTYPES[problem.dtype]
        self.k = torch.zeros(*shape, problem.head_dim, dtype=dtype, device=layout.device)
        self.v = torch.zeros(*shape, problem.head_dim_v, dtype=dtype, device=layout.device)
        self.method, self.problem, self.length = method, problem, 0

    def append(self, k: Tensor, v: Tensor, *, at: int | None = None) -> None:
        first = self.length if at is None else at
        end = first + k.shape[2]
        if end > self.k.shape[2]:
            raise UserError(f"the cache holds {self.k.shape[2]} tokens and {end} were to be in it; give it more room")
        self.k[:, :, first:end] = k
        self.v[:, :, first:end] = v
        self.length = end

    def attend(self, q: Tensor) -> Tensor:
        return self.step(q)[0]

    def step(self, q: Tensor) -> tuple[Tensor, BlockSelection | None]:
        k, v, problem = self._call(q)
        selection = self.method.select(q, k, problem)
        if selection is None and q.shape[2] == 1:
            # One newest query sees every key: no mask, which not every dense kernel has for unequal lengths.
            problem = replace(problem, causal=False)
        return self.method.attend(q, k, v, selection, problem), selection

    def select(self, q: Tensor) -> BlockSelection | None:
        k, _, problem = self._call(q)
        return self.method.select(q, k, problem)

    def tokens(self) -> tuple[Tensor, Tensor]:
        return self.k[:, :, : self.length], self.v[:, :, : self.length]

    def _call(self, q: Tensor) -> tuple[Tensor, Tensor, Problem]:
        problem = replace(self.problem, heads=q.shape[1], seq_len_q=q.shape[2], seq_len_kv=self.length)
        return *self.tokens(), problem
