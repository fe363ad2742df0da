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

from pyramidbench.decoder import CacheLayout, Decoder
from pyramidbench.errors import UserError
from pyramidbench.method import Method
from pyramidbench.problem import Pass, Problem
from pyramidbench.registry import create
from pyramidbench.selection import frozen
from pyramidbench.spans import Spans
from pyramidbench.usage import Tally

HELD_BY = "pyramidbench_held_by"
"""Attribute of the keys that a decoding cache hands to a model, by which the attention finds the cache again."""


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
        backend = _require(self.method, problem)
        with frozen(q.device):
            selection = self.method.select(q, k, problem)
        if selection is None:
            tally.dense(backend)
        else:
            tally.sparse(selection, backend)
        return self.method.attend(q, k, v, selection, problem)

    def stepper(self, q: Tensor, k: Tensor, v: Tensor, scale: float, room: int) -> Stepper | None:
        """What holds `room` tokens of such sequences and attends for their newest ones; None where the method keeps nothing
        between tokens.

        Raises:
            Unsupported: the method cannot decode these.
        """
        if type(self.method).decoder is Method.decoder:
            return None
        sizes = Problem.of(q, k, v, causal=True, scale=scale)
        problem = dataclasses.replace(sizes, seq_len_q=1, seq_len_kv=room, direction="decode")
        _require(self.method, problem)
        decoder = self.method.decoder(problem, CacheLayout(k.device))
        return Stepper(self.method, scale, decoder, self.method.step_backend(problem))

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


@dataclass(frozen=True)
class Stepper:
    """A method's decoder with the sequences of one layer, the softmax scale that it was made for, and what runs it."""

    method: Method
    scale: float
    decoder: Decoder
    backend: str

    def step(self, q: Tensor, tally: Tally) -> Tensor:
        """Attention of the newest token of each sequence, [B, H, 1, Dv]; its key and value were appended."""
        output, selection = self.decoder.step(q)
        if selection is None:
            tally.dense(self.backend)
        else:
            tally.sparse(selection, self.backend, is_step=True)
        return output


def _require(method: Method, problem: Problem) -> str:
    """What runs the problem; Unsupported where the method cannot."""
    gap, backend = _checked(method, problem)
    if gap is not None:
        raise Unsupported(f"method '{method.name}' cannot do this model's attention: {gap}.")
    return backend


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
