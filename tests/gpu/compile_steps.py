"""Compiles what the decoding steps of a suite launch, each kernel once, in many processes: no tensor is made, no kernel run.

    python tests/gpu/compile_steps.py decode [--left RUN] [--jobs 16]

A sweep meets one shape after another and compiles each for a second or more, and steps have many: a cache's capacity sets how
many nodes a program ranks. Here every cell's append and step are made on tensors without data, which tells what they would
launch on this device, and what is new goes to Triton's cache. `--left` leaves out cells that a run folder holds already.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from pyramidbench.cell import Cell
from pyramidbench.decoder import CacheLayout
from pyramidbench.kernels.decoder import BlockDecoder
from pyramidbench.problem import DTYPES
from pyramidbench.registry import create
from pyramidbench.store import load_run
from pyramidbench.suite import load_suite

GPU = torch.device("cuda")
SPECIAL = 16
"""Triton compiles again where an integer is 1, or is a multiple of this and was none."""


@dataclass(frozen=True)
class Launch:
    """One launch: a kernel, its positional arguments, and its constants with the compiler's options."""

    kernel: Any
    arguments: tuple[Any, ...]
    constants: dict[str, Any]

    @property
    def shape(self) -> tuple[object, ...]:
        """What makes it another binary."""
        general = set(self.kernel.do_not_specialize or ())
        named = zip(self.kernel.arg_names, self.arguments)
        kinds = tuple(kind(x, name not in general) for name, x in named)
        return self.kernel.fn.__module__, self.kernel.fn.__name__, tuple(sorted(self.constants.items(), key=str)), kinds


def kind(argument: Any, special: bool = True) -> object:
    """What a compiler sees of an argument."""
    if isinstance(argument, torch.Tensor):
        return str(argument.dtype)
    if isinstance(argument, tuple):
        return tuple(kind(x, special) for x in argument)
    if type(argument) is int:
        return "int", special and argument == 1, special and argument % SPECIAL == 0
    return type(argument).__name__


def launches(cell: Cell) -> list[Launch]:
    """What filling a cell's cache, and a step on it, would launch; nothing where its method has no kernels for a step."""
    method, problem = create(cell.method, cell.parameters), cell.problem("cuda")
    meta, found = torch.device("meta"), list[Launch]()
    if method.unavailable() or method.unsupported(problem):
        return found
    cache = method.decoder(problem, CacheLayout(meta))
    if not isinstance(cache, BlockDecoder) or cache.backend != "triton":
        return found
    with noting(found):
        from pyramidbench.kernels import decode_append
        from pyramidbench.kernels.decode_step import step

        store, made = cache.store, {"dtype": DTYPES[cell.dtype], "device": meta}
        q = torch.empty(cell.batch, cell.heads, cell.seq_len, cell.head_dim, **made)
        k = torch.empty(cell.batch, cell.kv_heads, cell.seq_len_kv, cell.head_dim, **made)
        v = torch.empty(cell.batch, cell.kv_heads, cell.seq_len_kv, cell.head_dim_v, **made)
        old = cell.seq_len_kv - cell.seq_len
        if old:
            decode_append.append(store, k[:, :, :old], v[:, :, :old], None, None)
        decode_append.append(store, k[:, :, old:], v[:, :, old:], old, None)
        step(q, store, cache.rules, problem.scale)
    return found


@contextmanager
def noting(found: list[Launch]) -> Iterator[None]:
    """Launches are noted in place of made, with the sizes that the GPU at hand would have."""
    from triton.runtime.jit import KernelInterface

    from pyramidbench.kernels import decode_append, decode_attend, decode_call
    from pyramidbench.kernels.decode_attend import split_sizes
    from pyramidbench.kernels.decode_launch import overlap

    def noted(kernel: Any, grid: Any) -> Callable[..., None]:  # noqa: ARG001 - how a launch is written
        return lambda *arguments, **constants: found.append(Launch(kernel, arguments, constants))

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(KernelInterface, "__getitem__", noted))
        for module in (decode_append, decode_call):
            stack.enter_context(mock.patch.object(module, "overlap", lambda _, items: overlap(GPU, items)))
        stack.enter_context(
            mock.patch.object(decode_attend, "split_sizes", lambda width, items, _: split_sizes(width, items, GPU))
        )
        yield


def distinct(cells: Sequence[Cell]) -> list[tuple[Cell, int]]:
    """Every binary once: a cell that launches it, and which of that cell's launches it is."""
    seen: dict[tuple[object, ...], tuple[Cell, int]] = {}
    for cell in cells:
        for index, launch in enumerate(launches(cell)):
            seen.setdefault(launch.shape, (cell, index))
    return list(seen.values())


def compile_one(work: tuple[Cell, int]) -> str:
    """Compile a launch into Triton's cache; what it was, in a line."""
    cell, index = work
    launch, start = launches(cell)[index], time.perf_counter()
    launch.kernel.warmup(*launch.arguments, grid=(1,), **launch.constants)
    name = f"{launch.kernel.fn.__name__} of {cell.method}, batch {cell.batch}, {cell.seq_len_kv} tokens"
    return f"{name}: {time.perf_counter() - start:.1f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("suite")
    parser.add_argument("--left", help="a run folder: only cells that it does not hold yet")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    start = time.perf_counter()
    done = load_run(asked.left).done if asked.left else set()
    cells = [c for c in load_suite(asked.suite).cells() if c.direction == "decode" and c.identity not in done]
    wanted = distinct(cells)
    print(f"{len(wanted)} binaries of {len(cells)} cells", flush=True)
    with multiprocessing.get_context("spawn").Pool(asked.jobs) as pool:
        for said in pool.imap_unordered(compile_one, wanted):
            print(f"{time.perf_counter() - start:4.0f} s  {said}", flush=True)


if __name__ == "__main__":
    main()
