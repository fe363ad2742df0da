"""A comparison: two runs, or two methods of one run, cell by cell as a tidy dataframe."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from pyramidbench.comparing.changes import QUALITY, Samples
from pyramidbench.comparing.matching import Matched, Pair, match_methods, match_runs
from pyramidbench.comparing.thresholds import Threshold
from pyramidbench.comparing.verdicts import Difference, Margins, differences
from pyramidbench.errors import UserError, unknown
from pyramidbench.frame import labels
from pyramidbench.inputs import CAPTURE_SUFFIX
from pyramidbench.record import Record
from pyramidbench.samples import load_pairs, load_samples
from pyramidbench.store import Run, load_run

REFERENCES = Path("results") / "reference"
SHARED = (
    "kind", "device", "batch", "heads", "kv_heads", "head_dim", "dtype", "causal", "direction", "input", "layer", "seed",
    "seq_len", "seq_len_kv", "block_size", "top_k", "levels", "query_tile", "parameters",
)  # fmt: skip
"""Columns that a comparison shows of B, and of A where B has none."""


@dataclass(frozen=True)
class Comparison:
    """B against A: `differences` in the order of A's cells, the cells that have no partner, and in what the two runs differ
    besides."""

    a: str
    b: str
    differences: tuple[Difference, ...]
    only_a: tuple[Record, ...]
    only_b: tuple[Record, ...]
    margins: Margins
    notes: tuple[str, ...] = ()

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One row per pair; docs/results.md lists the columns."""
        frame = pd.DataFrame([_row(difference) for difference in self.differences])
        frame["label"] = labels(frame.rename(columns={"method_b": "method"}))
        return frame

    def broken(self, thresholds: Iterable[Threshold]) -> list[tuple[Threshold, Difference]]:
        """The pairs that are a regression, each with the threshold that says so."""
        return [(threshold, pair) for threshold in thresholds for pair in self.differences if threshold.broken_by(pair)]


def open_run(text: str) -> Run:
    """The run in a folder, or the recorded reference run of that name.

    Raises:
        UserError: neither; the message lists the references that there are.
    """
    reference = REFERENCES / text
    if not Path(text).exists() and (reference / "manifest.json").is_file():
        return load_run(reference)
    if not Path(text).exists() and REFERENCES.is_dir():
        raise unknown("run", text, ["a run's folder", *(path.name for path in REFERENCES.iterdir())])
    return load_run(text)


def compare_runs(
    a: Run, b: Run, *, methods: Sequence[str] = (), allow: Iterable[str] = (), margins: Margins | None = None
) -> Comparison:
    """Every cell of run `b` against its partner in run `a`; `methods` leaves out all others.

    Raises:
        UserError: no cell has a partner, a method that a run does not have, times of different clocks, or a capture that
            has changed between the runs.
    """
    allow = list(allow)
    if "input" not in allow:
        _check_files(a, b)
    sides = [_only(run, methods) for run in (a, b)]
    matched = match_runs(sides[0], sides[1], allow)
    return replace(_compared(matched, (a, b), (a.path.name, b.path.name), margins), notes=_circumstances(a, b))


def compare_methods(
    run: Run, a: str, b: str, *, allow: Iterable[str] = (), margins: Margins | None = None
) -> Comparison:
    """Every cell of method `b` against method `a` on the same problem and input of one run.

    Raises:
        UserError: a method that the run does not have, or cells that cannot be paired.
    """
    return _compared(match_methods(run.records, a, b, allow), (run, run), (a, b), margins)


def _only(run: Run, methods: Sequence[str]) -> list[Record]:
    known = sorted({record.method for record in run.records})
    for name in methods:
        if name not in known:
            raise unknown(f"method of run '{run.path}'", name, known)
    return [record for record in run.records if not methods or record.method in methods]


def _compared(matched: Matched, runs: tuple[Run, Run], names: tuple[str, str], margins: Margins | None) -> Comparison:
    margins = margins or Margins()

    def raw(pair: Pair) -> tuple[Samples | None, Samples | None, bool]:
        paired = load_pairs(runs[0].path, pair.a, pair.b) if runs[0] is runs[1] else None
        if paired is not None:
            return (*paired, True)
        return load_samples(runs[0].path, pair.a), load_samples(runs[1].path, pair.b), False

    found = differences(matched.pairs, raw, margins)
    return Comparison(names[0], names[1], tuple(found), matched.only_a, matched.only_b, margins)


def _check_files(a: Run, b: Run) -> None:
    """Raise UserError where one capture has other tensors in the two runs."""
    before, after = (run.manifest.settings.get("files", {}) for run in (a, b))
    changed = [
        path for path in before if path in after and before[path] != after[path] and path.endswith(CAPTURE_SUFFIX)
    ]
    if changed:
        raise UserError(
            f"the capture '{changed[0]}' is not the same file in the two runs (SHA-256 {before[changed[0]][:12]} and "
            f"{after[changed[0]][:12]}), so they differ in their input; to compare all the same: --allow input."
        )


def _circumstances(a: Run, b: Run) -> tuple[str, ...]:
    """What else differs between two runs: versions, threads, and how long was measured."""
    names = ("threads", "system", "python", "torch", "triton", "cuda")
    facts: list[tuple[str, object, object]] = [(n, getattr(a.device, n), getattr(b.device, n)) for n in names]
    facts += [("pyramidbench", a.manifest.version, b.manifest.version)]
    facts += [("--timing, s", a.manifest.settings.get("timing_s"), b.manifest.settings.get("timing_s"))]
    return tuple(f"{name}: {before} in A, {after} in B" for name, before, after in facts if before != after)


def _row(difference: Difference) -> dict[str, Any]:
    """One line of `Comparison.frame`."""
    a, b, time = difference.pair.a, difference.pair.b, difference.time
    value = time.value if time else None
    row: dict[str, Any] = {"cell_a": a.cell, "cell_b": b.cell, "method_a": a.method, "method_b": b.method}
    row |= {"pass" if name == "direction" else name: _either(a, b, name) for name in SHARED}
    row |= {
        "status_a": a.status, "status_b": b.status, "latency_a_s": a.latency_s, "latency_b_s": b.latency_s,
        "time_ratio": value.median if value else None, "time_ratio_low": value.low if value else None,
        "time_ratio_high": value.high if value else None, "time_p": difference.time_p if time else None,
        "interval_by": time.how if time else None, "time_verdict": difference.time_verdict,
        "memory_ratio": difference.memory, "memory_verdict": difference.memory_verdict,
    }  # fmt: skip
    for name in QUALITY:
        change = difference.quality.get(name)
        row |= {
            f"{name}_change": change.value.median if change else None,
            f"{name}_change_low": change.value.low if change else None,
            f"{name}_change_high": change.value.high if change else None,
        }
    return row | {"quality_verdict": difference.quality_verdict, "notes": "; ".join(difference.pair.notes) or None}


def _either(a: Record, b: Record, name: str) -> object:
    value = getattr(b, name)
    return getattr(a, name) if value is None else value
