"""`pyramidbench report`: the report of one or more runs, also written after each sweep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from pyramidbench.errors import UserError, unknown

if TYPE_CHECKING:
    from pyramidbench.store import Run


def report(
    runs: Annotated[list[Path], Argument(metavar="RUN...", help="a run's folder, or several to stand side by side")],
    out: Annotated[
        Path | None, Option(help="where the report goes; reports/<name of the first run> without it")
    ] = None,
    style: Annotated[
        str, Option(help="screen, or paper: as wide as both columns of a page, without titles")
    ] = "screen",
) -> None:
    """Write report.html, the figures as PNG and SVG, summary.md and results.csv of one or more runs."""
    from pyramidbench.output import console, say
    from pyramidbench.store import load_run

    say(console(), f"Report: {write([load_run(run) for run in runs], out, style)}")


def write(runs: Sequence[Run], out: Path | None, style: str = "screen") -> Path:
    """Write the report of some runs; returns where its page lies.

    Raises:
        UserError: a style that does not exist, a folder that cannot be written, or a package that draws is missing.
    """
    try:
        from pyramidbench.reporting.write import STYLES, Source, write_report
    except ModuleNotFoundError as error:
        named = " ".join(str(run.path) for run in runs)
        raise UserError(
            f"no report: the package {error.name} is not installed here; pip install altair vl-convert-python, or, on "
            f"another machine, `pyramidbench report {named}`. What was measured is kept."
        ) from None
    if style not in STYLES:
        raise unknown("style", style, STYLES)
    folder = out or Path("reports") / runs[0].path.resolve().name
    write_report([Source.of(run) for run in runs], folder, style)
    return folder / "report.html"
