"""`pyramidbench schema`: JSON Schema of a run's files."""

from __future__ import annotations

from typing import Annotated

from typer import Argument

from pyramidbench.flags import Text

Part = Annotated[Text, Argument(help="record, manifest or device; all of them without it")]


def schema(part: Part = None) -> None:
    """Print the JSON Schema of what a run leaves behind: a line of cells.jsonl, manifest.json, device.json."""
    from pyramidbench.output import print_json
    from pyramidbench.schema import json_schema, schemas

    print_json(schemas() if part is None else json_schema(part))
