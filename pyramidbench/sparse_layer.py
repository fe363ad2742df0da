"""SparseLayer: one method as the attention of a model's layers, and the count of what it did."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pyramidbench.errors import UserError
from pyramidbench.method import Method
from pyramidbench.problem import Pass, Problem
from pyramidbench.registry import create
from pyramidbench.selection import BlockSelection, frozen
from pyramidbench.spans import Spans


@dataclass(frozen=True)
class Usage:
    """What a model's attention did. Numbers add up over layers, sequences and calls; batch entries count apart.

    sparse_calls, dense_calls: calls that chose blocks, and calls that attended to everything (`dense`, dense_layers).
    queries, queries_with_choice: queries of sparse calls, and those with more eligible blocks than the method keeps by
    rank: for all others sparse attention is dense attention in disguise. tiles, tiles_with_choice: likewise, by tile.
    pairs, visible_pairs: attended (query, key) pairs of sparse calls per set of blocks, and those of dense attention.
    """

    sparse_calls: int = 0
    dense_calls: int = 0
    tiles: int = 0
    tiles_with_choice: int = 0
    queries: int = 0
    queries_with_choice: int = 0
    pairs: float = 0.0
    visible_pairs: float = 0.0

    @property
    def choice_share(self) -> float | None:
        """Share of the queries with a real choice; None where no sparse call was made."""
        return self.queries_with_choice / self.queries if self.queries else None

    @property
    def density(self) -> float | None:
        """Attended ÷ visible pairs of the sparse calls; None where none was made."""
        return self.pairs / self.visible_pairs if self.visible_pairs else None

    def __add__(self, other: Usage) -> Usage:
        return Usage(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other))))

    def __sub__(self, other: Usage) -> Usage:
        return Usage(*(a - b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other))))


class Unsupported(UserError):
    """A method cannot do a model's attention on this machine; another one may."""


@dataclass(frozen=True)
class SparseLayer:
    """A method with its parameters, and the layers that keep dense attention: how many first ones, or which."""

    method: Method
    dense_layers: int | frozenset[int]

    def is_dense(self, index: int | None) -> bool:
        """Whether a layer keeps dense attention by request.

        Raises:
            UserError: layers are told apart, and this one does not say which it is.
        """
        if not self.dense_layers:
            return False
        if index is None:
            raise UserError("dense_layers was given, and the model's attention does not say which layer it is.")
        return index < self.dense_layers if isinstance(self.dense_layers, int) else index in self.dense_layers

    def sparse(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Usage]:
        """Causal attention by the method, [B, H, M, Dv]; the last query sees all keys.

        Raises:
            Unsupported: the method cannot do this call.
        """
        tracked = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        direction: Pass = "train" if tracked else "forward"
        problem = dataclasses.replace(Problem.of(q, k, v, causal=True, scale=scale), direction=direction)
        gap = self.method.unavailable() or self.method.unsupported(problem)
        if gap is not None:
            raise Unsupported(f"method '{self.method.name}' cannot do this model's attention: {gap}.")
        with frozen(q.device):
            selection = self.method.select(q, k, problem)
        return self.method.attend(q, k, v, selection, problem), self._count(selection, problem)

    def dense(self, q: Tensor, k: Tensor, v: Tensor, spans: Spans | None, scale: float) -> tuple[Tensor, Usage]:
        """Dense attention as the model has it, [B, H, M, Dv]."""
        if spans is None:
            output = create("dense")(q, k, v, Problem.of(q, k, v, causal=True, scale=scale))
        else:
            output = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=spans.mask(k.shape[2]), scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )
        return output, Usage(dense_calls=1)

    @staticmethod
    def _count(selection: BlockSelection | None, problem: Problem) -> Usage:
        if selection is None:
            return Usage(dense_calls=1)
        tiling, batch = selection.tiling, problem.batch
        tile = torch.arange(tiling.tiles, device=selection.counts.device)
        first, last = tiling.first_position(tile), tiling.last_position(tile)
        # What is listed is short of what is visible exactly where there was more to choose from than could be kept.
        visible = torch.div(last, tiling.block_size, rounding_mode="floor") + 1
        chosen = selection.counts.amin(1) < visible
        return Usage(
            sparse_calls=1,
            tiles=batch * tiling.tiles,
            tiles_with_choice=int(chosen.sum()),
            queries=batch * problem.seq_len_q,
            queries_with_choice=int((chosen * (last - first + 1)).sum()),
            pairs=batch * float(selection.pairs().double().mean()),
            visible_pairs=batch * tiling.visible_pairs(),
        )


def sparse_layer(method: str, settings: Mapping[str, Any]) -> SparseLayer:
    """The layer of a method's spec and its settings: the method's parameters and `dense_layers`.

    Raises:
        UserError: an unknown method, parameter or layer; the message says what is accepted.
    """
    try:
        return _made(method, json.dumps(dict(settings), sort_keys=True))
    except TypeError as error:
        raise UserError(f"parameters of '{method}' must be numbers, text or lists: {error}.") from None


@cache
def _made(method: str, settings: str) -> SparseLayer:
    parameters = json.loads(settings)
    dense = parameters.pop("dense_layers", 0)
    return SparseLayer(create(method, parameters), _layers(dense))


def _layers(dense: object) -> int | frozenset[int]:
    if isinstance(dense, int) and not isinstance(dense, bool) and dense >= 0:
        return dense
    if isinstance(dense, list) and all(isinstance(layer, int) and layer >= 0 for layer in dense):
        return frozenset(dense)
    raise UserError(f"dense_layers {dense!r} is not accepted; give how many first layers, or a list such as [0, 5].")
