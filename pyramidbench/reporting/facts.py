"""How it was measured: what one must know to repeat a run, as names and texts."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from pyramidbench.frame import measured
from pyramidbench.reporting.evidence import Source
from pyramidbench.units import is_missing, one_line, significant

UNITS = (
    ("_bytes_per_s", " bandwidth", 1e9, "GB/s"),
    ("_flops_per_s", " arithmetic", 1e12, "TFLOP/s"),
    ("_bytes", "", 2**30, "GiB"),
)
"""Suffix of a device's fact, what stands for it, and the unit that people read."""


def how_measured(source: Source) -> dict[str, str]:
    """Command, versions, device, seeds, inputs, clock of a run. Names to text."""
    frame, manifest = source.frame, source.manifest
    facts = {"command": command(manifest.get("argv", []))}
    for name in ("created", "version", "git"):
        if not is_missing(manifest.get(name)):
            facts["pyramidbench" if name == "version" else name] = str(manifest[name])
    for column, name in (("input", "input"), ("layer", "layers"), ("seed", "seeds"), ("clock", "clock")):
        values = list(frame[column].dropna().unique())
        if values:
            facts[name] = ", ".join(str(int(v) if isinstance(v, float) else v) for v in sorted(values))
    backends = sorted(
        {f"{row['method']}: {row['backend']}" for row in measured(frame).to_dict("records") if row["backend"]}
    )
    if backends:
        facts["implementations"] = ", ".join(backends)
    facts |= {f"device {name}": text for name, text in _flat(source.device)}
    return {name: one_line(text) for name, text in facts.items()}


def command(argv: Sequence[str]) -> str:
    """The command line that repeats a run."""
    if not argv:
        return "not recorded"
    first, *rest = argv
    is_program = PurePath(first).name.startswith("pyramidbench") or first.endswith("__main__.py")
    return shlex.join(["pyramidbench", *(rest if is_program else argv)])


def _flat(facts: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """Facts of the device, nested ones too, with a name and a value in the units that people read."""
    for key, value in facts.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key} ")
        elif not is_missing(value):
            name, text = _fact(key, value)
            yield f"{prefix}{name}".replace("_", " "), text


def _fact(key: str, value: object) -> tuple[str, str]:
    if isinstance(value, int | float):
        for suffix, name, size, unit in UNITS:
            if key.endswith(suffix):
                return key.removesuffix(suffix) + name, f"{significant(value / size)} {unit}"
    return key, str(value)
