"""A/A test: every method against itself. Two cells of one method are timed in turns, in 20 groups, and must come out equal.

`python tests/gpu/same_twice.py --device cuda` (or cpu) prints the paired ratio of each group with its 95 % interval, how many
verdicts were "faster" or "slower" (interval clear of 1 and ratio beyond 2 %; at most 1 of 20 may be), and the median ratio.
`--out` keeps the run.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from itertools import product
from pathlib import Path

import numpy as np

from pyramidbench.cell import Cell
from pyramidbench.plan import PlannedCell
from pyramidbench.record import Record
from pyramidbench.stats import Interval, paired_ratio
from pyramidbench.store import Run
from pyramidbench.suite import suite_from_flags
from pyramidbench.sweeping import Silent, make_plan, run_plan

MARGIN = 0.02
METHODS = {"dense": {}, "sliding_window": {}, "flat": {}, "pyramid:fast": {}}
SIZES = {
    "cpu": {"lengths": (512, 768, 1024, 1536, 2048), "heads": 1, "head_dim": 64, "dtype": "float32", "top_k": 4},
    "cuda": {
        "lengths": (4096, 8192, 16384, 32768, 65536),
        "heads": 16,
        "head_dim": 128,
        "dtype": "bfloat16",
        "top_k": 16,
    },
}


class Loud(Silent):
    """Says how far it is."""

    def finished(self, record: Record) -> None:
        print(f"{record.method} at {record.seq_len}: {record.status}", file=sys.stderr)


def twins(device: str) -> list[tuple[Cell, Cell]]:
    """20 pairs of cells that differ in nothing but a default that the second one spells out."""
    sizes = SIZES[device]
    pairs = []
    for length, method in product(sizes["lengths"], METHODS):
        parameters = {} if method == "dense" else {"top_k": sizes["top_k"]}
        one = Cell(
            method=method, parameters=parameters, seq_len=length, seq_len_kv=length, heads=sizes["heads"],
            kv_heads=sizes["heads"], head_dim=sizes["head_dim"], head_dim_v=sizes["head_dim"], dtype=sizes["dtype"],
            input="normal", seed=len(pairs),
        )  # fmt: skip
        spelled_out = {"kernel": "auto"} if method == "dense" else {"forced_in_budget": False}
        pairs.append((one, one.model_copy(update={"parameters": {**parameters, **spelled_out}})))
    return pairs


def ratio_of(run: Run, pair: tuple[Cell, Cell]) -> Interval | None:
    """The first ÷ the second, call by call; None where one of them has no samples."""
    files = [run.path / "samples" / f"{cell.identity}.npy" for cell in pair]
    if not all(file.exists() for file in files):
        return None
    first, second = (np.load(file).tolist() for file in files)
    return paired_ratio(first, second)


def verdict(ratio: Interval) -> str:
    if ratio.low > 1 and ratio.median > 1 + MARGIN:
        return "slower"
    if ratio.high < 1 and ratio.median < 1 - MARGIN:
        return "faster"
    return "same" if ratio.low >= 1 - MARGIN and ratio.high <= 1 + MARGIN else "unclear"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=SIZES, default="cuda")
    parser.add_argument("--timing", type=float, default=2.0, help="seconds of calls per cell")
    parser.add_argument("--out", type=Path, help="where the run is kept")
    given = parser.parse_args()
    pairs = twins(given.device)
    suite = suite_from_flags(seq=str(SIZES[given.device]["lengths"][0]), method=["dense"], name="same-twice")
    made = make_plan(suite, device=given.device, timing_s=given.timing)
    cells = tuple(PlannedCell(cell, "run", None, None, None) for pair in pairs for cell in pair)
    with tempfile.TemporaryDirectory() as scratch:
        out = given.out or Path(scratch) / "run"
        run = run_plan(dataclasses.replace(made, cells=cells), out=out, reporter=Loud())
        ratios = [ratio_of(run, pair) for pair in pairs]
    known = [ratio for ratio in ratios if ratio is not None]
    for (cell, _), ratio in zip(pairs, ratios):
        text = (
            "no samples"
            if ratio is None
            else (f"{ratio.median:.4f} [{ratio.low:.4f}, {ratio.high:.4f}] {verdict(ratio)}")
        )
        print(f"{cell.method:15} {cell.seq_len:6} {text}")
    wrong = sum(verdict(ratio) in ("faster", "slower") for ratio in known)
    print(f"{len(known)} groups on {run.device.name}: {wrong} called faster or slower")
    print(f"median ratio {np.median([ratio.median for ratio in known]):.4f}")
    widths = [100 * (ratio.high - ratio.low) / 2 for ratio in known]
    print(f"half width of the intervals: median {np.median(widths):.2f} %, largest {max(widths):.2f} %")


if __name__ == "__main__":
    main()
