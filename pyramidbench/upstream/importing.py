"""Functions of packages that need not be installed: found when asked for, with the reason in one line where they are not."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

Function = Callable[..., Any]


def function(modules: Sequence[str], name: str) -> Function:
    """The function of that name from the first module that has it.

    Raises:
        ImportError: none can be imported; the message says why for each, in one line.
    """
    reasons = []
    for module in modules:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what a package has to say about itself is no matter of a measurement
                found = getattr(import_module(module), name, None)
        except Exception as error:  # a package that is broken on this machine may raise anything
            reasons.append(f"{module}: {' '.join(f'{type(error).__name__}: {error}'.split())}")
            continue
        if callable(found):
            function: Function = found
            return function
        reasons.append(f"{module} has no {name}")
    raise ImportError("; ".join(reasons))


def gap(what: str, modules: Sequence[str], name: str, install: str) -> str | None:
    """Why a function cannot be called on this machine and what to do about it, as one line; None where it can.

    `what` is what people call it, and `install` what brings it.
    """
    try:
        function(modules, name)
    except ImportError as error:
        return f"{what} cannot be imported ({error}); {install}"
    return None
