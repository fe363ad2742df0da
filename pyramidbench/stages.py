"""Names for the parts of a call: `with stage("route"): ...` in a method costs nothing unless somebody listens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

Listener = Callable[[str], AbstractContextManager[object]]
_listener: ContextVar[Listener | None] = ContextVar("stage_listener", default=None)
# Parts are heard by a profile only. A plain variable: the backward runs in threads of autograd's own, which inherit no context.
_part_listener: list[Listener] = []


def stage(name: str) -> AbstractContextManager[object]:
    """Mark the enclosed work as one of `pyramidbench.cost.STAGES`."""
    listener = _listener.get()
    return nullcontext() if listener is None else listener(name)


def part(name: str) -> AbstractContextManager[object]:
    """Mark the enclosed work as a part of its stage: a level of the walk, the transposition of lists. Only a profile listens to
    parts: the times of a sweep are taken without them."""
    return _part_listener[-1](name) if _part_listener else nullcontext()


@contextmanager
def listening(listener: Listener, *, parts: bool = False) -> Iterator[None]:
    """Wrap every stage inside this context with `listener(name)`, and with `parts` every part too."""
    token = _listener.set(listener)
    if parts:
        _part_listener.append(listener)
    try:
        yield
    finally:
        _listener.reset(token)
        if parts:
            _part_listener.pop()
