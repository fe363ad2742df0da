"""A cache of keys, values and their pyramid, with its steps: append, attend, truncate. Behind `pyramidbench.PyramidCache`.

It keeps the books (lengths, pages, room) and hands the work to the torch twins (`kernels.cache_append`, `kernels.decode`) or to
Triton (`kernels.decode_append`, `kernels.decode_step`). Lengths lie on the device. The host knows them too, until a step is
captured by a CUDA graph: from then on it reads them back where it must know, since replays move them unseen.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from pyramidbench.decoder import CacheLayout
from pyramidbench.errors import UserError
from pyramidbench.kernels.backends import Backend
from pyramidbench.kernels.cache import CacheSizes, CacheStore
from pyramidbench.kernels.cache_append import append_reference, finish
from pyramidbench.kernels.decode import attend_reference, choose_reference
from pyramidbench.kernels.pages import PageTable
from pyramidbench.kernels.walk_rules import WalkRules
from pyramidbench.selection import BlockSelection
from pyramidbench.tiling import Tiling

MOST_QUERIES = 16


class BlockDecoder:
    """Sequences [B] of up to max_len tokens, and the walk's rules under which their newest tokens choose blocks."""

    def __init__(
        self, sizes: CacheSizes, rules: WalkRules, scale: float, dtype: torch.dtype, layout: CacheLayout, backend: Backend
    ) -> None:  # fmt: skip
        self.sizes, self.rules, self.scale, self.backend = sizes, rules, scale, backend
        self.store = CacheStore.empty(sizes, dtype, layout.device)
        self.captures = backend == "triton"
        self.captured = False
        self.known = [0] * sizes.batch
        self.table = None if self.store.pages is None else PageTable(self.store.pages, sizes.pages or 0)

    @property
    def lengths(self) -> Tensor:
        self.check()
        return self.store.lengths[:, 0].long()

    @property
    def bytes(self) -> int:
        return self.store.bytes

    def append(
        self, k: Tensor, v: Tensor, *, at: int | None = None, counts: Sequence[int] | Tensor | None = None
    ) -> None:
        self._check_tokens(k, v)
        if self._capturing():
            if counts is not None:
                raise UserError("counts cannot be given while a CUDA graph is captured; accepted: all tokens of k")
            if k.shape[2] > self.sizes.block_size:
                raise UserError(
                    f"{k.shape[2]} tokens while a CUDA graph is captured; accepted there: up to block_size, "
                    f"{self.sizes.block_size}, since only a launch that looks for room itself may be replayed"
                )
            self._append(k, v, at, None)
            return
        starts = self._host_lengths() if at is None else [at] * self.sizes.batch
        each = self._each("counts", k.shape[2] if counts is None else counts, [k.shape[2]] * self.sizes.batch)
        ends = [start + count for start, count in zip(starts, each, strict=True)]
        self._make_room(ends)
        if self.table is not None and at is not None:
            held = [len(pages) for pages in self.table.held]
            self.store.copy_pages(self.table.cut(held, [at // self.sizes.block_size] * self.sizes.batch))
        if self.backend == "reference":
            append_reference(self.store, k, v, starts, each)
        else:
            self._append(k, v, at, each if counts is not None else None)
        self.known = ends

    def attend(self, q: Tensor) -> Tensor:
        return self._step(q)[0]

    def step(self, q: Tensor) -> tuple[Tensor, BlockSelection]:
        output, lists = self._step(q)
        return output, self._selection(q, lists)

    def lists(self, q: Tensor) -> Tensor:
        self._check_queries(q)
        if self.backend == "reference":
            return choose_reference(q, self.store, self.rules, self.scale)
        from pyramidbench.kernels.decode_step import step

        return step(q, self.store, self.rules, self.scale)[1]

    def select(self, q: Tensor) -> BlockSelection:
        return self._selection(q, self.lists(q))

    def tokens(self) -> tuple[Tensor, Tensor]:
        length, store = self._one_length("tensor of keys; accepted: equal lengths"), self.store
        if self.table is None:
            return store.k[:, :, :length], store.v[:, :, :length]
        rows = range(self.sizes.batch)
        k, v = (torch.stack([store.rows_of(x, row, 0, length) for row in rows]) for x in (store.k, store.v))
        return k, v

    def _step(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Attention and the blocks it went to, as `lists` has them."""
        self._check_queries(q)
        if self.backend == "reference":
            lists = choose_reference(q, self.store, self.rules, self.scale)
            return attend_reference(q, self.store, lists, self.scale), lists
        from pyramidbench.kernels.decode_step import step

        return step(q, self.store, self.rules, self.scale)

    def _selection(self, q: Tensor, lists: Tensor) -> BlockSelection:
        length = self._one_length("selection; accepted: equal lengths, or `lists`")
        return BlockSelection.from_indices(lists, Tiling(q.shape[2], length, self.sizes.block_size, 1, True))

    def truncate(self, lengths: int | Sequence[int] | Tensor) -> None:
        new = self._each("truncate to", lengths, self._host_lengths())
        if self.table is not None:
            size = self.sizes.block_size
            copies = self.table.cut([-(-length // size) for length in new], [length // size for length in new])
            self.store.copy_pages(copies)
        ends = torch.tensor(new, dtype=torch.int32, device=self.store.lengths.device)
        self.store.lengths.copy_(ends[:, None].expand_as(self.store.lengths))
        self.known = new

    def reorder(self, sources: Sequence[int] | Tensor) -> None:
        lengths, size = self._host_lengths(), self.sizes.block_size
        chosen = self._each("reorder to", sources, [self.sizes.batch - 1] * self.sizes.batch)
        if self.table is not None:
            full, used = [length // size for length in lengths], [-(-length // size) for length in lengths]
            self.store.copy_pages(self.table.reorder(chosen, full, used))
        self.store.reorder(chosen, lengths)
        self.known = [lengths[source] for source in chosen]

    def summaries(self, sequence: int) -> tuple[Tensor, ...]:
        """Copies of the summaries of a sequence's nodes, level by level, [G, nodes, D or 2·D]; the open ones are made here."""
        if not 0 <= sequence < self.sizes.batch:
            raise UserError(f"sequence {sequence}: accepted: 0 to {self.sizes.batch - 1}")
        length = self._host_lengths()[sequence]
        if self.backend == "reference":
            finish(self.store, sequence, length)
        else:
            from pyramidbench.kernels.decode_append import finish_ends

            finish_ends(self.store)
        sizes, nodes = self.sizes, self.store.nodes[sequence]
        levels = zip(sizes.offsets, range(sizes.levels), strict=False)
        return tuple(nodes[:, first : first + sizes.nodes_at(level, length)].clone() for first, level in levels)

    def reserve(self, tokens: int) -> None:
        if tokens < 0:
            raise UserError(f"reserve {tokens} tokens: accepted: a whole number from 0 on")
        self._make_room([length + tokens for length in self._host_lengths()])

    def check(self) -> None:
        if self.captured and int(self.store.full):
            self.store.full.zero_()
            raise UserError(
                f"a replayed append found no room: the cache holds {self.sizes.max_len} tokens a sequence"
                + ("" if self.table is None else ", and pages that `reserve` did not assign are no room")
                + "; nothing was overwritten. Truncate or reset it, or give it a larger max_len"
            )

    def _append(self, k: Tensor, v: Tensor, at: int | None, counts: Sequence[int] | None) -> None:
        from pyramidbench.kernels.decode_append import append

        append(self.store, k, v, at, counts)

    def _capturing(self) -> bool:
        if not self._in_capture():
            return False
        if self.backend == "reference":
            raise UserError("the reference implementation cannot be captured by a CUDA graph; accepted: 'triton'")
        self.captured = True
        return True

    def _in_capture(self) -> bool:
        return self.store.k.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _host_lengths(self) -> list[int]:
        if self._in_capture():
            raise UserError(
                "lengths and pages are the host's, which a CUDA graph leaves out; accepted while one is captured: append "
                "and attend"
            )
        if self.captured:
            self.check()
            self.known = self.store.lengths[:, 0].tolist()
        return self.known

    def _one_length(self, what: str) -> int:
        """Tokens of every sequence; UserError where they differ, since nothing stands for all of them then."""
        lengths = self._host_lengths()
        if len(set(lengths)) > 1:
            raise UserError(f"sequences of {lengths} tokens have no one {what}")
        return lengths[0]

    def _each(self, what: str, given: int | Sequence[int] | Tensor, most: Sequence[int]) -> list[int]:
        """A number for each sequence, from 0 to most[b]; UserError names what was given."""
        values: Any = given.tolist() if isinstance(given, Tensor) else given
        numbers = list(values) if isinstance(values, Sequence) else [values] * len(most)
        are_whole = len(numbers) == len(most) and all(isinstance(number, Integral) for number in numbers)
        if not are_whole or not all(0 <= number <= limit for number, limit in zip(numbers, most, strict=True)):
            raise UserError(f"{what} {values}: accepted: for each sequence a whole number from 0 to {list(most)}")
        return [int(number) for number in numbers]

    def _make_room(self, ends: Sequence[int]) -> None:
        """Raise UserError where sequences of such lengths do not fit; else assign the pages that they need."""
        longest = max(ends)
        if longest > self.sizes.max_len:
            raise UserError(
                f"the cache is full: sequence {ends.index(longest)} would hold {longest} tokens, and there is room for "
                f"{self.sizes.max_len}; nothing was written. Truncate or reset it, or give it a larger max_len"
            )
        if self.table is not None:
            self.table.assign([-(-end // self.sizes.block_size) for end in ends])

    def _check_tokens(self, k: Tensor, v: Tensor) -> None:
        sizes, like = self.sizes, self.store.k
        for name, tensor, dim in (("k", k, sizes.head_dim), ("v", v, sizes.head_dim_v)):
            expected = (sizes.batch, sizes.kv_heads, k.shape[2] if k.dim() == 4 else -1, dim)
            if tuple(tensor.shape) != expected or tensor.dtype != like.dtype or tensor.device.type != like.device.type:
                raise UserError(
                    f"{name} is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}; accepted: [{sizes.batch}, "
                    f"{sizes.kv_heads}, tokens, {dim}] {like.dtype} on {like.device}, as many tokens in k as in v"
                )

    def _check_queries(self, q: Tensor) -> None:
        sizes, like = self.sizes, self.store.k
        fits = q.dim() == 4 and q.shape[0] == sizes.batch and q.shape[1] > 0 and q.shape[1] % sizes.kv_heads == 0
        fits = fits and q.dtype == like.dtype and q.device.type == like.device.type
        if not fits or q.shape[3] != sizes.head_dim or not 1 <= q.shape[2] <= MOST_QUERIES:
            raise UserError(
                f"q is {tuple(q.shape)} {q.dtype} on {q.device}; accepted: [{sizes.batch}, a multiple of {sizes.kv_heads}, 1 "
                f"to {MOST_QUERIES} queries, {sizes.head_dim}] {like.dtype} on {like.device}; append longer prompts and "
                "attend by parts"
            )
