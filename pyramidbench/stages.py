"""Names for the parts of a call: `with stage("route"): ...` in a method costs nothing unless somebody listens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

Listener = Callable[[str], AbstractContextManager[object]]
_listener: ContextVar[Listener | None] = ContextVar("stage_listener", default=None)


def stage(name: str) -> AbstractContextManager[object]:
    """Mark the enclosed work as one of `pyramidbench.cost.STAGES`."""
    listener = _listener.get()
    return nullcontext() if listener is None else listener(name)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Wrap every stage inside this context with `listener(name)`."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
