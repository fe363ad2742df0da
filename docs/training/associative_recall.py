"""Does sparse attention train? A small transformer learns to recall pairs, once with each attention, from the same start.

Task: 24 passages of 4 (key, value) pairs, then 4 sections of 16 questions, each a key whose value must be told. In the
layout `topics` a passage holds the keys of one topic and a section asks about two passages; in `scattered` the pairs
and the questions stand anywhere. Values are drawn anew for every sequence, so that nothing but the context tells them.
Model: two layers, two query heads over one key/value head. A key also sees the token before its own (a token shift, as
in RWKV): a value's key can thus name the pair, and no position code is needed.
Budget: 4 blocks of 8 keys by rank, besides the first one and the last two, as pyramidbench counts it.

    python docs/training/associative_recall.py  # all curves, to curves.csv; --help shows how to choose some
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pyramidbench as pb
from pyramidbench.tiling import Tiling

PASSAGES, PAIRS, SECTIONS, QUESTIONS, VALUES = 24, 4, 4, 16, 16
KEYS, ASKED, TOKENS = PASSAGES * PAIRS, SECTIONS * QUESTIONS, 2 * PASSAGES * PAIRS + SECTIONS * QUESTIONS
BLOCK_SIZE, TOP_K, START_WIDTH = 2 * PAIRS, 4, 8
"""A block is a passage. Walks of 32 blocks start at 8 nodes, two levels above; the default of 64 would leave one level."""
WIDTH, HEADS, KV_HEADS, HEAD_DIM = 64, 2, 1, 32
BATCH, HELD_OUT, WARM_UP, LEARNING_RATE = 8, 16, 30, 6e-3
PYRAMIDS: dict[str, dict[str, int | None]] = {
    "pyramid": {},
    "pyramid, all exact": {"leaf_candidates": None},
    "pyramid tile 16": {"query_tile": 16},
    "pyramid tile 16, all exact": {"query_tile": 16, "leaf_candidates": None},
}
"""What each pyramid sets besides the budget; "all exact" scores every block that the walk reaches by its keys."""
TILES = ("pyramid tile 16", "pyramid tile 16, all exact")
CURVES = (
    *(("topics", name, 0) for name in ("dense", "pyramid", *TILES, "sliding_window")),
    *(("topics", name, 1) for name in ("dense", "pyramid")),
    *(("scattered", name, 0) for name in ("dense", "pyramid", "pyramid, all exact", TILES[0])),
)
"""Layout, attention and seed of what curves.csv holds."""


@dataclass(frozen=True)
class Batch:
    """tokens: int64 [B, TOKENS], the questions last. answers: int64 [B, ASKED], the value asked for. blocks: int64
    [B, ASKED], the key block that holds it."""

    tokens: Tensor
    answers: Tensor
    blocks: Tensor


def draw_batch(size: int, layout: str, generator: torch.Generator) -> Batch:
    """`size` sequences, which the generator alone decides."""
    if layout == "topics":
        topics = _shuffled(size, 1, PASSAGES, generator)[:, 0, :, None]
        keys = (topics * PAIRS + _shuffled(size, PASSAGES, PAIRS, generator)).flatten(1)
        passages = _shuffled(size, 1, PASSAGES, generator)[:, 0, : 2 * SECTIONS, None]
        pairs = (passages * PAIRS + torch.arange(PAIRS)).view(size, SECTIONS, 2 * PAIRS)
        order = _shuffled(size, SECTIONS, QUESTIONS, generator) % (2 * PAIRS)
        asked = pairs.gather(2, order).flatten(1)
    else:
        keys = _shuffled(size, 1, KEYS, generator)[:, 0]
        asked = _shuffled(size, 1, KEYS, generator)[:, 0, :ASKED]
    values = torch.randint(VALUES, (size, KEYS), generator=generator)
    context = torch.stack([keys, KEYS + values], -1).flatten(1)
    tokens = torch.cat([context, keys.gather(1, asked)], 1)
    return Batch(tokens, values.gather(1, asked), 2 * asked // BLOCK_SIZE)


def _shuffled(size: int, rows: int, count: int, generator: torch.Generator) -> Tensor:
    """A permutation of 0 … count - 1 for each row, int64 [size, rows, count]."""
    return torch.rand(size, rows, count, generator=generator).argsort(-1)


@dataclass(frozen=True)
class Attention:
    """One attention under its name in the figure: "dense", "sliding_window" or a key of PYRAMIDS."""

    name: str

    @property
    def budget(self) -> dict[str, Any]:
        """The parameters of a block method."""
        walk = {"start_width": START_WIDTH, **PYRAMIDS[self.name]} if self.name in PYRAMIDS else {}
        return {"top_k": TOP_K, "block_size": BLOCK_SIZE, "query_tile": 1, **walk}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q: [B, H, N, D]; k, v: [B, G, N, D]. Returns [B, H, N, D]."""
        if self.name == "dense":
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        if self.name in PYRAMIDS:
            return pb.pyramid_attention(q, k, v, **self.budget)
        return pb.sparse_attention(q, k, v, self.select(q, k))

    def select(self, q: Tensor, k: Tensor) -> pb.BlockSelection:
        """The blocks that a call attends to; dense attention has no such list."""
        return pb.select_blocks(q, k, method="pyramid" if self.name in PYRAMIDS else self.name, **self.budget)

    def kept(self, q: Tensor, k: Tensor, blocks: Tensor) -> float:
        """Share of the questions whose answer lies in a kept block (blocks: int64 [B, ASKED])."""
        if self.name == "dense":
            return 1.0
        mask = self.select(q, k).mask()[:, 0].repeat_interleave(self.budget["query_tile"], dim=1)
        return float(mask[:, -ASKED:].gather(2, blocks[..., None]).double().mean())

    def choice(self) -> float:
        """Share of the questions that have more eligible blocks than the budget keeps."""
        tiling = Tiling(TOKENS, TOKENS, BLOCK_SIZE, self.budget["query_tile"], causal=True)
        tile = torch.arange(TOKENS - ASKED, TOKENS) // tiling.query_tile
        return float((tiling.eligible(tile, tiling.forced(tile, 1, 2)) > TOP_K).double().mean())


