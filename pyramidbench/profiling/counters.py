"""Hardware counters of kernels: reading the CSV of Nsight Compute, and putting its figures into a profile's rows.

The format, as Nsight Compute wrote it on an H200 and 2024.1 writes it for reports, with --csv: lines of the tool that begin
with "==", perhaps what the program prints, and then a table of quoted values under a header that begins with "ID". A row has
one value of one launch: columns "Metric Name", "Metric Unit" and "Metric Value"; names are labels where a report is printed
that had sections, and rows without a metric are advice. With --page raw each metric is a column, the first row has the units,
and then comes one row per launch. The tool writes numbers as the language settings of its user have them, which
`pyramidbench.profiling.ncu` sets.
"""

from __future__ import annotations

import csv
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pyramidbench.device import Device
from pyramidbench.errors import UserError
from pyramidbench.profiling.rows import KernelRow, short_name, with_counters

TIME = "gpu__time_duration.sum"
BYTES = ("dram__bytes_read.sum", "dram__bytes_write.sum")
SINGLE = {
    "l2_bytes": "lts__t_bytes.sum",
    "sm_share": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "tensor_share": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "registers": "launch__registers_per_thread",
}
METRICS = (TIME, *BYTES, *SINGLE.values())
"""What is read; all are metrics of Ampere, Ada and Hopper by `ncu --query-metrics --chips ga100,ad102,gh100`."""
UNITS = {
    "byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "nsecond": 1e-9,
    "usecond": 1e-6, "msecond": 1e-3, "second": 1.0, "%": 1e-2, "register/thread": 1.0, "": 1.0,
}  # fmt: skip
"""What a value in each unit is in SI; versions up to 2024 spell times out."""
NUMBER = re.compile(r"[-+]?(\d+|\d{1,3}(,\d{3})+)(\.\d+)?([eE][-+]?\d+)?")
LONG = ("Metric Name", "Metric Unit", "Metric Value")
AGAIN = "run it with the options that --ncu prints."
Value = tuple[str, str, str, str, str]
"""ID, kernel, metric, unit and text of a value."""


@dataclass(frozen=True)
class Counters:
    """Counters of all launches of one kernel in one call: seconds and bytes are summed, shares weighted by time."""

    name: str
    launches: int
    values: Mapping[str, float]


def read_counters(text: str) -> tuple[Counters, ...]:
    """The counters in the tool's CSV, kernel by kernel in order of appearance.

    Raises:
        UserError: no such table in the text, none of METRICS in it, or a value of these that is no number in a known unit.
    """
    table = table_in(text)
    if not table:
        errors = [line.removeprefix("==ERROR==").strip() for line in text.splitlines() if line.startswith("==ERROR==")]
        raise UserError(f"no table of counters in ncu's output; it says: {errors[0] if errors else 'nothing'}")
    launches: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for number, kernel, metric, unit, text_value in _values(table):
        value = _number(metric, text_value, unit)
        if value is not None:
            launches[number, kernel][metric] = value
    if not launches:
        raise UserError(f"ncu's table has no value of the metrics that are read, such as {TIME}; {AGAIN}")
    by_kernel: dict[str, list[dict[str, float]]] = defaultdict(list)
    for (_, name), metrics in launches.items():
        by_kernel[name].append(metrics)
    return tuple(Counters(name, len(found), _joined(found)) for name, found in by_kernel.items())


def table_in(text: str) -> list[str]:
    """The quoted lines from the header on; none where the tool wrote no table, or one without a row."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    quoted = [line for line in lines[start:] if line.startswith('"')]
    rows = [line for line in quoted[1:] if line != quoted[0]]
    return [quoted[0], *rows] if rows else []


def joined(kernels: Iterable[KernelRow], counters: Iterable[Counters], device: Device) -> tuple[KernelRow, ...]:
    """The rows of a profile with the counters of their kernels.

    Tools spell template arguments and parameters differently, so kernels go by their names without. One that runs in several
    stages or in several instances keeps its estimates, as it is not known which launch was whose; and so does one that was
    launched another number of times, which is another call.
    """
    rows, known = list(kernels), list(counters)
    ours = Counter(short_name(row.name) for row in rows)
    theirs = Counter(short_name(found.name) for found in known)
    by_name = {short_name(found.name): found for found in known}

    def counted(row: KernelRow) -> KernelRow:
        name = short_name(row.name)
        if ours[name] != 1 or theirs[name] != 1 or by_name[name].launches != row.launches:
            return row
        return with_counters(row, by_name[name].values, device)

    return tuple(counted(row) for row in rows)


def _values(table: Sequence[str]) -> Iterator[Value]:
    """Every value of METRICS in the table, whichever of the two forms it has."""
    rows = csv.DictReader(table)
    names = rows.fieldnames or ()
    metrics = [name for name in METRICS if name in names]
    missing = [name for name in ("Kernel Name", *(() if metrics else LONG)) if name not in names]
    if missing:
        raise UserError(f"ncu's table lacks the column '{missing[0]}'; {AGAIN}")
    units = next(rows) if metrics else {}
    if units.get("ID"):
        raise UserError(f"ncu's table lacks the row of units below its header; {AGAIN}")
    for row in rows:
        launch = row["ID"], row["Kernel Name"] or ""
        if not metrics and row["Metric Name"] in METRICS:
            yield (*launch, row["Metric Name"], row["Metric Unit"] or "", row["Metric Value"] or "")
        for name in metrics:
            yield (*launch, name, units[name] or "", row[name] or "")


def _joined(launches: list[dict[str, float]]) -> dict[str, float]:
    values = {}
    for name, metrics in {"counted_s": (TIME,), "bytes": BYTES, "l2_bytes": (SINGLE["l2_bytes"],)}.items():
        if all(metric in launch for launch in launches for metric in metrics):
            values[name] = sum(launch[metric] for launch in launches for metric in metrics)
    for name, metric in SINGLE.items():
        if name in values or not all(metric in launch for launch in launches):
            continue
        if name == "registers":
            values[name] = max(launch[metric] for launch in launches)
        else:
            seconds = [launch.get(TIME, 1.0) for launch in launches]
            values[name] = sum(s * launch[metric] for s, launch in zip(seconds, launches)) / sum(seconds)
    return values


def _number(metric: str, text: str, unit: str) -> float | None:
    """A metric in SI; None for one that the device does not have ("n/a"), or that could not be computed."""
    bare = text.replace("(!)", "").strip()
    if bare.lower() in ("", "n/a", "nan", "inf", "-nan", "no data"):
        return None
    if unit.strip() not in UNITS or not NUMBER.fullmatch(bare):
        raise UserError(f"ncu's value '{text}' in '{unit}' of {metric} is not known; {AGAIN}")
    return float(bare.replace(",", "")) * UNITS[unit.strip()]
