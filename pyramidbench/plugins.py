"""Methods that are not part of pyramidbench: a Python file named by its path, or an entry point of an installed package.

One that is broken is a method too, `Broken`: it can do nothing and says why in one line, so that the others go on.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import ClassVar

from pydantic import TypeAdapter

from pyramidbench.cost import Cost
from pyramidbench.errors import UserError
from pyramidbench.method import Method
from pyramidbench.problem import Problem

GROUP = "pyramidbench.methods"
"""The entry point group: the name is the method's, the value a module with one method in it, or the class, "module:Class"."""

NEEDED = ("select", "attend", "backend", "cost")
"""What a method must bring, itself or by what it builds on: what is missing is found when it is loaded, not in a cell."""


@dataclass(frozen=True)
class Broken(Method):
    """A plug-in that cannot be used. Cost: none.

    `fault` names the file or the package and the reason, in one line.
    """

    source: ClassVar[str] = "unknown"
    granularity: ClassVar[str] = "unknown"
    selection_cost: ClassVar[str] = "unknown"
    fault: ClassVar[str] = ""

    def unavailable(self) -> str:
        return self.fault

    def unsupported(self, problem: Problem) -> str:  # noqa: ARG002 - part of the contract
        return self.fault

    def backend(self, problem: Problem) -> str:  # noqa: ARG002 - part of the contract
        return "none"

    def cost(self, problem: Problem) -> Cost:  # noqa: ARG002 - part of the contract
        return Cost(())


@cache
def entry_points() -> Mapping[str, importlib.metadata.EntryPoint]:
    """The methods that installed packages bring, by name."""
    return {point.name: point for point in importlib.metadata.entry_points(group=GROUP)}


def plugin_version(name: str) -> str | None:
    """The package and version behind the name of an entry point; None for any other name."""
    point = entry_points().get(name)
    return None if point is None or point.dist is None else f"{point.dist.name} {point.dist.version}"


def from_file(given: str) -> type[Method]:
    """The class in a Python file, or a Broken one that says what is wrong with the file.

    Raises:
        UserError: there is no such file.
    """
    path = Path(given)
    if not path.is_file():
        raise UserError(f"method file '{path}' does not exist; give the path of a Python file that defines a Method.")
    return _usable(f"method file '{path}'", path.stem, lambda: class_in(_load(path), path.stem))


def from_package(name: str) -> type[Method]:
    """The class behind an entry point, or a Broken one that says what is wrong with it."""
    point = entry_points()[name]
    package = plugin_version(name) or "an unknown package"

    def load() -> type[Method]:
        found = point.load()
        return class_in(found, name) if isinstance(found, ModuleType) else _checked(found)

    return _usable(f"method '{name}' of {package} ({point.value})", name, load)


def _usable(what: str, name: str, load: Callable[[], type[Method]]) -> type[Method]:
    """The class that `load` returns, if it can be made and asked whether it is available; a Broken one otherwise.

    What it prints meanwhile goes to stderr: stdout may be a table or JSON that another program reads.
    """
    try:
        with redirect_stdout(sys.stderr):
            found = load()
            found.name = name
            made = TypeAdapter(found).validate_python({})
            said = made.unavailable()
        if said is not None and not isinstance(said, str):
            raise TypeError(f"unavailable() returned {said!r}; accepted: text, or None")
    except (Exception, SystemExit) as error:  # what a plug-in does wrong must not stop the others
        reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        fault = f"{what} is broken: {' '.join(reason.split())}"
        return type("Broken", (Broken,), {"fault": fault, "name": name, "__doc__": fault})
    return found


def _load(path: Path) -> ModuleType:
    module_name = f"pyramidbench_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    return module


def class_in(module: ModuleType, name: str) -> type[Method]:
    """The one Method that a module defines itself, under a name.

    Raises:
        UserError: there is none, or several, or it is no dataclass.
    """
    own = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, Method) and value.__module__ == module.__name__
    ]
    if len(own) != 1:
        raise UserError(f"it defines {len(own)} methods; accepted: exactly one subclass of Method per file")
    found = _checked(own[0])
    found.name = name
    return found


def _checked(found: object) -> type[Method]:
    """The same, if it is a method's class."""
    if not inspect.isclass(found) or not issubclass(found, Method):
        raise UserError(f"{found!r} is no subclass of Method; accepted: a module with one in it, or the class")
    if not dataclasses.is_dataclass(found) or "__dataclass_fields__" not in vars(found):
        raise UserError(f"{found.__name__} is not a dataclass; put @dataclass(frozen=True) above it")
    missing = [name for name in NEEDED if getattr(found, name) is getattr(Method, name)]
    if missing:
        wanted = f"{', '.join(NEEDED[:-1])} and {NEEDED[-1]}"
        raise UserError(f"{found.__name__} has no {' and no '.join(missing)}; accepted: a Method with {wanted}")
    return found
