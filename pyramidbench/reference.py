"""The tables of README.md and docs/ that follow from the code: columns and methods. `python -m pyramidbench.reference docs`."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from pyramidbench.device import Device
from pyramidbench.errors import UserError
from pyramidbench.evaluation.record import EvaluationRecord
from pyramidbench.facts import facts
from pyramidbench.manifest import Manifest, Source
from pyramidbench.profiling.profile import Profile
from pyramidbench.profiling.rows import KernelRow, StageRow
from pyramidbench.record import Record
from pyramidbench.registry import method_class, method_names, preset_names
from pyramidbench.schema import ADDED

KINDS = {str: "text", bool: "yes or no", int: "whole number", float: "number"}
LISTS = {str: "list of texts", Source: "list of tables"}


def columns_markdown() -> str:
    """Every result column in the order of the files, as a Markdown table: name, type, meaning."""
    return _fields(Record, "column")


def evaluation_columns_markdown() -> str:
    """Every result column of an evaluation, likewise."""
    return _fields(EvaluationRecord, "column")


def manifest_markdown() -> str:
    """Every key of manifest.json, as a Markdown table."""
    return _fields(Manifest, "key")


def sources_markdown() -> str:
    """Every key of one of a manifest's sources, as a Markdown table."""
    return _fields(Source, "key")


def device_markdown() -> str:
    """Every key of device.json, as a Markdown table."""
    return _fields(Device, "key")


def profile_markdown() -> str:
    """Every key of profile.json, as a Markdown table."""
    return _fields(Profile, "key")


def stages_markdown() -> str:
    """Every key of a profile's stage, as a Markdown table."""
    return _fields(StageRow, "key")


def kernels_markdown() -> str:
    """Every key of a profile's kernel, as a Markdown table."""
    return _fields(KernelRow, "key")


def versions_markdown() -> str:
    """Every version of the result schema with what it added, as a Markdown table."""
    rows = [["1", "the first"]]
    for version, parts in ADDED.items():
        told = [f"{part}: {', '.join(f'`{name}`' for name in names)}" for part, names in parts.items()]
        rows.append([str(version), "; ".join(told)])
    return _table(["version", "added"], rows)


def methods_markdown() -> str:
    """Every method that comes with pyramidbench, as a Markdown table: name, kind, presets, what it is, source."""
    rows = []
    for name in method_names():
        cls = method_class(name)
        presets = ", ".join(f"`{preset}`" for preset in preset_names(name))
        rows.append([f"`{name}`", cls.kind, presets, (cls.__doc__ or "").strip().partition("\n")[0], cls.source])
    return _table(["method", "kind", "presets", "what it is", "source"], rows)


def facts_markdown() -> str:
    """Every method that comes with pyramidbench, as the Markdown table of README.md: what it keeps, what choosing costs, which
    passes it has. What runs on this machine is not in it."""
    rows = []
    for name in method_names():
        known = facts(name)
        passes = ["yes" if has else "–" for has in (known.forward, known.backward, known.decode)]
        rows.append([f"`{name}`", known.kind, known.granularity, known.selection_cost, *passes])
    return _table(["method", "kind", "tile × block", "choosing", "forward", "backward", "decode"], rows)


TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"methods": facts_markdown},
    "results.md": {
        "columns": columns_markdown, "manifest": manifest_markdown, "sources": sources_markdown, "device": device_markdown,
        "versions": versions_markdown, "profile": profile_markdown, "stages": stages_markdown, "kernels": kernels_markdown,
    },
    "evaluation.md": {"columns": evaluation_columns_markdown},
    "methods.md": {"methods": methods_markdown},
}  # fmt: skip


def filled(page: str, text: str) -> str:
    """The text of a page of TABLES with its tables made anew, each between `<!-- name -->` and `<!-- end of name -->`.

    Raises:
        UserError: the text lacks the two marks of a table.
    """
    for name, table in TABLES[page].items():
        between = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        if not between.search(text):
            raise UserError(f"{page} lacks the marks <!-- {name} --> and <!-- end of {name} -->; put them back.")
        made = table()
        text = between.sub(lambda marks, made=made: f"{marks[1]}{made}\n{marks[2]}", text)  # type: ignore[misc]
    return text


def main(folder: Path) -> None:
    """Rewrite the tables of the pages in a folder docs/, and of the README beside it."""
    for page in TABLES:
        path = folder.resolve().parent / page if page == "README.md" else folder / page
        path.write_text(filled(page, path.read_text(encoding="utf-8")), encoding="utf-8")


def _fields(model: type[BaseModel], called: str) -> str:
    fields = [(field.alias or name, field) for name, field in model.model_fields.items()]
    return _table(
        [called, "type", "meaning"],
        [[f"`{name}`", _kind(field.annotation), field.description or ""] for name, field in fields],
    )


def _kind(annotation: Any) -> str:
    """A column's type in plain words; that it may be empty goes without saying."""
    if get_origin(annotation) in (types.UnionType, Union):
        annotation = next(part for part in get_args(annotation) if part is not types.NoneType)
    if get_origin(annotation) is list:
        return LISTS.get(get_args(annotation)[0], "list of numbers")
    if get_origin(annotation) is tuple:
        return "list of tables"
    if get_origin(annotation) is dict:
        return "table"
    return "text" if get_origin(annotation) is Literal else KINDS.get(annotation, "table")


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
