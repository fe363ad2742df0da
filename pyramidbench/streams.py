"""The numbers of synthetic inputs: random streams that are named, and normal arrays drawn from them."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
PIECE = 1 << 12
"""Rows that have a stream of their own where the last rows of many are wanted. With another number it is another input."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the tensors to make: q [batch, heads, queries, head_dim], k and v [batch, kv_heads, keys, …]."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    head_dim_v: int

    @property
    def length(self) -> int:
        """Tokens to make: queries are the last ones, keys too."""
        return max(self.queries, self.keys)

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


@dataclass(frozen=True)
class Streams:
    """The random streams of one input, seed, sequence and key/value head: a role names each."""

    name: str
    seed: int
    sequence: int
    kv_head: int

    def of(self, role: str, *index: int) -> np.random.Generator:
        """A stream of this head's own."""
        return self._stream(role, self.kv_head + 1, *index)

    def shared(self, role: str) -> np.random.Generator:
        """A stream that all heads of a sequence see alike, such as where its topics change."""
        return self._stream(role, 0)

    def _stream(self, role: str, *index: int) -> np.random.Generator:
        names = [zlib.crc32(self.name.encode()), zlib.crc32(role.encode())]
        return np.random.default_rng([*names, self.seed % 2**63, self.sequence, *index])


def normal(stream: np.random.Generator, rows: int, columns: int) -> Array:
    """Standard normal numbers, fp32 [rows, columns]."""
    return stream.standard_normal((rows, columns), dtype=np.float32)


def last_normal(streams: Streams, role: str, index: int, sizes: Sizes) -> Array:
    """The last `queries` rows of as many as there are tokens, [queries, head_dim].

    Every PIECE rows have a stream of their own, the first ones that of the role: a step of decoding draws one piece, where all
    queries before it would be two thirds of what its inputs take.
    """
    first = sizes.length - sizes.queries
    pieces = []
    for piece in range(first // PIECE, -(-sizes.length // PIECE)):
        begin = piece * PIECE
        stream = streams.of(role, index, *([piece] if piece else []))
        rows = normal(stream, min(PIECE, sizes.length - begin), sizes.head_dim)
        pieces.append(rows[max(0, first - begin) :])
    return np.concatenate(pieces)
