"""Calls every method of a suite on random tensors, in many processes: it fills the caches of compilers, and times nothing.

    python tests/gpu/compile_suite.py methods --heads 9:3 --head-dim 64 [--jobs 8]

A sweep judges its cells one after another, so that what they compile comes one after another too; kernels that lie in Triton's
cache already cost a sweep nothing. Each process takes one method at one tile size, at the lengths and budgets of the suite, and
makes the pass of each cell as a sweep does. "capture" stands for tensors of the given heads at every length. A method that
fails says so; the sweep will name the reason.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from pyramidbench.axes import parse_heads
from pyramidbench.capture_file import CaptureMetadata, InputDescription
from pyramidbench.cell import Cell
from pyramidbench.device import pick_device, synchronize
from pyramidbench.errors import UserError
from pyramidbench.passes import Training
from pyramidbench.problem import DTYPES
from pyramidbench.suite import load_suite
from pyramidbench.timing import timed_call

LONGEST = 1 << 40


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("suite")
    parser.add_argument("--heads", default="9:3")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--device", default="auto")
    asked = parser.parse_args()
    start, device = time.perf_counter(), pick_device(asked.device).type
    suite = load_suite(asked.suite)
    try:
        cells = suite.cells()
    except UserError:  # it asks for a capture
        cells = suite.cells(lambda _: described(asked.heads, asked.head_dim), capture="any.safetensors")
    groups = grouped(cells)
    with multiprocessing.get_context("spawn").Pool(asked.jobs) as pool:
        for said in pool.imap_unordered(compile_cells, [(cells, device) for cells in groups]):
            print(f"{time.perf_counter() - start:4.0f} s  {said}", flush=True)


def described(heads: str, head_dim: int) -> InputDescription:
    """A capture of these sizes, of any length, which no file holds."""
    query_heads, kv_heads = parse_heads(heads)
    sizes = {"heads": query_heads, "kv_heads": kv_heads, "head_dim": head_dim, "head_dim_v": head_dim}
    metadata = CaptureMetadata(
        model="none", model_sha256=None, text="none", text_sha256="", tokens=LONGEST, layers=(0,), rope_theta=None,
        scale=head_dim**-0.5, created_by="compile_suite.py", **sizes,
    )  # fmt: skip
    return InputDescription(
        path=Path("none"), batch=1, seq_len=LONGEST, layers=(0,), scale=head_dim**-0.5, dtype="bfloat16",
        metadata=metadata, **sizes,
    )  # fmt: skip


def grouped(cells: Sequence[Cell]) -> list[list[Cell]]:
    """The cells of one method at one tile size together, since their kernels are the same ones; the largest group first."""
    groups: dict[tuple[str, object], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.method, cell.parameters.get("query_tile")), []).append(cell)
    return sorted(groups.values(), key=len, reverse=True)


def compile_cells(work: tuple[Sequence[Cell], str]) -> str:
    """Call each cell's method; what came of it, in a line."""
    cells, device = work
    name = f"{cells[0].method}, tile {cells[0].parameters.get('query_tile')}"
    start = time.perf_counter()
    try:
        called = sum(1 for _ in calls(cells, device))
    except Exception as error:  # whatever it is, the sweep meets it again, and says it in the cell's row
        return f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"
    return f"{name}: {called} of {len(cells)} cells called in {time.perf_counter() - start:.0f} s"


def calls(cells: Sequence[Cell], device: str) -> Iterator[Cell]:
    """Make the calls that can run here."""
    for cell in cells:
        method, problem = cell.make_method(), cell.problem(device)
        if method.unavailable() or method.unsupported(problem):
            continue
        shapes = ((cell.heads, cell.seq_len), (cell.kv_heads, cell.seq_len_kv), (cell.kv_heads, cell.seq_len_kv))
        q, k, v = (
            torch.randn(cell.batch, heads, length, cell.head_dim, device=device, dtype=DTYPES[cell.dtype])
            for heads, length in shapes
        )
        with torch.no_grad():
            # The gate chooses and attends apart, which in a step of decoding are other launches than those of a whole one.
            method.attend(q, k, v, method.select(q, k, problem), problem)
            training = Training.of(method, q, k, v, problem) if problem.needs_gradients else None
            timed_call(method, (q, k, v), problem, training)()
        synchronize(torch.device(device))
        yield cell
        # Others share this device: no memory is kept that the next cell does not need.
        del method, q, k, v, training
        if device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
