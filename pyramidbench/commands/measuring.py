"""What commands that measure share: plan, measure with progress, and the exit code."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pyramidbench.output import console, print_json

if TYPE_CHECKING:
    from pyramidbench.cell import Cell
    from pyramidbench.plan import PlannedCell
    from pyramidbench.record import Record
    from pyramidbench.store import Run
    from pyramidbench.suite import Suite
    from pyramidbench.sweeping import Plan


def measured(
    suite: Suite, capture: str | None, device: str, out: Path | None, fresh: bool, dry_run: bool, timing: str,
    cell_budget: str, as_json: bool, cache: str = "cold", part: str | None = None,
) -> Run | None:  # fmt: skip
    """Plan and run a suite, with progress; None after a dry run."""
    from pyramidbench.axes import parse_duration
    from pyramidbench.clock import check_cache
    from pyramidbench.parts import parse_part
    from pyramidbench.progress import SweepProgress
    from pyramidbench.render import show_plan
    from pyramidbench.sweeping import make_plan, run_plan

    made = make_plan(
        suite, capture=capture, device=device, timing_s=parse_duration(timing, "--timing"),
        cell_budget_s=parse_duration(cell_budget, "--cell-budget"), cache=check_cache(cache),
        part=None if part is None else parse_part(part),
    )  # fmt: skip
    if dry_run and as_json:
        print_json([_planned_json(planned) for planned in made.cells])
    elif dry_run:
        show_plan(console(), made.cells)
        _tell_done(made, out)
    if dry_run:
        return None
    tell_broken(planned.cell for planned in made.cells)
    with SweepProgress(console(error=as_json)) as progress:
        return run_plan(made, out=out, fresh=fresh, reporter=progress)


def tell_broken(cells: Iterable[Cell]) -> None:
    """Say on stderr which plug-ins among the cells' methods are broken, and why."""
    from pyramidbench.registry import fault

    for said in dict.fromkeys(fault(cell.method) for cell in cells):
        if said is not None:
            sys.stderr.write(f"error: {said}; the other methods go on\n")


def _tell_done(made: Plan, out: Path | None) -> None:
    """How many of a plan's cells need no further attempt, where its folder has some already."""
    from pyramidbench.folder import run_folder
    from pyramidbench.render import print_line
    from pyramidbench.store import load_run
    from pyramidbench.sweeping import RESULTS

    planned = [cell.cell.identity for cell in made.cells]
    folder = out or run_folder(RESULTS, made.suite.name, made.device, planned)
    if (folder / "manifest.json").is_file():
        done = len(load_run(folder).done.intersection(planned))
        print_line(console(), f"{done} of them are done in '{folder}'; the same command measures the others there.")


def _planned_json(planned: PlannedCell) -> dict[str, object]:
    estimate = {"seconds": planned.seconds, "memory_bytes": planned.memory_bytes}
    return {**planned.cell.model_dump(), "verdict": planned.verdict, "reason": planned.reason, **estimate}


def exit_code(records: Sequence[Record]) -> int:
    """0 all fine, 3 some cells failed or a plug-in is broken, 4 a gate failed, 6 nothing was measured."""
    from pyramidbench.record import MEASURED
    from pyramidbench.registry import fault

    statuses = {record.status for record in records}
    if "incorrect" in statuses:
        return 4
    if not statuses & set(MEASURED):
        return 6
    broken = any(fault(record.method) for record in records)
    return 3 if broken or statuses & {"oom", "timeout", "crashed", "cuda_error"} else 0
