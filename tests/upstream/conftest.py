"""Packages that cannot be installed here: what is there is hidden, and stand-ins take its place, with the real signatures."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

OPTIONAL = (
    "flash_attn", "flash_attn.cute", "flash_attn.cute.block_sparsity", "fa3_fwd_interface", "fa3_fwd_config",
    "flash_attn_interface", "flash_attn_config", "fla", "fla.ops", "fla.ops.nsa", "fla.ops.moba", "fastvideo_kernel",
    "flash_moba", "block_sparse_attn", "llsa",
)  # fmt: skip
StandIn = Callable[..., ModuleType]
Signed = Callable[..., Callable[..., Any]]


@pytest.fixture(autouse=True)
def nothing_installed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """None in sys.modules makes an import fail, whatever is installed; tests marked gpu want the real thing."""
    if request.node.get_closest_marker("gpu") is None:
        for name in OPTIONAL:
            monkeypatch.setitem(sys.modules, name, None)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Makes a module of that name, with those things in it, importable; its parents too."""

    def make(name: str, **contents: object) -> ModuleType:
        parts = name.split(".")
        for end in range(1, len(parts)):
            parent = ".".join(parts[:end])
            if sys.modules.get(parent) is None:
                monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        module = ModuleType(name)
        vars(module).update(contents, __spec__=sys.__spec__)
        monkeypatch.setitem(sys.modules, name, module)
        if len(parts) > 1:
            monkeypatch.setattr(sys.modules[".".join(parts[:-1])], parts[-1], module, raising=False)
        return module

    return make


@pytest.fixture
def signed() -> Signed:
    """Makes a function with a signature, given as text, out of one that is called with every argument by name.

    What is passed in a wrong place or under a wrong name fails as it would with the package; arguments that are not in
    `used` must keep their defaults.
    """

    def make(text: str, compute: Callable[..., Any], used: str) -> Callable[..., Any]:
        signature = inspect.signature(eval(f"lambda {text}: None"))

        def function(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            for name, value in bound.arguments.items():
                if name not in used.split():
                    assert value == signature.parameters[name].default, f"{name} = {value!r}"
            return compute(**{name: bound.arguments[name] for name in used.split()})

        function.__signature__ = signature  # type: ignore[attr-defined]
        return function

    return make