class Layer(nn.Module):
    """Attention with token-shifted keys, then a two-layer perceptron, each after a norm and added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q = nn.Linear(WIDTH, HEADS * HEAD_DIM, bias=False)
        self.k = nn.Linear(2 * WIDTH, KV_HEADS * HEAD_DIM, bias=False)
        self.v = nn.Linear(WIDTH, KV_HEADS * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor, attention: Attention) -> Tensor:
        q, k, v = self.heads(x)
        x = x + self.out(attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.between(x))

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, HEADS, N, HEAD_DIM], keys and values [B, KV_HEADS, N, HEAD_DIM]."""
        x = self.before(x)
        parts = (self.q(x), self.k(torch.cat([x, F.pad(x, (0, 0, 1, -1))], -1)), self.v(x))
        q, k, v = (part.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2).contiguous() for part in parts)
        return q, k, v


class Model(nn.Module):
    """A two-layer transformer. The attention is an argument of the call: the weights do not depend on it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(KEYS + VALUES, WIDTH)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VALUES)

    def forward(self, tokens: Tensor, attention: Attention) -> Tensor:
        """Logits of the asked values, [B, ASKED, VALUES]."""
        return self.head(self.norm(self.states(tokens, attention)[-1][:, -ASKED:]))

    def states(self, tokens: Tensor, attention: Attention) -> list[Tensor]:
        """What enters each layer, and what leaves the last one."""
        states = [self.embedding(tokens)]
        for layer in self.layers:
            states.append(layer(states[-1], attention))
        return states


@dataclass(frozen=True)
class Point:
    """A row of curves.csv, measured on held-out sequences. answer_block_kept: share of the questions whose answer lies in
    a block that is attended to, in the layer where it is highest."""

    layout: str
    attention: str
    seed: int
    step: int
    loss: float
    accuracy: float
    answer_block_kept: float


def train(layout: str, attention: Attention, seed: int, steps: int, every: int) -> Iterator[Point]:
    """Train from the seed's weights on the seed's batches, the same for every attention; a point every `every` steps."""
    torch.manual_seed(seed)
    model = Model()
    optimiser = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    batches = torch.Generator().manual_seed(2 * seed + 1)
    held_out = draw_batch(HELD_OUT, layout, torch.Generator().manual_seed(2 * seed + 2))
    for step in range(steps + 1):
        if step % every == 0:
            yield Point(layout, attention.name, seed, step, *evaluate(model, attention, held_out))
        # Warm-up, then constant for half the steps, then down to zero.
        rate = LEARNING_RATE * min(1, (step + 1) / WARM_UP, 2 * (1 - step / steps))
        for group in optimiser.param_groups:
            group["lr"] = rate
        optimiser.zero_grad()
        loss_of(model, attention, draw_batch(BATCH, layout, batches)).backward()
        optimiser.step()


def loss_of(model: Model, attention: Attention, batch: Batch) -> Tensor:
    """Mean cross-entropy over the questions, in nats."""
    return F.cross_entropy(model(batch.tokens, attention).flatten(0, 1), batch.answers.flatten())


@torch.no_grad()
def evaluate(model: Model, attention: Attention, batch: Batch) -> tuple[float, float, float]:
    """Loss, accuracy, and the answers' blocks that are kept, all but the loss as shares."""
    states = model.states(batch.tokens, attention)
    logits = model.head(model.norm(states[-1][:, -ASKED:]))
    loss = F.cross_entropy(logits.flatten(0, 1), batch.answers.flatten())
    accuracy = (logits.argmax(-1) == batch.answers).double().mean()
    heads = [layer.heads(state)[:2] for layer, state in zip(model.layers, states)]
    return float(loss), float(accuracy), max(attention.kept(q, k, batch.blocks) for q, k in heads)


def main() -> None:
    """Train the curves that are asked for, one after another, and write curves.csv after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layout", choices={layout for layout, _, _ in CURVES}, help="default: each")
    parser.add_argument("--attention", choices={name for _, name, _ in CURVES}, help="default: each")
    parser.add_argument("--seed", type=int, help="default: each; any seed may be given")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=25, help="steps between two evaluations")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder of curves.csv")
    asked = parser.parse_args()
    points: list[Point] = []
    for layout, name, seed in CURVES if asked.seed is None else [(*c[:2], asked.seed) for c in CURVES if c[2] == 0]:
        if asked.layout not in (None, layout) or asked.attention not in (None, name):
            continue
        attention, began = Attention(name), time.perf_counter()
        points += train(layout, attention, seed, asked.steps, asked.every)
        last, seconds = points[-1], time.perf_counter() - began
        shown = f"accuracy {last.accuracy:.1%}, answer's block kept {last.answer_block_kept:.1%}, {seconds:.0f} s"
        print(f"{layout}, {name}, seed {seed}: {shown}; questions with a choice {attention.choice():.0%}", flush=True)
        write(points, asked.out / "curves.csv")


def write(points: list[Point], path: Path) -> None:
    """One row per point, six digits behind the point."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(field.name for field in fields(Point))
        rows.writerows([f"{x:.6f}" if isinstance(x, float) else x for x in astuple(point)] for point in points)


if __name__ == "__main__":
    main()
