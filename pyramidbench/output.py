"""What commands print to: the console for people, JSON on stdout for scripts."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def console(*, error: bool = False) -> Console:
    """A console on stdout, or on stderr."""
    from rich.console import Console

    return Console(stderr=error)


def say(to: Console, *lines: str) -> None:
    """Print lines as they are: no markup, no wrapping."""
    for line in lines:
        to.print(line, markup=False, highlight=False, soft_wrap=True)


def print_json(value: object) -> None:
    """Print a value as JSON on stdout; a string is JSON already."""
    import json

    sys.stdout.write((value if isinstance(value, str) else json.dumps(value, indent=1)) + "\n")
