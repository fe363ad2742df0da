"""A/A test: methods against themselves. Two cells of one method are timed in turns, in 20 groups, and must come out equal.

    python tests/gpu/same_twice.py --device cuda --out OUT

The 20 groups are four methods at five lengths; each is a session of a sweep like any other, with its gate, its worker and its
run folder, and is judged as `pyramidbench compare` judges two methods of a run: paired ratios, a margin of 2 %, adjusted over
the 20. Printed are each group's ratio with its 95 % interval and verdict, how many were called faster or slower (one of 20 may
be), and the median ratio. OUT keeps what a reader needs to check it: manifest.json, pairs.csv and samples.npz (seconds of every
call, `<group>.first` and `<group>.second`, in pairs). The run itself lies in OUT/run, where the same command goes on.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

import numpy as np

from pyramidbench.cell import Cell
from pyramidbench.comparing.matching import Pair
from pyramidbench.comparing.verdicts import Difference, Margins, differences
from pyramidbench.plan import PlannedCell
from pyramidbench.record import Record
from pyramidbench.samples import load_pairs
from pyramidbench.store import Run
from pyramidbench.suite import suite_from_flags
from pyramidbench.sweeping import Silent, make_plan, run_plan


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is measured on one kind of device. dense: the kernel that runs, as two cells that choose might choose two."""

    lengths: tuple[int, ...]
    heads: int
    head_dim: int
    dtype: str
    top_k: int
    dense: str


METHODS = ("dense", "sliding_window", "flat", "pyramid:fast")
SIZES = {
    "cpu": Sizes((512, 768, 1024, 1536, 2048), 1, 64, "float32", 4, "flash"),
    "cuda": Sizes((8192, 12288, 16384, 32768, 49152), 16, 128, "bfloat16", 32, "cudnn"),
}
COLUMNS = ("method", "backend", "seq_len", "calls", "latency_s", "host_s", "ratio", "low", "high", "p", "verdict")


class Loud(Silent):
    """Says how far it is."""

    def __init__(self) -> None:
        self.start = time.perf_counter()

    def finished(self, record: Record) -> None:
        said = f"{time.perf_counter() - self.start:6.1f} s: {record.method} at {record.seq_len}: {record.status}"
        print(f"{said} {record.reason or ''}", file=sys.stderr, flush=True)


def twins(device: str) -> list[tuple[Cell, Cell]]:
    """20 pairs of cells that differ in nothing but in how they are written: a default, or a preset's parameter, spelled out."""
    sizes = SIZES[device]
    pairs = []
    for length, method in product(sizes.lengths, METHODS):
        name, parameters = method, {"top_k": sizes.top_k}
        spelled_out: dict[str, object] = {"forced_in_budget": False}
        if method == "dense":
            name, parameters, spelled_out = f"dense:{sizes.dense}", {}, {"kernel": sizes.dense}
        one = Cell(
            method=name, parameters=parameters, seq_len=length, seq_len_kv=length, heads=sizes.heads,
            kv_heads=sizes.heads, head_dim=sizes.head_dim, head_dim_v=sizes.head_dim, dtype=sizes.dtype,
            input="normal", seed=len(pairs),
        )  # fmt: skip
        pairs.append((one, one.model_copy(update={"parameters": {**parameters, **spelled_out}})))
    return pairs


def measured(device: str, timing_s: float, out: Path) -> Run:
    """The run of all cells, in a folder."""
    suite = suite_from_flags(seq=str(SIZES[device].lengths[0]), method=["dense"], name="same-twice")
    made = make_plan(suite, device=device, timing_s=timing_s)
    cells = tuple(PlannedCell(cell, "run", None, None, None) for pair in twins(device) for cell in pair)
    return run_plan(dataclasses.replace(made, cells=cells), out=out, reporter=Loud())


def judged(run: Run, device: str) -> list[Difference]:
    """The groups of which both cells have times."""
    known = {record.cell: record for record in run.records if record.latency_s is not None}
    cells = [tuple(cell.identity for cell in pair) for pair in twins(device)]
    pairs = [Pair(known[first], known[second]) for first, second in cells if first in known and second in known]

    def raw(pair: Pair) -> tuple[object, object, bool]:
        samples = load_pairs(run.path, pair.a, pair.b)
        assert samples is not None, f"{pair.a.method} at {pair.a.seq_len} was not timed in turns"
        assert pair.a.backend == pair.b.backend, f"{pair.a.backend} and {pair.b.backend} are no twins"
        return *samples, True

    return differences(pairs, raw, Margins())


def rows(found: list[Difference]) -> list[tuple[object, ...]]:
    """The lines of pairs.csv."""
    lines = []
    for difference in found:
        a, change = difference.pair.a, difference.time
        value = change.value
        lines.append(
            (a.method, a.backend, a.seq_len, a.samples, _short(a.latency_s), _short(a.host_s), _short(value.median),
             _short(value.low), _short(value.high), _short(difference.time_p), difference.time_verdict)
        )  # fmt: skip
    return lines


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def keep(run: Run, found: list[Difference], out: Path) -> None:
    """Write manifest.json, pairs.csv and samples.npz."""
    with (out / "pairs.csv").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows(found)])
    samples = {}
    for difference in found:
        a, b = difference.pair.a, difference.pair.b
        first, second = load_pairs(run.path, a, b)
        samples |= {f"{a.method}-{a.seq_len}.first": first, f"{a.method}-{a.seq_len}.second": second}
    np.savez_compressed(out / "samples.npz", **samples)
    told = run.manifest
    about = {
        "kind": "same-twice", "created": told.created, "version": told.version, "timing_s": told.settings["timing_s"],
        "device": run.device.model_dump(),
    }  # fmt: skip
    (out / "manifest.json").write_text(json.dumps(about, indent=1) + "\n")


def summary(found: list[Difference], device: str) -> list[str]:
    values = [difference.time.value for difference in found]
    verdicts = [difference.time_verdict for difference in found]
    widths = [100 * (value.high - value.low) / 2 for value in values]
    lines = [
        f"{d.pair.a.method:15} {d.pair.a.seq_len:6} {v.median:.4f} [{v.low:.4f}, {v.high:.4f}] {d.time_verdict}"
        for d, v in zip(found, values)
    ]
    wrong = verdicts.count("faster") + verdicts.count("slower")
    return [
        *lines,
        f"{len(found)} groups on {device}: {wrong} called faster or slower, {verdicts.count('same')} the same, "
        f"{verdicts.count('unclear')} unclear",
        f"median ratio {np.median([value.median for value in values]):.4f}",
        f"half width of the intervals: median {np.median(widths):.2f} %, largest {max(widths):.2f} %",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=SIZES, default="cuda")
    parser.add_argument("--timing", type=float, default=2.0, help="seconds of calls per cell")
    parser.add_argument("--out", type=Path, help="where the result and its run are kept")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        out = given.out or Path(scratch)
        run = measured(given.device, given.timing, out / "run")
        found = judged(run, given.device)
        if not found:
            sys.exit("no group has times; the reasons are above")
        keep(run, found, out)
    print("\n".join(summary(found, run.device.name)))


if __name__ == "__main__":
    main()
