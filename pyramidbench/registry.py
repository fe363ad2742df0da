"""The registry: finds methods by name (one file each in methods/), or among plug-ins, and makes them from text."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache, lru_cache

from pydantic import TypeAdapter, ValidationError

from pyramidbench import plugins
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


def all_names() -> tuple[str, ...]:
    """Names of all methods that can be named here: those of pyramidbench and of installed packages, sorted."""
    return tuple(sorted({*method_names(), *plugins.entry_points()}))


def hidden_names() -> tuple[str, ...]:
    """Names of packages' methods that cannot be had, since pyramidbench has one of that name itself."""
    return tuple(sorted({*method_names()} & {*plugins.entry_points()}))


@cache
def method_class(name: str) -> type[Method]:
    """The class behind a method's name, or behind the path of a Python file that defines one; of a plug-in that is broken, a
    `plugins.Broken`. A name of pyramidbench's own goes before a package's.

    Raises:
        UserError: no such method or file.
    """
    if name.endswith(".py"):
        return plugins.from_file(name)
    if name in method_names():
        return plugins.class_in(importlib.import_module(f"{PACKAGE}.{name}"), name)
    if name in plugins.entry_points():
        return plugins.from_package(name)
    raise unknown("method", name, all_names())


def fault(spec: str) -> str | None:
    """What is wrong with the plug-in of a spec, in one line; None for one that is fine, and for any other method."""
    try:
        cls = method_class(spec.partition(":")[0])
    except UserError:
        return None
    return cls.fault if issubclass(cls, plugins.Broken) else None


def split_spec(spec: str) -> tuple[str, str]:
    """Name and preset of "name" or "name:preset" (a missing preset is "default").

    Raises:
        UserError: the method or the preset does not exist.
    """
    name, _, preset = spec.partition(":")
    presets = preset_names(name)
    if preset and preset not in presets and fault(name) is None:
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
    if issubclass(cls, plugins.Broken):
        return cls()
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
