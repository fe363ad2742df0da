"""Batches: windows of text with pairs hidden in them, which the last tokens of the window ask for again.

A pair is MARK, key, value: three tokens that stand anywhere in the text. At the end each pair stands once more in another
order, so that the value can be known there from the context alone, and nowhere else. Where no pair is hidden a window
is plain text.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyramidbench.training.corpus import MARK

PAIR = 3
PAIRS = 32


@dataclass(frozen=True)
class Batch:
    """tokens: int64 [B, N + 1], inputs and targets shifted by one. The first R windows have pairs: where their last value
    tokens stand, `asked` int64 [R, PAIRS], and where each pair stood before, `hidden` int64 [R, PAIRS]."""

    tokens: Tensor
    asked: Tensor
    hidden: Tensor


def text_batch(tokens: Tensor, size: int, length: int, generator: torch.Generator) -> Batch:
    """`size` windows of plain text of length + 1 tokens, from places that the generator draws."""
    starts = torch.randint(len(tokens) - length, (size, 1), generator=generator)
    none = torch.empty(0, PAIRS, dtype=torch.int64)
    return Batch(tokens[starts + torch.arange(length + 1)], none, none)


def pair_batch(tokens: Tensor, size: int, length: int, generator: torch.Generator) -> Batch:
    """The same with PAIRS pairs hidden in each window and asked for at its end.

    Keys differ within a window; keys and values are drawn from all text tokens, so that no pair says which it is.
    """
    batch = text_batch(tokens, size, length, generator).tokens
    tail = PAIR * PAIRS
    slots = (length + 1 - tail) // PAIR
    keys = torch.stack([torch.randperm(MARK, generator=generator)[:PAIRS] for _ in range(size)])
    values = torch.randint(MARK, (size, PAIRS), generator=generator)
    pairs = torch.stack([torch.full_like(keys, MARK), keys, values], dim=-1)
    hidden = torch.stack([torch.randperm(slots, generator=generator)[:PAIRS] for _ in range(size)]) * PAIR
    order = torch.stack([torch.randperm(PAIRS, generator=generator) for _ in range(size)])
    offset = torch.arange(PAIR)
    batch.scatter_(1, (hidden[..., None] + offset).flatten(1), pairs.flatten(1))
    start = length + 1 - tail
    batch[:, start:] = pairs.gather(1, order[..., None].expand(-1, -1, PAIR)).flatten(1)
    asked = start + PAIR * torch.arange(PAIRS).expand(size, -1) + PAIR - 1
    return Batch(batch, asked, hidden.gather(1, order))


def training_batch(tokens: Tensor, size: int, length: int, seed: int, step: int) -> Batch:
    """The batch of a step, the same for every attention: its first half has pairs. Any step can be drawn alone."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    pairs = pair_batch(tokens, size // 2, length, generator)
    plain = text_batch(tokens, size - size // 2, length, generator)
    return Batch(torch.cat([pairs.tokens, plain.tokens]), pairs.asked, pairs.hidden)
