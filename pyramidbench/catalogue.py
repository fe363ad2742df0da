"""What there is to choose from: methods, suites and inputs with a line on each, and each in full."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel

from pyramidbench.facts import Facts, facts
from pyramidbench.inputs import input_summary, synthetic_names, synthetic_summary
from pyramidbench.registry import all_names, create, method_class, preset_names, split_spec
from pyramidbench.suite import load_suite, suite_names

What = Literal["methods", "suites", "inputs"]


class Entry(BaseModel):
    """A suite or an input that a sweep can name."""

    name: str
    text: str


def catalogue(what: str) -> Sequence[Entry | Facts]:
    """Everything of one kind, sorted by name ("methods", "suites" or "inputs")."""
    if what == "methods":
        return method_facts()
    if what == "suites":
        return [Entry(name=name, text=load_suite(name).description) for name in suite_names()]
    return [Entry(name=name, text=synthetic_summary(name).partition("\n")[0]) for name in sorted(synthetic_names())]


def method_facts() -> list[Facts]:
    """The facts of every method that can be named, sorted by name."""
    return [facts(name) for name in all_names()]


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
    return input_summary(name)


def _describe_method(name: str) -> str:
    name, _ = split_spec(name)
    cls, known = method_class(name), facts(name)
    passes = [
        word
        for word, has in (("forward", known.forward), ("backward", known.backward), ("decode", known.decode))
        if has
    ]
    lines = [f"{name} ({cls.kind})", "", known.text, "", f"Source: {cls.source}"]
    lines += [f"Queries × keys that share a choice: {known.granularity}; choosing costs: {known.selection_cost}"]
    lines += [f"Passes: {', '.join(passes) or 'none'}", "", "Presets:"]
    for preset in preset_names(name):
        values = ", ".join(f"{key}={value}" for key, value in cls.presets.get(preset, {}).items())
        missing = create(f"{name}:{preset}").unavailable()
        lines.append(f"  {preset}: {values or 'the defaults'}{f' (unavailable: {missing})' if missing else ''}")
    lines += ["", "Parameters and defaults:"]
    lines += [f"  {field.name} = {field.default!r}" for field in dataclasses.fields(cls)]
    return "\n".join(lines)
