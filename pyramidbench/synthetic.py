"""Synthetic inputs: seeded generative models of q, k and v, one dataclass each, whose docstring says what it models.

Every model fills one (sequence, key/value head) by itself and draws its numbers on the CPU from streams named by
(input, seed, sequence, head, role), token after token; queries of `normal` have a stream for every 4 096 tokens. So every
device gets the same numbers, however many threads fill heads, and the first n tokens of a longer sequence are the sequence
of length n (for `topics` up to the rounding of one matrix product). Query i of M is the token at position i + N - M of N.

The models think in logits: q and k are made so that q·k is the logit, then each is multiplied by D^¼, which the
softmax scale 1/√D takes out again.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pyramidbench.errors import UserError, unknown
from pyramidbench.streams import PIECE, Array, Sizes, Streams, last_normal, normal

Integers = NDArray[np.int64]
ARRAY_BYTES = 8 << 30
"""Of arrays that are held at a time, where several heads are filled at once."""


class Model(Protocol):
    """A generative model of one key/value head with its group of query heads."""

    def head(self, sizes: Sizes, streams: Streams) -> tuple[Array, Array, Array]:
        """Returns q [group, length, D], of which the last `queries` rows are enough, k [length, D], v [length, Dv]."""

    def floats(self, sizes: Sizes) -> int:
        """About how many numbers `head` holds at a time."""


@dataclass(frozen=True)
class Normal:
    """Independent standard normal q, k and v, what kernels are usually timed with.

    Models nothing: attention is spread almost evenly, so the best tenth of the blocks holds about a tenth of the mass.
    Good for time and memory. It cannot show quality: there is nothing to find.
    """

    def head(self, sizes: Sizes, streams: Streams) -> tuple[Array, Array, Array]:
        """Standard normal arrays; the logits q·k/√D have variance 1."""
        q = np.stack([last_normal(streams, "q", h, sizes) for h in range(sizes.group)])
        k = normal(streams.of("k"), sizes.length, sizes.head_dim)
        return q, k, normal(streams.of("v"), sizes.length, sizes.head_dim_v)

    def floats(self, sizes: Sizes) -> int:
        """Of its arrays, and of one query head more while they are put together."""
        queries = (2 * sizes.group * sizes.queries + PIECE) * sizes.head_dim
        return queries + sizes.length * (sizes.head_dim + sizes.head_dim_v)


@dataclass(frozen=True)
class Topics:
    """A document whose topics persist over runs of tokens, with an attention sink and a preference for near tokens.

    The sequence is cut into runs of `run_min` to `run_max` tokens; each run has one of `topics` topics, and topics come
    back. A key points along its topic's direction, a query along its own topic's and along that of an earlier run
    that it asks about, both in noise; query heads differ in sharpness. Token 0 is a sink whose share does not fade with
    length, and its value is near zero. Position enters through rotating pairs, so that nearby keys gain and the gain
    fades with the logarithm of the distance. Values follow the topic.

    What is relevant is contiguous over several blocks, so a block's mean key is informative and a pyramid's nodes are
    too: this input is kind to pooled selectors. It cannot show isolated keys (see `needles`), the outlier dimensions
    of trained keys, or heads that differ in kind; it ranks no method for a real model. At 8 192 tokens and
    head_dim 64, over the later half of the tiles, the best tenth of the blocks holds .90 of the mass and the sink block
    with the last two .71; SmolLM2 on Python source has .87 and .65 (blocks and tiles of 64).
    """

    topics: int = 32
    run_min: int = 128
    run_max: int = 512
    match: float = 3.0
    sink: float = 2.0
    near: float = -1.5

    def head(self, sizes: Sizes, streams: Streams) -> tuple[Array, Array, Array]:
        """Raises UserError for a head_dim under 8: the sink, positions and topics need dimensions of their own."""
        if sizes.head_dim < 8:
            raise UserError(f"input 'topics' needs a head_dim of at least 8, given {sizes.head_dim}; or use 'normal'.")
        length, pairs = sizes.length, min(8, sizes.head_dim // 8)
        content = sizes.head_dim - 1 - 2 * pairs
        topic, asked = self._runs(length, streams)
        directions = _unit(normal(streams.of("directions"), self.topics, content))
        noise = (0.7 / content) ** 0.25
        gain = np.float32(self.match**0.5)
        position = np.arange(length, dtype=np.float32)
        rotating = _rotating_pairs(position, pairs)

        salience = streams.of("salience").uniform(0.6, 1.4, (length, 1)).astype(np.float32)
        k_content = gain * salience * directions[topic] + noise * normal(streams.of("k"), length, content)
        is_sink = (position == 0)[:, None].astype(np.float32) * gain
        k = _join(k_content, is_sink, rotating)

        log_seen = np.log1p(position)[:, None]
        q_sink = (log_seen + np.float32(self.sink)) / gain
        q_near = (log_seen + np.float32(self.near)) / np.float32(pairs) * rotating
        sharpness = streams.of("sharpness").uniform(0.75, 1.25, sizes.group).astype(np.float32)
        wanted = gain * (directions[topic] + directions[asked])
        q = np.stack(
            [
                _join(sharp * wanted + noise * normal(streams.of("q", h), length, content), q_sink, q_near)
                for h, sharp in enumerate(sharpness)
            ]
        )
        turn = _rotation(streams.of("rotation"), sizes.head_dim) * np.float32(sizes.head_dim**0.25)
        values = normal(streams.of("values"), self.topics, sizes.head_dim_v)
        v = 0.5 * values[topic] + normal(streams.of("v"), length, sizes.head_dim_v)
        v[0] *= 0.05
        return q @ turn, k @ turn, v

    def floats(self, sizes: Sizes) -> int:
        """Of its arrays and what they are put together from."""
        return 3 * sizes.length * ((sizes.group + 1) * sizes.head_dim + sizes.head_dim_v)

    def _runs(self, length: int, streams: Streams) -> tuple[Integers, Integers]:
        """Topic of each token, and the topic that it asks about, one of an earlier run: int64 [length] each."""
        runs = length // self.run_min + 1
        lengths = streams.shared("lengths").integers(self.run_min, self.run_max + 1, runs)
        topics = streams.shared("topics").integers(0, self.topics, runs)
        earlier = (streams.shared("asked").random(runs) * np.arange(runs)).astype(np.int64)
        return np.repeat(topics, lengths)[:length], np.repeat(topics[earlier], lengths)[:length]


@dataclass(frozen=True)
class Needles:
    """Isolated single keys that later queries match strongly, in noise.

    One key in each stretch of `spacing` tokens, at a random place, is a needle with a direction of its own. Each run of
    `patience` queries looks for one needle that lies before it, anywhere with equal chance, and gives it most of
    its attention at every length. All other keys are noise.

    A needle moves its block's mean by 1/64 or so, and its neighbours say nothing about it: the hard case for every
    selector that pools keys. It cannot show an advantage that comes from neighbouring keys being alike, and trained
    models do not scatter what matters at random: it is a bound from below, not a forecast.
    """

    spacing: int = 256
    patience: int = 32
    strength: float = 2.0

    def head(self, sizes: Sizes, streams: Streams) -> tuple[Array, Array, Array]:
        """Arrays for one head; until the first needle has passed, queries are noise."""
        length, dim = sizes.length, sizes.head_dim
        count = length // self.spacing + 1
        directions = _unit(normal(streams.of("directions"), count, dim))
        place = np.arange(count) * self.spacing + streams.of("place").integers(0, self.spacing, count)
        present = place < length
        needle_gain = np.float32(np.log(4096.0) ** 0.5)
        noise = np.float32(dim**-0.25)

        k = noise * normal(streams.of("k"), length, dim)
        k[place[present]] += needle_gain * directions[present]

        position = np.arange(length)
        run_start = position // self.patience * self.patience
        passed = np.searchsorted(place, run_start)
        draw = streams.of("wanted").random(length // self.patience + 1)[position // self.patience]
        wanted = (draw * passed).astype(np.int64)
        logit = (np.log1p(position) + self.strength).astype(np.float32) / needle_gain
        search = np.where(passed > 0, logit, 0)[:, None].astype(np.float32) * directions[wanted]
        q = np.stack([search + noise * normal(streams.of("q", h), length, dim) for h in range(sizes.group)])
        scale = np.float32(dim**0.25)
        return q * scale, k * scale, normal(streams.of("v"), length, sizes.head_dim_v)

    def floats(self, sizes: Sizes) -> int:
        """Of its arrays and what they are put together from."""
        return 3 * sizes.length * ((sizes.group + 1) * sizes.head_dim + sizes.head_dim_v)


MODELS: dict[str, Model] = {"normal": Normal(), "topics": Topics(), "needles": Needles()}


def synthetic_tensors(name: str, sizes: Sizes, seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, H, M, D], k [B, G, N, D] and v [B, G, N, Dv] of a synthetic input on the CPU, in `dtype`.

    Raises:
        UserError: no such input, or sizes that it cannot fill.
    """
    if name not in MODELS:
        raise unknown("input", name, [*MODELS, "FILE.safetensors"])
    model = MODELS[name]
    q = torch.empty((sizes.batch, sizes.heads, sizes.queries, sizes.head_dim), dtype=dtype)
    k = torch.empty((sizes.batch, sizes.kv_heads, sizes.keys, sizes.head_dim), dtype=dtype)
    v = torch.empty((sizes.batch, sizes.kv_heads, sizes.keys, sizes.head_dim_v), dtype=dtype)

    def fill(b: int, g: int) -> None:
        queries, keys, values = model.head(sizes, Streams(name, seed, b, g))
        q[b, g * sizes.group : (g + 1) * sizes.group] = torch.from_numpy(queries[:, -sizes.queries :])
        k[b, g] = torch.from_numpy(keys[-sizes.keys :])
        v[b, g] = torch.from_numpy(values[-sizes.keys :])

    # numpy draws without the interpreter's lock.
    at_once = min(torch.get_num_threads(), ARRAY_BYTES // (4 * model.floats(sizes)))
    with ThreadPoolExecutor(max(1, at_once)) as threads:
        filled = [threads.submit(fill, b, g) for b, g in product(range(sizes.batch), range(sizes.kv_heads))]
        for head in filled:
            head.result()
    return q, k, v


def _unit(vectors: Array) -> Array:
    length: Array = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / length


def _join(*parts: Array) -> Array:
    return np.concatenate(parts, axis=-1).astype(np.float32)


def _rotating_pairs(position: Array, pairs: int) -> Array:
    """cos and sin of the position at `pairs` wavelengths from 12 to about 6 000 tokens: float32 [length, 2 pairs]."""
    angle = position[:, None].astype(np.float64) / np.geomspace(2, 1024, pairs)
    return np.concatenate([np.cos(angle), np.sin(angle)], axis=-1).astype(np.float32)


def _rotation(stream: np.random.Generator, dim: int) -> Array:
    """A random rotation (float32 [dim, dim]), so that no coordinate is special."""
    orthogonal, upper = np.linalg.qr(stream.standard_normal((dim, dim)))
    return (orthogonal * np.sign(np.diag(upper))).astype(np.float32)
