"""What a profile leaves behind: profile.json, its tables as CSV, its figures, and Nsight Compute's counters."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
from pydantic import BaseModel

from pyramidbench.cell import Cell
from pyramidbench.folder import write_whole
from pyramidbench.profiling.counters import Counters, joined, read_counters
from pyramidbench.profiling.draw import save_figure
from pyramidbench.profiling.figures import profile_figures
from pyramidbench.profiling.profile import TRACE, Profile

PROFILES = Path("profiles")
COUNTERS = "ncu.csv"
RATES = ("flops_per_s", "bytes_per_s")


def profile_folder(cell: Cell) -> Path:
    """Where a profile goes by default."""
    name = "".join(letter if letter.isalnum() else "-" for letter in cell.method)
    return PROFILES / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{name}-{cell.seq_len_kv}"


def write_profile(profile: Profile, folder: Path) -> list[Path]:
    """Write everything but the trace, which is there already; returns all files, the trace first."""
    write_whole(folder / "profile.json", profile.model_dump_json(indent=1))
    for name, rows in (("stages.csv", profile.stages), ("kernels.csv", profile.kernels)):
        pd.DataFrame([_line(row) for row in rows]).to_csv(folder / name, index=False)
    figures = [save_figure(figure, folder) for figure in profile_figures(profile)]
    return [folder / TRACE, folder / "profile.json", folder / "stages.csv", folder / "kernels.csv", *figures]


def counters_in(folder: Path) -> tuple[Counters, ...]:
    """The counters that lie in a profile's folder; none where no file of them does.

    Raises:
        UserError: the file there is no output of Nsight Compute.
    """
    path = folder / COUNTERS
    return read_counters(path.read_text(encoding="utf-8", errors="replace")) if path.is_file() else ()


def with_counters(profile: Profile, folder: Path) -> Profile:
    """The profile with the counters that lie in its folder; unchanged where none do.

    Raises:
        UserError: the file there is no output of Nsight Compute.
    """
    kernels = joined(profile.kernels, counters_in(folder), profile.device)
    return profile.model_copy(update={"kernels": kernels})


def _line(row: BaseModel) -> dict[str, object]:
    return {**row.model_dump(), **{name: getattr(row, name) for name in RATES}}
