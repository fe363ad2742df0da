"""`pyramidbench report`: the report of a run, also written after each sweep."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from pyramidbench.errors import UserError

if TYPE_CHECKING:
    from pyramidbench.store import Run


def report(
    run: Annotated[Path, Argument(help="a run's folder")],
    out: Annotated[Path | None, Option(help="where the report goes; reports/<name of the run> without it")] = None,
) -> None:
    """Write report.html, the figures, summary.md and results.csv of a run."""
    from pyramidbench.output import console, say
    from pyramidbench.store import load_run

    say(console(), f"Report: {write(load_run(run), out)}")


def write(run: Run, out: Path | None) -> Path:
    """Write the report of a run; returns where its page lies.

    Raises:
        UserError: the folder cannot be written.
    """
    from pyramidbench.report import write_report

    folder = out or Path("reports") / run.path.resolve().name
    try:
        write_report(run.frame, run.manifest.model_dump(), run.device.model_dump(), folder)
    except OSError as error:
        raise UserError(
            f"cannot write the report to '{folder}': {error.strerror or error}; give another --out."
        ) from None
    return folder / "report.html"
