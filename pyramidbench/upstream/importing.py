"""Functions of packages that need not be installed: found when asked for, with the reason in one line where they are not."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

Function = Callable[..., Any]


class NotHere(ImportError):
    """A function that cannot be had on this machine; the message is one line."""


def function(modules: Sequence[str], name: str) -> Function:
    """The function of that name from the first module that has it.

    Raises:
        NotHere: none has it; the message says why for each.
    """
    reasons = []
    for module in modules:
        found = _attribute(module, name)
        if callable(found):
            function: Function = found
            return function
        reasons.append(found)
    raise NotHere("; ".join(str(reason) for reason in reasons))


def gap(what: str, modules: Sequence[str], name: str, install: str) -> str | None:
    """Why a function cannot be called on this machine and what to do about it, as one line; None where it can.

    `what` is what people call it, and `install` what brings it.
    """
    try:
        function(modules, name)
    except NotHere as reason:
        return f"{what} is not here ({reason}); {install}"
    return None


def _attribute(module: str, name: str) -> object:
    """What a module calls so, or why there is no such thing, as text."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what a package has to say about itself is no matter of a measurement
            return getattr(import_module(module), name, f"{module} has no {name}")
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            return f"no module {module}"
        return f"{module} does not import: it needs {error.name}"
    except Exception as error:  # a package that is broken on this machine may raise anything
        return f"{module} does not import: {' '.join(f'{type(error).__name__}: {error}'.split())}"
