"""Choosing blocks, as a constant to gradients, and under torch.compile as one operator.

A walk decides its sizes from data, which no compiler traces; the operator hides it. Its lists are as wide as the budget
allows, so that their shape is known before it runs and does not change with the length.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from pyramidbench.errors import UserError
from pyramidbench.method import BlockMethod, Method
from pyramidbench.problem import Problem
from pyramidbench.registry import create
from pyramidbench.selection import BlockSelection, frozen

Implementation = Literal["auto", "triton", "reference"]


@dataclass(frozen=True)
class Chooser:
    """A method by the text that makes it, which an operator can be given, and what compiled code must know of it.

    block_size and query_tile are 0 for a method without blocks, and implementation is "auto".
    """

    text: str
    block_size: int
    query_tile: int
    implementation: Implementation

    @classmethod
    def of(cls, spec: str, parameters: Mapping[str, object]) -> Chooser:
        """The method of a spec ("name" or "name:preset") with `parameters` over those of its preset.

        Raises:
            UserError: unknown name, preset or parameter, or a value that the parameter does not accept.
        """
        return cls(*_described(spec, parameters))

    def select(self, q: Tensor, k: Tensor, problem: Problem) -> BlockSelection | None:
        """What the method keeps; None when it attends to everything. Gradients and autocast do not reach inside.

        Raises:
            UserError: the method cannot run here, or cannot do the problem; in compiled code, when that runs.
        """
        if torch.compiler.is_compiling():
            indices, counts = _choose(q.detach(), k.detach(), self.text, problem.causal, problem.scale)
            sizes = (self.block_size, self.query_tile, problem.seq_len_q, problem.seq_len_kv)
            return BlockSelection(indices, counts, *sizes, problem.causal)
        return _select(_method_of(self.text), q, k, problem)


def _describe(spec: str, parameters: Mapping[str, object]) -> tuple[str, int, int, Implementation]:
    method = create(spec, parameters)
    text = json.dumps([spec.partition(":")[0], asdict(method)])
    if not isinstance(method, BlockMethod):
        return text, 0, 0, "auto"
    return text, method.block_size, method.query_tile, method.implementation


# To compiled code the making of a method is a constant.
_described: Callable[[str, Mapping[str, object]], tuple[str, int, int, Implementation]]
_described = torch.compiler.assume_constant_result(_describe)


@lru_cache(maxsize=256)
def _method_of(text: str) -> Method:
    return create(*json.loads(text))


def _select(method: Method, q: Tensor, k: Tensor, problem: Problem) -> BlockSelection | None:
    reason = method.unavailable() or method.unsupported(problem)
    if reason is not None:
        raise UserError(f"method '{method.name}' with {asdict(method)} cannot do this: {reason}")
    with frozen(q.device):
        return method.select(q, k, problem)


def _budgeted(text: str) -> BlockMethod:
    """The method of a text, if the shape of its lists is known before it runs."""
    method = _method_of(text)
    if not isinstance(method, BlockMethod) or method.adaptive:
        raise UserError(f"method '{method.name}' has no budget of blocks; call it without torch.compile")
    return method


def _chosen_lists(q: Tensor, k: Tensor, method: str, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    chooses, problem = _budgeted(method), Problem.of(q, k, causal=causal, scale=scale)
    selection = _select(chooses, q, k, problem)
    missing = -1 if selection is None else _width(chooses, problem) - selection.indices.shape[-1]
    if selection is None or missing < 0 or selection.indices.shape[1] != _sets(chooses, q, k):
        raise UserError(f"method '{chooses.name}' keeps other lists than its budget; call it without torch.compile")
    return pad(selection.indices, (0, missing), value=-1).contiguous(), selection.counts.contiguous()


_choose = torch.library.custom_op(
    "pyramidbench::choose",
    _chosen_lists,
    mutates_args=(),
    schema="(Tensor q, Tensor k, str method, bool causal, float scale) -> (Tensor, Tensor)",
)


def _list_shapes(q: Tensor, k: Tensor, method: str, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    chooses, problem = _budgeted(method), Problem.of(q, k, causal=causal, scale=scale)
    shape = (problem.batch, _sets(chooses, q, k), chooses.tiling(problem).tiles)
    return q.new_empty((*shape, _width(chooses, problem)), dtype=torch.int32), q.new_empty(shape, dtype=torch.int32)


torch.library.register_fake(_choose, _list_shapes)


def _sets(method: BlockMethod, q: Tensor, k: Tensor) -> int:
    return (q if getattr(method, "head_reduce", None) == "none" else k).shape[1]


def _width(method: BlockMethod, problem: Problem) -> int:
    """The most blocks that a tile may list, whatever the lengths: K, and the forced ones with all that the tile overlaps."""
    overlapped = -(-(method.query_tile - 1) // method.block_size) if problem.causal else 0
    return method.top_k + method.sinks(problem) + method.locals(problem) + overlapped
