"""PyramidCache: the inference half of Pyramid Top-K, a cache of keys, values and their pyramid that grows token by token.

The engine knows no kernel: the cache that does the work comes from the method `pyramid`, found through the registry.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from pyramidbench.decoder import CacheLayout, TokenCache
from pyramidbench.errors import UserError
from pyramidbench.problem import DTYPES, Problem
from pyramidbench.registry import create


class PyramidCache:
    """Keys and values of up to `max_len` tokens for each of `batch` sequences, and the pyramid over the keys.

    Everything is allocated here: B·G·max_len·(D + Dv) elements, and about 12 % more in 16 bits at blocks of 64
    (docs/decode.md). Sequences have lengths of their own. A node is summed up when its last token comes, so a new token touches
    O(log max_len) summaries at most and mostly none; `summaries` are those of a build over the keys, bit for bit.

    Parameters are those of the method `pyramid` and of its presets (docs/selection.md); a new token has a set of blocks of
    its own (`query_tile` is 1). head_dim_v: of the values (default head_dim). paged: keys and values lie in pages of
    `block_size` tokens, of which there are `pages` (default: enough for all). dtype: of keys, values and queries. device:
    default "cuda" where there is one. scale multiplies the logits (default 1/√D). implementation: "triton", "reference"
    (torch), or "auto".

    Raises:
        UserError: a parameter that is not accepted; the message says what is.
    """

    def __init__(
        self,
        batch: int,
        kv_heads: int,
        head_dim: int,
        max_len: int,
        *,
        head_dim_v: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: str | torch.device | None = None,
        paged: bool = False,
        pages: int | None = None,
        scale: float | None = None,
        preset: str = "default",
        top_k: int = 16,
        block_size: int = 64,
        implementation: Literal["auto", "triton", "reference"] = "auto",
        **parameters: object,
    ) -> None:
        sizes = {"batch": batch, "kv_heads": kv_heads, "head_dim": head_dim, "max_len": max_len}
        sizes |= {"head_dim_v": head_dim if head_dim_v is None else head_dim_v, "pages": 1 if pages is None else pages}
        for name, size in sizes.items():
            if size < 1:
                raise UserError(f"{name} = {size}: accepted: a whole number from 1 on")
        if pages is not None and not paged:
            raise UserError(
                f"pages = {pages} without paged=True: a contiguous cache has none; leave it out, or set paged"
            )
        if "query_tile" in parameters:
            raise UserError("query_tile: a new token always has a set of its own; leave it out")
        name = str(dtype).removeprefix("torch.")
        if name not in DTYPES:
            raise UserError(f"dtype = {dtype}: accepted: {', '.join(DTYPES)}")
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        given = {
            "top_k": top_k,
            "block_size": block_size,
            "implementation": implementation,
            **parameters,
            "query_tile": 1,
        }
        method = create(f"pyramid:{preset}", given)
        problem = Problem(
            batch=batch, heads=kv_heads, kv_heads=kv_heads, seq_len_q=1, seq_len_kv=max_len, head_dim=head_dim,
            head_dim_v=sizes["head_dim_v"], dtype=name, causal=True, scale=head_dim**-0.5 if scale is None else scale,
            device=place.type, direction="decode",
        )  # fmt: skip
        cache = method.decoder(problem, CacheLayout(place, paged, pages))
        assert isinstance(cache, TokenCache)
        self._cache = cache
        self.implementation = method.step_backend(problem)
        """What runs: "triton" or "reference"."""
        self.max_len = max_len

    @property
    def lengths(self) -> Tensor:
        """Tokens of each sequence, int64 [B], a copy.

        Raises:
            UserError: a replayed CUDA graph appended to a full cache.
        """
        return self._cache.lengths

    @property
    def bytes(self) -> int:
        """Bytes of all that is allocated."""
        return self._cache.bytes

    def append(self, k: Tensor, v: Tensor, counts: Sequence[int] | Tensor | None = None) -> None:
        """Write tokens k [B, G, T, D] and v [B, G, T, Dv] behind the last ones: one, a few, or a prompt.

        counts: of sequence b only the first counts[b] tokens (None: all), for prompts of different lengths. Inside a CUDA graph
        up to `block_size` tokens, without counts; a replay that finds no room writes nothing, and `lengths` or the next call
        outside raises.

        Raises:
            UserError: the cache is full, which leaves it as it was; tensors that do not fit it.
        """
        self._cache.append(k, v, counts=counts)

    def attend(self, q: Tensor) -> Tensor:
        """Attention of the newest M tokens (1 to 16) of every sequence, q [B, H, M, D]: [B, H, M, Dv] in q's dtype.

        Their keys must have been appended. Query i of M sits at position length - M + i and sees the keys up to there; one
        before the first token gets 0. H is a multiple of G, and the heads of a group share a set. The result is that of
        `pyramid_attention` at query_tile 1 for the same queries. No gradients.

        Raises:
            UserError: q does not fit the cache.
        """
        with torch.no_grad():
            return self._cache.attend(q)

    def select(self, q: Tensor) -> Tensor:
        """The blocks that `attend` attends to: int32 [B, sets, M, S], ascending, padded with -1. Sets are the G key/value
        heads, or the H query heads with head_reduce "none"."""
        with torch.no_grad():
            return self._cache.lists(q)

    def summaries(self, sequence: int = 0) -> tuple[Tensor, ...]:
        """Summaries of a sequence's nodes, as a build makes them: a copy [G, nodes, D or 2·D] of each level, the blocks' first.

        Up to the level that the cache at its longest needs. Nodes that are not full yet, which no query ranks, are made now.

        Raises:
            UserError: there is no such sequence.
        """
        with torch.no_grad():
            return self._cache.summaries(sequence)

    def truncate(self, lengths: int | Sequence[int] | Tensor) -> None:
        """Cut sequences off behind so many tokens, for all or for each: what a rejected draft needs.

        Raises:
            UserError: more tokens than a sequence has, or no free page for an open block that sequences shared; the cache
                stays as it was.
        """
        self._cache.truncate(lengths)

    def reorder(self, indices: Sequence[int] | Tensor) -> None:
        """Make sequence b what indices[b] was, for all b at once: what a beam search does after each step.

        An index may come more than once (a beam that branches) or not at all (one that is dropped). Contiguous caches copy the
        sequences that move. Paged ones share the pages of full blocks and copy the open one; summaries are copied in both. A
        captured CUDA graph stays valid: call this between replays.

        Raises:
            UserError: indices that are none, or too few free pages; the cache stays as it was.
        """
        with torch.no_grad():
            self._cache.reorder(indices)

    def reset(self) -> None:
        """Empty all sequences. Nothing is freed."""
        self._cache.truncate(0)

    def reserve(self, tokens: int) -> None:
        """Assign the pages that `tokens` more tokens of every sequence need, before a CUDA graph is replayed so often.

        `append` does this by itself outside of graphs. Without pages it only checks the room.

        Raises:
            UserError: there is not so much room.
        """
        self._cache.reserve(tokens)
