"""The pass "decode": a method with its decoder in place of its select and attend, so that gate, clock and quality see one step.

A step appends the newest M tokens of k and v to a decoder that holds all others, and attends for them. A repeated step writes
the same tokens to the same place, so it can be timed without growing. `Cell.make_method` hands a method through here.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, fields
from functools import cached_property

from torch import Tensor

from pyramidbench.cost import Cost
from pyramidbench.decoder import CacheLayout, Decoder
from pyramidbench.method import Method
from pyramidbench.problem import Problem
from pyramidbench.selection import BlockSelection, frozen
from pyramidbench.stages import listening, stage

MOST_QUERIES = 16


def hold(method: Method, k: Tensor, v: Tensor, problem: Problem) -> None:
    """Have a method that decodes fill its decoder with all tokens, so that what follows is steps; leave any other as it is."""
    if isinstance(method, _Decoding):
        with frozen(k.device):
            method.holding(k, v, problem)


def append_newest(method: Method, k: Tensor, v: Tensor, problem: Problem) -> None:
    """A step's append alone: the stage before its attention, which chooses by itself."""
    assert isinstance(method, _Decoding)
    with frozen(k.device):
        _append(method.holding(k, v, problem))


def release(method: Method) -> None:
    """Give up the decoder of a method that decodes: the next call fills another. A group has one for each method, and each
    may take gigabytes, so only those that are timed in turns are held beside one another."""
    method.__dict__.pop("_held", None)


def held_bytes(method: Method, problem: Problem) -> float:
    """Bytes that a method holds between its calls: those of its decoder, or nothing."""
    return method.plain.cache_bytes(problem) if isinstance(method, _Decoding) else 0.0


def decoding(method: Method) -> Method:
    """The method as it decodes: the same parameters, name and kind."""
    cls = type(method)
    if cls not in _classes:
        _classes[cls] = type(cls.__name__, (_Decoding, cls), {"plain_class": cls, "__doc__": cls.__doc__})
    return _classes[cls](**_values(method))


_classes: dict[type[Method], type[Method]] = {}


def _values(method: Method) -> dict[str, object]:
    return {field.name: getattr(method, field.name) for field in fields(method)}


@dataclass(frozen=True)
class _Held:
    """A decoder that holds k and v (None: zeros, where only the choice of blocks was wanted), in the versions that it read.

    It holds on to the tensors, so that no others can come to lie in their place unseen.
    """

    decoder: Decoder
    k: Tensor
    v: Tensor | None
    versions: tuple[int, int]
    problem: Problem

    def is_of(self, k: Tensor, v: Tensor | None, problem: Problem) -> bool:
        """Whether it holds these; without v, whatever its values are."""
        same = self.k is k and (v is None or self.v is v) and self.problem == problem
        return same and self.versions == _versions(k, self.v)


class _Decoding(Method):
    """Replaces what a method does to tensors by steps of its decoder, and leaves what it says of itself."""

    plain_class: type[Method]

    @cached_property
    def plain(self) -> Method:
        """The method that does not decode."""
        return self.plain_class(**_values(self))

    def unsupported(self, problem: Problem) -> str | None:
        if not problem.causal:
            return "decoding is causal: the newest tokens come last"
        if problem.seq_len_q > min(MOST_QUERIES, problem.seq_len_kv):
            return f"a step takes 1 to {MOST_QUERIES} new tokens, not {problem.seq_len_q}; use --pass forward for more"
        return self.plain.unsupported(problem)

    def backend(self, problem: Problem) -> str:
        return self.plain.step_backend(problem)

    def cost(self, problem: Problem) -> Cost:
        return self.plain.step_cost(problem)

    def select(self, q: Tensor, k: Tensor, problem: Problem) -> BlockSelection | None:
        with frozen(q.device):
            held = self.holding(k, None, problem)
            _append(held)
            return held.decoder.select(q)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, selection: BlockSelection | None, problem: Problem) -> Tensor:  # noqa: ARG002 - a step chooses for itself
        # A decoder that selects anew at every step does so here: it is part of this stage.
        with frozen(q.device), listening(lambda _: nullcontext()):
            return self.holding(k, v, problem).decoder.attend(q)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Tensor:
        with frozen(q.device):
            held = self.holding(k, v, problem)
            _append(held)
            return held.decoder.attend(q)

    def holding(self, k: Tensor, v: Tensor | None, problem: Problem) -> _Held:
        """A decoder that holds these tensors: that of the call before, where they are the same."""
        held: _Held | None = self.__dict__.get("_held")
        if held is None or not held.is_of(k, v, problem):
            # The old one goes first: two long caches may not fit. (A frozen method keeps this beside its fields.)
            release(self)
            held = None
            held = _Held(self.plain.decoder(problem, CacheLayout(k.device)), k, v, _versions(k, v), problem)
            old = problem.seq_len_kv - problem.seq_len_q
            if old:
                held.decoder.append(k[:, :, :old], _values_of(held)[:, :, :old])
            _append(held)
            self.__dict__["_held"] = held
        return held


def _append(held: _Held) -> None:
    """Write the newest tokens to their place, as the stage "append"."""
    old = held.problem.seq_len_kv - held.problem.seq_len_q
    k, v = held.k[:, :, old:], _values_of(held)[:, :, old:]
    with stage("append"):
        held.decoder.append(k, v, at=old)


def _values_of(held: _Held) -> Tensor:
    return held.k.new_zeros(1).expand(*held.k.shape[:3], held.problem.head_dim_v) if held.v is None else held.v


def _versions(k: Tensor, v: Tensor | None) -> tuple[int, int]:
    return k._version, -1 if v is None else v._version
