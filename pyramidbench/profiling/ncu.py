"""Hardware counters from Nsight Compute: the command that collects them, and reading its CSV.

The format (Nsight Compute CLI, options --csv and --print-units base): lines of the tool that begin with "==", whatever the
program prints, then one quoted row per kernel and metric under a header with "ID", "Kernel Name", "Metric Name", "Metric
Unit" and "Metric Value"; numbers have commas at the thousands. With --page raw each metric is a column, the first row has
the units, and then comes one row per kernel.

By default the tool locks the device's clocks while it measures; here it must not, as no setting of a device is ever changed. It
replays each kernel several times and empties the caches before each, which is asked for by name: what a kernel finds in the
L2 otherwise depends on the replay before.
"""

from __future__ import annotations

import csv
import io
import re
import shlex
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pyramidbench.device import Device
from pyramidbench.errors import UserError
from pyramidbench.profiling.rows import KernelRow, short_name, with_counters

TIME = "gpu__time_duration.sum"
BYTES = ("dram__bytes_read.sum", "dram__bytes_write.sum")
METRICS = {
    "l2_bytes": "lts__t_bytes.sum",
    "sm_share": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "tensor_share": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "registers": "launch__registers_per_thread",
}
UNITS = {
    "byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "nsecond": 1e-9,
    "usecond": 1e-6, "msecond": 1e-3, "second": 1.0, "%": 1e-2, "register/thread": 1.0, "": 1.0,
}  # fmt: skip
"""What a value in each unit is in SI; older versions of the tool spell times out."""
RIGHTS = "its counters are for administrators, until one loads the driver with NVreg_RestrictProfilingToAdminUsers=0"
NEEDED = ("ID", "Kernel Name", "Metric Name", "Metric Unit", "Metric Value")


@dataclass(frozen=True)
class Counters:
    """Counters of all launches of one kernel in one call: seconds and bytes are summed, shares weighted by time."""

    name: str
    launches: int
    values: Mapping[str, float]


def command(program: Sequence[str], log: Path) -> list[str]:
    """The command that runs a program under Nsight Compute and writes the counters of the range that it opens to `log`."""
    metrics = ",".join([TIME, *BYTES, *METRICS.values()])
    options = [
        "--profile-from-start", "off", "--target-processes", "all", "--clock-control", "none", "--cache-control", "all",
        "--csv", "--print-units", "base", "--metrics", metrics,
    ]  # fmt: skip
    return ["ncu", *options, "--log-file", str(log), "--force-overwrite", *program]


def collect(program: Sequence[str], log: Path, timeout_s: float = 600.0) -> str | None:
    """Run that command where the tool is installed; why there are no counters, or None.

    A run that fails (counters may need rights that the driver does not give to everybody) is an answer, and no error.
    """
    if shutil.which("ncu") is None:
        return "Nsight Compute (ncu) is not installed here"
    try:
        done = subprocess.run(command(program, log), capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return f"ncu gave nothing within {timeout_s:.0f} s"
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    if done.returncode == 0 and _table(text):
        return None
    lines = "\n".join([text, done.stdout, done.stderr]).splitlines()
    said = next((line for mark in ("==ERROR==", "==WARNING==") for line in lines if line.startswith(mark)), None)
    reason = "no reason given" if said is None else re.sub(r"^==\w+==\s*", "", said)
    rights = f"; {RIGHTS}" if "ERR_NVGPUCTRPERM" in reason else ""
    return f"ncu ended with {done.returncode} and no counters: {reason}{rights}"


def read_counters(text: str) -> tuple[Counters, ...]:
    """The counters in the tool's CSV, kernel by kernel in order of appearance.

    Raises:
        UserError: no such table in the text, or a value that is no number in a known unit.
    """
    table = _table(text)
    if not table:
        errors = [line.removeprefix("==ERROR==").strip() for line in text.splitlines() if line.startswith("==ERROR==")]
        raise UserError(f"no table of counters in ncu's output; it says: {errors[0] if errors else 'nothing'}")
    rows = csv.DictReader(io.StringIO("\n".join(table)))
    launches: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for number, kernel, metric, unit, text_value in _entries(rows):
        value = _value(text_value, unit)
        if value is not None:
            launches[number, kernel][metric] = value
    by_kernel: dict[str, list[dict[str, float]]] = defaultdict(list)
    for (_, name), metrics in launches.items():
        by_kernel[name].append(metrics)
    return tuple(Counters(name, len(found), _joined(found)) for name, found in by_kernel.items())


def _table(text: str) -> list[str]:
    """The quoted lines from the header on; none where the tool wrote no table, or one without a row."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    quoted = [line for line in lines[start:] if line.startswith('"')]
    return quoted if len(quoted) > 1 else []


def _entries(rows: csv.DictReader[str]) -> Iterator[tuple[str, str, str, str, str]]:
    """ID, kernel, metric, unit and value of every value, whichever of the two forms the table has."""
    names = rows.fieldnames or ()
    metrics = [name for name in names if name in (TIME, *BYTES, *METRICS.values())]
    if "Kernel Name" in names and metrics:
        units = next(rows)
        if units["ID"]:
            raise UserError(
                "ncu's table lacks the row of units below its header; run it with the options that --ncu prints."
            )
        for row in rows:
            yield from ((row["ID"], row["Kernel Name"], name, units[name], row[name]) for name in metrics)
        return
    missing = [name for name in NEEDED if name not in names]
    if missing:
        raise UserError(f"ncu's table lacks the column '{missing[0]}'; run it with the options that --ncu prints.")
    for row in rows:
        yield row["ID"], row["Kernel Name"], row["Metric Name"], row["Metric Unit"], row["Metric Value"]


def joined(kernels: Iterable[KernelRow], counters: Iterable[Counters], device: Device) -> tuple[KernelRow, ...]:
    """The rows of a profile with the counters of their kernels; a kernel that runs in several stages keeps its estimates, as
    the tool does not say which launch was whose."""
    rows = list(kernels)
    known = {short_name(found.name): found for found in counters}
    names = [short_name(row.name) for row in rows]
    return tuple(
        with_counters(row, known[name].values, device) if name in known and names.count(name) == 1 else row
        for row, name in zip(rows, names)
    )


def printed(program: Sequence[str], log: Path) -> str:
    """The command as one types it."""
    return shlex.join(command(program, log))


def _joined(launches: list[dict[str, float]]) -> dict[str, float]:
    values = {}
    if all(name in launch for launch in launches for name in BYTES):
        values["bytes"] = sum(launch[name] for launch in launches for name in BYTES)
    for name, metric in METRICS.items():
        if not all(metric in launch for launch in launches):
            continue
        if name == "l2_bytes":
            values[name] = sum(launch[metric] for launch in launches)
        elif name == "registers":
            values[name] = max(launch[metric] for launch in launches)
        else:
            seconds = [launch.get(TIME, 1.0) for launch in launches]
            values[name] = sum(s * launch[metric] for s, launch in zip(seconds, launches)) / sum(seconds)
    return values


def _value(text: str, unit: str) -> float | None:
    """A metric in SI; None for one that the device does not have ("n/a"), or that could not be computed."""
    bare = text.replace("(!)", "").strip()
    if bare.lower() in ("", "n/a", "nan", "inf", "-nan", "no data"):
        return None
    try:
        return float(bare.replace(",", "")) * UNITS[unit.strip()]
    except (KeyError, ValueError):
        raise UserError(
            f"ncu's value '{text}' in '{unit}' is not known; run it with the options that --ncu prints."
        ) from None
