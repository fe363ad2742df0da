"""Verifying: whether methods are right on this machine, without timing them. Every call runs in a worker, as a sweep's do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

from pyramidbench.cell import Cell
from pyramidbench.grid import MethodSpec
from pyramidbench.outcome import Settings, failed
from pyramidbench.problem import PASSES, Pass
from pyramidbench.record import Record, Status
from pyramidbench.registry import all_names, create, preset_names
from pyramidbench.suite import Suite

SUITE = "verify"
LIMIT_S = 120.0
"""Seconds that a call may take, besides the worker's own grace: on a GPU a new shape compiles a dozen kernels."""
PATIENCE: dict[Status, int] = {"timeout": 1, "crashed": 5, "cuda_error": 5, "oom": 5}
"""After so many ends of a kind a method's other calls are skipped: each costs a new worker, or its limit."""


class Verifier(Protocol):
    """What runs a call, such as a `Worker`."""

    def verify(self, cell: Cell, limit_s: float) -> Record: ...


def every_spec() -> tuple[str, ...]:
    """All methods that can be named here, with all their presets."""
    named = ((name, preset) for name in all_names() for preset in preset_names(name))
    return tuple(name if preset == "default" else f"{name}:{preset}" for name, preset in named)


def cells_of(
    suite: Suite, methods: Sequence[str] | None, passes: Sequence[str] | None, capture: str | None = None
) -> list[Cell]:
    """The suite's cells, with other methods in place of its own and some of its passes only (None: as the suite has them).
    `capture` is the file that its input "capture" stands for.

    Raises:
        UserError: a method that does not exist, or a capture that is missing, damaged, or not asked for.
    """
    if methods is not None:
        specs = tuple(MethodSpec(method=method) for method in methods if create(method))
        grids = tuple(grid.model_copy(update={"methods": specs}) for grid in suite.grids)
        suite = suite.model_copy(update={"grids": grids})
    return [cell for cell in suite.cells(capture=capture) if passes is None or cell.direction in passes]


def verify(
    cells: Iterable[Cell], verifier: Verifier, settings: Settings, finished: Callable[[Record], None]
) -> list[Record]:
    """A record of each cell, in order: ok, incorrect, or how else it ended. `finished` hears of each as it comes."""
    records, ends = [], Counter[tuple[str, Status]]()
    for cell in cells:
        spent = next((end for end, most in PATIENCE.items() if ends[cell.method, end] >= most), None)
        if spent is None:
            record = verifier.verify(cell, LIMIT_S)
            ends[cell.method, record.status] += 1
        else:
            count = PATIENCE[spent]
            before = "a call before it" if count == 1 else f"{count} calls before it"
            record = failed(cell, settings, "skipped", f"{before} ended as {spent}")
        records.append(record)
        finished(record)
    return records


@dataclass(frozen=True)
class Verdict:
    """What verifying came to for one method.

    right: of each pass, how many calls were right and how many were made. sparse: in how many of the right ones some pairs were
    left out; in the others any choice of blocks is right. refusals: reasons why it cannot do a problem, each
    with how often. nearest: the largest error, as a share of what is allowed; None where nothing ran.
    """

    method: str
    backends: tuple[str, ...]
    right: dict[Pass, tuple[int, int]]
    sparse: int
    refusals: dict[str, int]
    nearest: float | None
    faults: tuple[Record, ...]


def verdicts(records: Iterable[Record]) -> list[Verdict]:
    """A verdict on each method, in the order of their names."""
    ordered = sorted(records, key=lambda record: record.method)
    return [_verdict(method, list(mine)) for method, mine in groupby(ordered, key=lambda record: record.method)]


def _verdict(method: str, records: list[Record]) -> Verdict:
    made = [record for record in records if record.status != "unsupported"]
    right = [record for record in made if record.status == "ok"]
    counts = {
        direction: tuple(sum(record.direction == direction for record in some) for some in (right, made))
        for direction in PASSES
    }
    return Verdict(
        method=method,
        backends=tuple(sorted({record.backend for record in right if record.backend})),
        right={direction: (good, all_) for direction, (good, all_) in counts.items() if all_},
        sparse=sum(record.density is not None and record.density < 1 for record in right),
        refusals=dict(Counter(record.reason or "" for record in records if record.status == "unsupported")),
        nearest=max((record.gate_error or 0.0 for record in right), default=None),
        faults=tuple(record for record in made if record.status != "ok"),
    )
