"""The tables of README.md and docs/ that follow from the code: columns and methods. `python -m pyramidbench.reference docs`."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pyramidbench.errors import UserError
from pyramidbench.facts import facts
from pyramidbench.record import Record
from pyramidbench.registry import method_class, method_names, preset_names

KINDS = {str: "text", bool: "yes or no", int: "whole number", float: "number"}


def columns_markdown() -> str:
    """Every result column in the order of the files, as a Markdown table: name, type, meaning."""
    fields = [(field.alias or name, field) for name, field in Record.model_fields.items()]
    return _table(
        ["column", "type", "meaning"],
        [[f"`{name}`", _kind(field.annotation), field.description or ""] for name, field in fields],
    )


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


TABLES = {
    "README.md": ("methods", facts_markdown),
    "results.md": ("columns", columns_markdown),
    "methods.md": ("methods", methods_markdown),
}


def filled(page: str, text: str) -> str:
    """The text of a page of TABLES with its table made anew, between `<!-- name -->` and `<!-- end of name -->`.

    Raises:
        UserError: the text lacks these two marks.
    """
    name, table = TABLES[page]
    between = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
    if not between.search(text):
        raise UserError(f"{page} lacks the marks <!-- {name} --> and <!-- end of {name} -->; put them back.")
    return between.sub(lambda marks: f"{marks[1]}{table()}\n{marks[2]}", text)


def main(folder: Path) -> None:
    """Rewrite the tables of the pages in a folder docs/, and of the README beside it."""
    for page in TABLES:
        path = folder.resolve().parent / page if page == "README.md" else folder / page
        path.write_text(filled(page, path.read_text(encoding="utf-8")), encoding="utf-8")


def _kind(annotation: Any) -> str:
    """A column's type in plain words; that it may be empty goes without saying."""
    if get_origin(annotation) is types.UnionType:
        annotation = next(part for part in get_args(annotation) if part is not types.NoneType)
    if get_origin(annotation) is list:
        return "list of numbers"
    return "text" if get_origin(annotation) is Literal else KINDS[annotation]


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
