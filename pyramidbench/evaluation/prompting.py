"""Prompts as data: the TOML files beside the tasks, and the seeded draws that fill them."""

from __future__ import annotations

import random
import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

from pyramidbench.evaluation.task import Sample


@cache
def prompts(family: str) -> dict[str, Any]:
    """The prompts of one family of tasks, as its TOML file has them."""
    return tomllib.loads((files("pyramidbench.evaluation") / "prompts" / f"{family}.toml").read_text(encoding="utf-8"))


def draws(sample: Sample) -> random.Random:
    """A generator that the sample alone decides, the same on every machine and for every attention."""
    return random.Random(f"{sample.task} {sample.length} {sample.depth} {sample.index} {sample.seed}")


def numbers(rng: random.Random, count: int, digits: int = 7) -> list[str]:
    """Different numbers of so many digits."""
    return [str(number) for number in rng.sample(range(10 ** (digits - 1), 10**digits), count)]
