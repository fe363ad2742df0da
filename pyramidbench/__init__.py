"""pyramidbench: does sparse attention pay? Pyramid Top-K block selection, measured against real baselines."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyramidbench.api import pyramid_attention, select_blocks, sparse_attention, sweep
    from pyramidbench.cache import PyramidCache
    from pyramidbench.errors import UserError
    from pyramidbench.method import BlockMethod, Method
    from pyramidbench.oracle import block_mass
    from pyramidbench.problem import Problem
    from pyramidbench.selection import BlockSelection
    from pyramidbench.store import Run, load_run

__version__ = "0.1.0"

__all__ = [
    "BlockMethod",
    "BlockSelection",
    "Method",
    "Problem",
    "PyramidCache",
    "Run",
    "UserError",
    "block_mass",
    "load_run",
    "pyramid_attention",
    "select_blocks",
    "sparse_attention",
    "sweep",
]

_HOME = {
    "BlockMethod": "method",
    "BlockSelection": "selection",
    "Method": "method",
    "Problem": "problem",
    "PyramidCache": "cache",
    "Run": "store",
    "UserError": "errors",
    "block_mass": "oracle",
    "load_run": "store",
    "pyramid_attention": "api",
    "select_blocks": "api",
    "sparse_attention": "api",
    "sweep": "api",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used, so that `pyramidbench --help` does not wait for torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'pyramidbench' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"pyramidbench.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
