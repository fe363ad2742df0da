"""`pyramidbench merge`: runs of several machines as one run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from pyramidbench.errors import UserError, unknown
from pyramidbench.flags import Text

Runs = Annotated[list[Path], Argument(metavar="RUN RUN...", help="the folders of the runs")]
Out = Annotated[
    Path | None, Option(help="the merged run's folder, which must be new; results/<time>-<name>-merged without it")
]
PreferFlag = Annotated[
    Text,
    Option("--prefer", help="of a cell measured twice on one device, keep the record of the first or the last run"),
]
CHOICES = ("first", "last")


def merge(runs: Runs, out: Out = None, prefer: PreferFlag = None) -> None:
    """Merge runs into one. The same cell of two devices is two rows; measured twice on one device, it is a conflict."""
    from pyramidbench.merging import Prefer, default_folder, plan_merge, write_merged
    from pyramidbench.output import console, say
    from pyramidbench.render_tools import show_merge
    from pyramidbench.store import load_run
    from pyramidbench.sweeping import RESULTS

    if prefer not in (None, *CHOICES):
        raise unknown("preference", prefer, CHOICES)
    chosen: Prefer | None = None if prefer is None else "first" if prefer == "first" else "last"
    merging = plan_merge([load_run(path) for path in runs], chosen)
    show_merge(console(error=bool(merging.conflicts and chosen is None)), merging)
    if merging.conflicts and chosen is None:
        raise UserError(
            f"{len(merging.conflicts)} cells were measured twice on one device; give --prefer first or --prefer last, "
            "or leave out a run."
        )
    merged = write_merged(merging, out or default_folder(RESULTS, merging))
    say(console(), f"Run: {merged.path}")
