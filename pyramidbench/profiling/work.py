"""Work of single kernels: the bytes that they must move, and the operations of matrix products, from the tensors they get.

One call is watched: every torch operator, and every launch of a Triton kernel. Bytes count each element of an argument or
result once, so they are what a kernel has to move at least; caches and repeated reads are seen by hardware counters only.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from pyramidbench.profiling.spans import Spanned, run_with

Source = Literal["shapes", "arguments", "formula", "ncu"]
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
"""Operators whose operations follow from their shapes. Others, attention above all, do less than shapes say: of causal
attention half the pairs."""


@dataclass(frozen=True)
class Work:
    """Floating-point operations and bytes of a kernel, per call, and where they come from. None: not known."""

    flops: float | None
    bytes: float | None
    source: Source


class _Watch(TorchDispatchMode):
    """Adds up the work of every torch operator under the path that is open."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.path = ""
        self.found: dict[tuple[str, str], list[Work]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        packet, name = func._overloadpacket, func._schema.name
        flops = None
        if name in PRODUCTS:
            flops = float(flop_registry[packet](*args, **(kwargs or {}), out_val=result))
        moved = 0.0 if _is_view(func) else _bytes((args, kwargs)) + _bytes(result)
        self.found[name, self.path].append(Work(flops, moved, "shapes"))
        return result


def kernel_work(call: Spanned) -> dict[tuple[str, str], Work]:
    """Work by kernel name and path, of one call: torch operators as "aten::name", Triton kernels by their function's name."""
    watch = _Watch()

    @contextmanager
    def around(path: str) -> Iterator[None]:
        before, watch.path = watch.path, path
        yield
        watch.path = before

    with _triton_launches(watch), watch:
        run_with(call, around)
    return {key: _added(works) for key, works in watch.found.items()}


@contextmanager
def _triton_launches(watch: _Watch) -> Iterator[None]:
    """Inside, every launch of a Triton kernel is noted with the bytes of its tensor arguments."""
    try:
        from triton.runtime.jit import JITFunction
    except ImportError:
        yield
        return
    run: Callable[..., Any] = JITFunction.run

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        # A descriptor for the copy engine stands for the tensor that it is made of.
        tensors = [getattr(value, "base", value) for value in (*args, *kwargs.values())]
        watch.found[self.__name__, watch.path].append(Work(None, _bytes(tensors), "arguments"))
        return run(self, *args, **kwargs)

    JITFunction.run = noted
    try:
        yield
    finally:
        JITFunction.run = run


def _added(works: list[Work]) -> Work:
    flops = [work.flops for work in works if work.flops is not None]
    return Work(sum(flops) if flops else None, sum(work.bytes or 0.0 for work in works), works[0].source)


def _bytes(values: object) -> float:
    """Bytes of all tensors in some values; an expanded dimension is one element in memory."""
    tensors = [value for value in tree_leaves(values) if isinstance(value, Tensor)]
    return float(sum(_stored(tensor) for tensor in tensors))


def _stored(tensor: Tensor) -> int:
    if tensor.layout is not torch.strided:
        return 0
    sizes = [size for size, stride in zip(tensor.shape, tensor.stride()) if stride != 0 or size == 0]
    return math.prod(sizes) * tensor.element_size()


def _is_view(func: Any) -> bool:
    """Whether an operator only looks at its argument in another shape."""
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
