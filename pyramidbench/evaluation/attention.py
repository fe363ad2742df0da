"""Attention: one method at one budget, as a run compares it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from pyramidbench.axes import Keep
from pyramidbench.errors import UserError
from pyramidbench.method import BlockMethod, Method
from pyramidbench.registry import create, parameter_names, split_spec


@dataclass(frozen=True)
class Attention:
    """A method's spec with the parameters that the run sets, and layers that keep dense attention.

    budget: as it was asked for, such as "keep=10%"; None for a method without one. parameters: JSON of what is set.
    """

    method: str
    budget: str | None
    parameters: str
    dense_layers: tuple[int, ...] = ()

    @property
    def given(self) -> dict[str, Any]:
        """The parameters that are set, by name."""
        return dict(json.loads(self.parameters))

    @property
    def made(self) -> Method:
        """The method itself."""
        return create(self.method, self.given)


@dataclass(frozen=True)
class Budgets:
    """The budgets of a run: K itself, or shares and tokens that are turned into K for `of` tokens, whatever a prompt has."""

    asked: tuple[int | Keep, ...]
    of: int

    def top_k(self, asked: int | Keep, block_size: int) -> int:
        """K of one budget.

        Raises:
            UserError: tokens that are no whole number of blocks.
        """
        return asked if isinstance(asked, int) else asked.blocks(block_size, -(-self.of // block_size))


def attentions(
    methods: list[str], budgets: Budgets, query_tile: int | None, dense_layers: tuple[int, ...]
) -> tuple[Attention, ...]:
    """Every method at every budget, in order: those without a budget first, then budget by budget.

    Raises:
        UserError: an unknown method or parameter, or none at all.
    """
    if not methods:
        raise UserError("no method was given; accepted: names such as dense,pyramid,flat.")
    plain = [spec for spec in methods if "top_k" not in parameter_names(split_spec(spec)[0])]
    found = [Attention(spec, None, "{}") for spec in plain]
    for asked in budgets.asked:
        for spec in methods:
            if spec not in plain:
                found.append(_one(spec, asked, budgets, query_tile, dense_layers))
    return tuple(dict.fromkeys(found))


def _one(
    spec: str, asked: int | Keep, budgets: Budgets, query_tile: int | None, dense_layers: tuple[int, ...]
) -> Attention:
    tile = {} if query_tile is None else {"query_tile": query_tile}
    usual = create(spec, tile)
    block_size = usual.block_size if isinstance(usual, BlockMethod) else 64
    parameters = {**tile, "top_k": budgets.top_k(asked, block_size)}
    create(spec, parameters)
    text = f"top_k={asked}" if isinstance(asked, int) else f"keep={asked}"
    return Attention(spec, text, json.dumps(parameters, sort_keys=True), dense_layers)
