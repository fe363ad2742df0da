"""What a report is about: the runs, each with its manifest and device, and one summary over all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from pyramidbench.frame import Setting, labels, settings, summarise, with_speedups
from pyramidbench.record import columns
from pyramidbench.store import Run
from pyramidbench.units import is_missing, one_line
from pyramidbench.verdict import Verdict, verdict

LOG_LINES = 15


@dataclass(frozen=True)
class Source:
    """One run as it enters a report: its rows as `Run.frame` has them, manifest.json, device.json, and its folder where
    logs may lie."""

    frame: pd.DataFrame
    manifest: Mapping[str, Any]
    device: Mapping[str, Any]
    folder: Path | None = None

    @classmethod
    def of(cls, run: Run) -> Source:
        return cls(run.frame, run.manifest.model_dump(), run.device.model_dump(), run.path)

    @property
    def name(self) -> str:
        return one_line(self.manifest.get("name") or "run")

    def log_tail(self, cell: object) -> str | None:
        """The last lines of a cell's log, or None where it left none."""
        path = None if self.folder is None else self.folder / "logs" / f"{cell}.txt"
        if path is None or is_missing(cell) or not path.is_file():
            return None
        return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:])


class Evidence:
    """Runs that are reported together. `runs` has each under its name, made unique; a single run's is None.

    Rows of different runs meet in one dataframe, told apart by the column `run`, and never in one average, line or ratio.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self.runs: dict[str | None, Source] = (
            {None: sources[0]} if len(sources) == 1 else dict(zip(unique_names(sources), sources))
        )

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One row per cell, with the columns `run` and `label` besides those of a record."""
        parts = [source.frame.assign(run=name) for name, source in self.runs.items()]
        filled = [part for part in parts if len(part)]
        joined = pd.concat(filled, ignore_index=True) if filled else pd.DataFrame(columns=[*columns(), "run"])
        return with_speedups(joined.assign(run=joined["run"].astype(object), label=labels(joined)))

    @cached_property
    def summary(self) -> pd.DataFrame:
        """What is shown: one row per method, problem, input, budget and run."""
        return summarise(self.frame)

    @cached_property
    def settings(self) -> list[Setting]:
        return settings(self.summary)

    @property
    def title(self) -> str:
        return ", ".join(dict.fromkeys(source.name for source in self.runs.values()))

    @cached_property
    def verdicts(self) -> list[tuple[str | None, Verdict]]:
        """What each run says, with its name."""
        if None in self.runs:
            return [(None, verdict(self.summary))]
        return [(name, verdict(self.summary[self.summary["run"] == name])) for name in self.runs]

    def source_of(self, run: object) -> Source:
        """The run that a row of the summary comes from."""
        return self.runs[None if is_missing(run) else str(run)]


def unique_names(sources: Sequence[Source]) -> list[str]:
    """A name for each run: its sweep's, with what tells it apart where others have that too: device, version, time, count."""
    told = [[source.name] for source in sources]
    for tell in (_device, _version, _created):
        for same in _alike(told):
            if len({tell(sources[i]) for i in same}) > 1:
                for i in same:
                    told[i].append(tell(sources[i]))
    for same in _alike(told):
        for count, i in enumerate(same):
            told[i].append(f"no. {count + 1}")
    return [", ".join(parts) for parts in told]


def _alike(told: list[list[str]]) -> list[list[int]]:
    """Indices of runs that have one name so far, group by group."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for i, parts in enumerate(told):
        groups.setdefault(tuple(parts), []).append(i)
    return [group for group in groups.values() if len(group) > 1]


def _device(source: Source) -> str:
    return one_line(source.device.get("name") or "unknown device")


def _version(source: Source) -> str:
    return f"version {one_line(source.manifest.get('version') or 'unknown')}"


def _created(source: Source) -> str:
    return one_line(source.manifest.get("created") or "no date")
