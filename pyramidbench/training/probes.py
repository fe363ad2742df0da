"""Probes: what a trained decoder can do. Loss by length and position, and the pairs that it finds again by depth."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import torch

from pyramidbench.training.arms import PARAMETERS, Arm, Attention
from pyramidbench.training.batches import Batch, pair_batch, text_batch
from pyramidbench.training.corpus import Corpus
from pyramidbench.training.decoder import Decoder
from pyramidbench.training.loop import Recipe, autocast

WINDOWS, AT_ONCE = 16, 4
DEPTHS = 4
SEED = 77


@dataclass(frozen=True)
class Probe:
    """A row of evaluations.csv. Trained with `method`, and probed with the attention `used`, at `length` tokens.

    what: "loss" (nats per token of held-out text in positions `part` of the window, by quarters), or "pairs" (share of
    hidden values that come out likeliest, of those hidden in quarter `part`). part 0 is all of it. samples: how many
    tokens or values. choice_share: share of the window's queries for which the attention had a choice.
    """

    method: str
    seed: int
    step: int
    used: str
    length: int
    what: str
    part: int
    value: float
    samples: int
    choice_share: float


def probe_all(
    model: Decoder, arm: Arm, step: int, corpus: Corpus, recipe: Recipe, device: torch.device, folder: Path
) -> None:
    """Probe a decoder with its own attention and with the others, at a quarter to twice its length, into a CSV."""
    rows: list[Probe] = []
    for used in dict.fromkeys((arm.method, *PARAMETERS)):
        attention = Attention(used, device, recipe.tiny, recipe.dense)
        for length in (recipe.length // 4, recipe.length // 2, recipe.length, 2 * recipe.length):
            for probe in _probes(model, attention, corpus, length, device):
                share = attention.choice_share(length)
                rows.append(Probe(arm.method, arm.seed, step, used, length, *probe, share))
    with (folder / f"{arm.name}-evaluations.csv").open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows([[field.name for field in fields(Probe)], *map(astuple, rows)])


@torch.no_grad()
def _probes(
    model: Decoder, attention: Attention, corpus: Corpus, length: int, device: torch.device
) -> Iterator[tuple[str, int, float, int]]:
    """What, part, value and samples of each probe at one length; the windows are the same for every model."""
    generator = torch.Generator().manual_seed(SEED + length)
    losses, right, depth = [], [], []
    for _ in range(WINDOWS // AT_ONCE):
        plain = text_batch(corpus.held_out, AT_ONCE, length, generator)
        losses.append(_losses(model, attention, plain, device))
        pairs = pair_batch(corpus.held_out, AT_ONCE, length, generator)
        right.append(_right(model, attention, pairs, device))
        depth.append(pairs.hidden * DEPTHS // length)
    loss = torch.cat(losses)
    yield "loss", 0, float(loss.mean()), loss.numel()
    for part, quarter in enumerate(loss.chunk(DEPTHS, dim=1), 1):
        yield "loss", part, float(quarter.mean()), quarter.numel()
    found, where = torch.cat(right).double(), torch.cat(depth)
    yield "pairs", 0, float(found.mean()), found.numel()
    for part in range(DEPTHS):
        here = found[where == part]
        if len(here):
            yield "pairs", part + 1, float(here.mean()), len(here)


def _losses(model: Decoder, attention: Attention, batch: Batch, device: torch.device) -> torch.Tensor:
    """Loss of each token, fp32 [B, N]."""
    tokens = batch.tokens.to(device)
    with autocast(device):
        logits = model.logits(model(tokens[:, :-1], attention))
    return torch.nn.functional.cross_entropy(logits.mT.float(), tokens[:, 1:], reduction="none").cpu()


def _right(model: Decoder, attention: Attention, batch: Batch, device: torch.device) -> torch.Tensor:
    """Whether each asked value is the likeliest token, bool [B, PAIRS]."""
    tokens, asked = batch.tokens.to(device), batch.asked.to(device)
    row = torch.arange(len(tokens), device=device)[:, None]
    with autocast(device):
        states = model(tokens[:, :-1], attention)[row, asked - 1]
        return (model.logits(states).argmax(-1) == tokens.gather(1, asked)).cpu()
