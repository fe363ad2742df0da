"""The training loop: one arm's steps, resumed from its checkpoint, logged line by line."""

from __future__ import annotations

import csv
import math
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyramidbench.training.arms import Arm, Attention
from pyramidbench.training.batches import Batch, training_batch
from pyramidbench.training.corpus import Corpus
from pyramidbench.training.decoder import Attend, Decoder, Size

LOG_EVERY = 10
CHECKPOINT_EVERY_S = 30.0
WARM_UP_STEPS = 100
LEARNING_RATE = 2e-3
WEIGHT_DECAY = 0.1
PAIR_WEIGHT = 0.2
"""Weight of the mean loss of the asked values: they are 1 token in 256, too few to be learned in minutes by themselves."""
COLUMNS = (
    "method",
    "seed",
    "step",
    "tokens",
    "loss",
    "pair_loss",
    "learning_rate",
    "seconds",
    "tokens_per_s",
    "backend",
)


@dataclass(frozen=True)
class Recipe:
    """What all arms share. `tiny` divides the block size, for tests on a CPU; `dense` is the method of the dense arm."""

    steps: int
    batch: int = 8
    length: int = 4096
    size: Size = field(default_factory=Size)
    tiny: int = 1
    dense: str = "dense"


def autocast(device: torch.device) -> torch.autocast:
    """bfloat16 on a GPU, nothing elsewhere."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def losses_of(model: Decoder, batch: Batch, attend: Attend, device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean loss over all next tokens, and over the asked values alone, in nats."""
    tokens, asked = batch.tokens.to(device), batch.asked.to(device)
    with autocast(device):
        logits = model.logits(model(tokens[:, :-1], attend))
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none")
    losses = losses.view(len(tokens), -1)
    return losses.mean(), losses[: len(asked)].gather(1, asked - 1).mean()


class Training:
    """One arm on the way: model, optimiser, and the steps that are done."""

    def __init__(
        self, arm: Arm, recipe: Recipe, folder: Path, device: torch.device, checkpoints: Path | None = None
    ) -> None:
        """folder: of the log; checkpoints: of the checkpoints, the same without it."""
        self.arm, self.recipe, self.folder, self.device = arm, recipe, folder, device
        self.checkpoint = (checkpoints or folder) / f"{arm.name}.pt"
        torch.manual_seed(arm.seed)
        self.model = Decoder(recipe.size).to(device)
        self.attention = Attention(arm.method, device, recipe.tiny, recipe.dense)
        self.optimiser = torch.optim.AdamW(
            self.model.parameters(), LEARNING_RATE, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY
        )
        self.step, self.seconds = 0, 0.0
        if self.checkpoint.is_file():
            self._resume(torch.load(self.checkpoint, map_location=device, weights_only=True))

    def run(self, corpus: Corpus, limit_s: float) -> bool:
        """Train until the last step, or for `limit_s` seconds; whether all steps are done. Saves at the end."""
        started, saved = time.perf_counter(), time.perf_counter()
        before = self.seconds
        with _Log(self.folder / f"{self.arm.name}.csv", self.step) as log:
            while self.step < self.recipe.steps and time.perf_counter() - started < limit_s:
                loss, pair_loss = self.one_step(corpus)
                self.step += 1
                if self.step % LOG_EVERY == 0 or self.step == self.recipe.steps:
                    values = float(loss), float(pair_loss)
                    self.seconds = before + time.perf_counter() - started
                    log.row(self._row(*values))
                if time.perf_counter() - saved > CHECKPOINT_EVERY_S:
                    self.save()
                    saved = time.perf_counter()
        self.seconds = before + time.perf_counter() - started
        self.save()
        return self.step >= self.recipe.steps

    def one_step(self, corpus: Corpus) -> tuple[Tensor, Tensor]:
        """One optimiser step; the two losses before it, on the device."""
        recipe = self.recipe
        batch = training_batch(corpus.train, recipe.batch, recipe.length, self.arm.seed, self.step)
        for group in self.optimiser.param_groups:
            group["lr"] = learning_rate(self.step, recipe.steps)
        self.optimiser.zero_grad(set_to_none=True)
        loss, pair_loss = losses_of(self.model, batch, self.attention, self.device)
        (loss + PAIR_WEIGHT * pair_loss).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimiser.step()
        return loss.detach(), pair_loss.detach()

    def save(self) -> None:
        """Write the checkpoint, whole or not at all."""
        state = {
            "model": self.model.state_dict(), "optimiser": self.optimiser.state_dict(), "step": self.step,
            "seconds": self.seconds,
        }  # fmt: skip
        part = self.checkpoint.with_suffix(".part")
        torch.save(state, part)
        part.replace(self.checkpoint)

    def _resume(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.step, self.seconds = state["step"], state["seconds"]

    def _row(self, loss: float, pair_loss: float) -> tuple[object, ...]:
        size = self.recipe.size
        probe = torch.zeros(1, size.heads, 64, size.head_dim, device=self.device)
        probe = probe.to(torch.bfloat16) if self.device.type == "cuda" else probe
        key = probe[:, : size.kv_heads]
        tokens = self.step * self.recipe.batch * self.recipe.length
        return (
            self.arm.method, self.arm.seed, self.step, tokens, f"{loss:.5f}", f"{pair_loss:.5f}",
            f"{learning_rate(self.step - 1, self.recipe.steps):.3e}", f"{self.seconds:.2f}",
            f"{tokens / self.seconds:.0f}", self.attention.backend(probe, key, key),
        )  # fmt: skip


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    warm_up = min(WARM_UP_STEPS, max(1, steps // 10))
    if step < warm_up:
        return LEARNING_RATE * (step + 1) / warm_up
    done = (step - warm_up) / max(1, steps - warm_up)
    return LEARNING_RATE * (0.55 + 0.45 * math.cos(math.pi * done))


class _Log:
    """The CSV of an arm: rows behind the checkpoint are dropped when it resumes."""

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        kept = [row for row in _rows(path) if int(row[COLUMNS.index("step")]) <= step]
        with path.open("w", newline="", encoding="utf-8") as stream:
            csv.writer(stream).writerows([COLUMNS, *kept])

    def __enter__(self) -> _Log:
        self.stream = self.path.open("a", newline="", encoding="utf-8")
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.close()

    def row(self, values: tuple[object, ...]) -> None:
        csv.writer(self.stream).writerow(values)
        self.stream.flush()
        os.fsync(self.stream.fileno())


def _rows(path: Path) -> list[list[str]]:
    """The whole rows of a log without its head; a torn last one is left out."""
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as stream:
        return [row for row in csv.reader(stream) if len(row) == len(COLUMNS)][1:]
