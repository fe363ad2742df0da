"""SparseLayer: one method as the attention of a model's layers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from pyramidbench.errors import UserError
from pyramidbench.method import Method
from pyramidbench.problem import Pass, Problem
from pyramidbench.registry import create
from pyramidbench.selection import frozen
from pyramidbench.spans import Spans
from pyramidbench.usage import Tally


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

    def sparse(self, q: Tensor, k: Tensor, v: Tensor, scale: float, tally: Tally) -> Tensor:
        """Causal attention by the method, [B, H, M, Dv]; the last query sees all keys.

        Raises:
            Unsupported: the method cannot do this call.
        """
        tracked = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        direction: Pass = "train" if tracked else "forward"
        problem = dataclasses.replace(Problem.of(q, k, v, causal=True, scale=scale), direction=direction)
        gap, backend = _checked(self.method, problem)
        if gap is not None:
            raise Unsupported(f"method '{self.method.name}' cannot do this model's attention: {gap}.")
        with frozen(q.device):
            selection = self.method.select(q, k, problem)
        if selection is None:
            tally.dense(backend)
        else:
            tally.sparse(selection, backend)
        return self.method.attend(q, k, v, selection, problem)

    @staticmethod
    def dense(q: Tensor, k: Tensor, v: Tensor, spans: Spans | None, scale: float, tally: Tally) -> Tensor:
        """Dense attention as the model has it, [B, H, M, Dv]."""
        if spans is None:
            problem = Problem.of(q, k, v, causal=True, scale=scale)
            tally.dense(_checked(create("dense"), problem)[1])
            return create("dense")(q, k, v, problem)
        tally.dense("sdpa")
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=spans.mask(k.shape[2]), scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )


@lru_cache(maxsize=4096)
def _checked(method: Method, problem: Problem) -> tuple[str | None, str]:
    """Why a method cannot do a problem, or None; and what runs it. All layers of a model ask the same."""
    gap = method.unavailable() or method.unsupported(problem)
    return gap, "" if gap is not None else method.backend(problem)


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
