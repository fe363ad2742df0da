"""What there is to choose from: methods, suites and inputs with a line on each, and each in full."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Literal

from pydantic import BaseModel

from pyramidbench.errors import unknown
from pyramidbench.inputs import synthetic_names, synthetic_summary
from pyramidbench.registry import create, method_class, method_names, preset_names
from pyramidbench.suite import load_suite, suite_names

What = Literal["methods", "suites", "inputs"]


class Entry(BaseModel):
    """One thing that a sweep can name. `unavailable` says why it cannot be used here."""

    name: str
    text: str
    unavailable: str | None = None
    presets: tuple[str, ...] = ()


def catalogue(what: str) -> list[Entry]:
    """Everything of one kind, sorted by name ("methods", "suites" or "inputs")."""
    if what == "methods":
        return [
            Entry(
                name=name,
                text=inspect.getdoc(method_class(name)) or "",
                unavailable=create(name).unavailable(),
                presets=preset_names(name),
            )
            for name in method_names()
        ]
    if what == "suites":
        return [Entry(name=name, text=load_suite(name).description) for name in suite_names()]
    return [Entry(name=name, text=synthetic_summary(name).partition("\n")[0]) for name in sorted(synthetic_names())]


def describe_one(what: str, name: str) -> str:
    """One method (docstring, source, presets, parameters), suite or input in full.

    Raises:
        UserError: there is none of that name.
    """
    if what == "methods":
        return _describe_method(name)
    if what == "suites":
        suite = load_suite(name)
        return f"{suite.name}: {suite.description}\n{suite.model_dump_json(indent=1, by_alias=True, exclude_none=True)}"
    if name not in synthetic_names():
        raise unknown("input", name, synthetic_names())
    return synthetic_summary(name)


def _describe_method(name: str) -> str:
    cls = method_class(name)
    lines = [f"{name} ({cls.kind})", "", inspect.getdoc(cls) or "", "", f"Source: {cls.source}", "", "Presets:"]
    for preset in preset_names(name):
        values = ", ".join(f"{key}={value}" for key, value in cls.presets.get(preset, {}).items())
        lines.append(f"  {preset}: {values or 'the defaults'}")
    lines += ["", "Parameters and defaults:"]
    lines += [f"  {field.name} = {field.default!r}" for field in dataclasses.fields(cls)]
    return "\n".join(lines)
