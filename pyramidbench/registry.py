"""The registry: finds methods by name (one file each in methods/), or in a user's own file, and makes them from text."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from pyramidbench.errors import UserError, unknown
from pyramidbench.method import Method
from pyramidbench.oracle import MassSource
from pyramidbench.tiling import Tiling

PACKAGE = "pyramidbench.methods"
ORACLE = "exact_topk"
"""The method that ranks by exact block mass, and so the one that may know a fast way to it."""


@cache
def method_names() -> tuple[str, ...]:
    """Names of the methods that come with pyramidbench, sorted."""
    package = importlib.import_module(PACKAGE)
    return tuple(sorted(module.name for module in pkgutil.iter_modules(package.__path__)))


@cache
def method_class(name: str) -> type[Method]:
    """The class behind a method's name, or behind the path of a Python file that defines one.

    Raises:
        UserError: no such method, or a file that cannot be used; the message says why.
    """
    if name.endswith(".py"):
        return _class_in(_load_file(Path(name)), name, Path(name).stem)
    if name not in method_names():
        raise unknown("method", name, method_names())
    return _class_in(importlib.import_module(f"{PACKAGE}.{name}"), name, name)


def split_spec(spec: str) -> tuple[str, str]:
    """Name and preset of "name" or "name:preset" (a missing preset is "default").

    Raises:
        UserError: the method or the preset does not exist.
    """
    name, _, preset = spec.partition(":")
    presets = preset_names(name)
    if preset and preset not in presets:
        raise unknown(f"preset of method '{name}':", preset, presets)
    return name, preset or "default"


def preset_names(name: str) -> tuple[str, ...]:
    """Presets of a method; "default" is always among them."""
    return tuple(dict.fromkeys(("default", *method_class(name).presets)))


def parameter_names(name: str) -> tuple[str, ...]:
    """Parameters of a method, in the order of its fields."""
    return tuple(field.name for field in dataclasses.fields(method_class(name)))


def create(spec: str, parameters: Mapping[str, object] | None = None) -> Method:
    """The method of a spec ("name" or "name:preset") with `parameters` over those of its preset.

    Raises:
        UserError: unknown name, preset or parameter, or a value that the parameter does not accept.
    """
    name, preset = split_spec(spec)
    cls = method_class(name)
    given = {**cls.presets.get(preset, {}), **(parameters or {})}
    for key in given:
        if key not in parameter_names(name):
            raise unknown(f"parameter of method '{name}':", key, parameter_names(name))
    try:
        return _adapter(cls).validate_python(given)  # type: ignore[arg-type]  # mypy: type[Method] is hashable
    except ValidationError as error:
        raise UserError(f"method '{spec}': {describe(error)}") from None


@lru_cache(maxsize=64)
def _adapter(cls: type[Method]) -> TypeAdapter[Method]:
    """The check of a class's parameters; making one takes milliseconds, and a sweep makes a method several times a cell."""
    return TypeAdapter(cls)


def mass_source(tiling: Tiling) -> MassSource:
    """What may compute block mass fast for these tiles and blocks: kernels reach the engine through methods only."""
    made = create(ORACLE, {"block_size": tiling.block_size, "query_tile": tiling.query_tile})
    assert isinstance(made, MassSource)
    return made


def describe(error: ValidationError) -> str:
    """A pydantic error as one line: each value that was given, and what is accepted."""
    parts: dict[tuple[str, str], list[str]] = {}
    for item in error.errors():
        where = ".".join(str(step) for step in item["loc"] if not _is_branch(step)) or "value"
        parts.setdefault((where, repr(item["input"])), []).append(item["msg"][:1].lower() + item["msg"][1:])
    return "; ".join(f"{where} = {value}: {' or '.join(messages)}" for (where, value), messages in parts.items())


def _is_branch(step: int | str) -> bool:
    """Whether a step of an error's location names the branch of a union rather than a key."""
    return isinstance(step, str) and (step in ("int", "float", "none", "str") or "[" in step or "-" in step)


def _load_file(path: Path) -> object:
    if not path.is_file():
        raise UserError(f"method file '{path}' does not exist; give the path of a Python file that defines a Method.")
    module_name = f"pyramidbench_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"method file '{path}' does not load: {type(error).__name__}: {error}") from error
    return module


def _class_in(module: object, given: str, name: str) -> type[Method]:
    """The one Method that a module defines itself, with its name set to the file's."""
    own = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, Method) and value.__module__ == getattr(module, "__name__", "")
    ]
    if len(own) != 1:
        raise UserError(f"'{given}' defines {len(own)} methods; accepted: exactly one subclass of Method per file.")
    if not dataclasses.is_dataclass(own[0]) or "__dataclass_fields__" not in vars(own[0]):
        raise UserError(f"'{given}': {own[0].__name__} is not a dataclass; put @dataclass(frozen=True) above it.")
    own[0].name = name
    return own[0]
