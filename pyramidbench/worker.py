"""The worker: a process that measures cells one after another, so that a fault kills it and not the sweep."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import TimeoutError as LimitReached
from contextlib import contextmanager

import torch
from pebble import ProcessExpired, ProcessPool

from pyramidbench.allocator import keep_freed_memory
from pyramidbench.cell import Cell
from pyramidbench.record import Record
from pyramidbench.runner import Loaded, Settings, failed, run_cell

GRACE_S = 60.0
"""Seconds on top of a cell's predicted time before its worker is stopped: a first cell also imports and compiles."""


class Worker:
    """Runs cells in one child process, restarted after any that died. Tensors stay loaded between cells of a group."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.pool = self._start()

    def _start(self) -> ProcessPool:
        # Threads that wait spin for some microseconds, then sleep. Endless spinning, the default, slows calls up to
        # tenfold on a busy machine; sleeping at once slows chunked calls by a third on an idle one (docs/performance.md).
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
        context = multiprocessing.get_context("spawn")
        return ProcessPool(max_workers=1, context=context, initializer=_prepare, initargs=[torch.get_num_threads()])

    def run(self, cell: Cell, limit_s: float) -> Record:
        """The cell's record, whatever happens to the process that measures it."""
        future = self.pool.schedule(_run, args=[cell, self.settings], timeout=limit_s + GRACE_S)
        try:
            record: Record = future.result()
        except LimitReached:
            reason = f"no result after {limit_s + GRACE_S:.0f} s, much longer than predicted; try a shorter cell"
            return failed(cell, self.settings, "timeout", reason)
        except ProcessExpired as expired:
            self._renew()
            cause = (
                "was killed, most likely for memory"
                if expired.exitcode == -9
                else f"died with exit code {expired.exitcode}"
            )
            return failed(cell, self.settings, "oom" if expired.exitcode == -9 else "crashed", f"the worker {cause}")
        if record.status in ("cuda_error", "oom"):
            self._renew()
        return record

    def _renew(self) -> None:
        """A fresh process: after a fault the old one's device state cannot be trusted."""
        self.stop()
        self.pool = self._start()

    def stop(self) -> None:
        """End the process at once."""
        self.pool.stop()
        self.pool.join()


@contextmanager
def working(settings: Settings) -> Iterator[Worker]:
    """A worker that is stopped at the end, whatever happens."""
    worker = Worker(settings)
    try:
        yield worker
    finally:
        worker.stop()


_loaded: dict[str, Loaded] = {}


def _prepare(threads: int) -> None:
    torch.set_num_threads(threads)
    keep_freed_memory()


def _load(cell: Cell, device: torch.device) -> Loaded:
    """The cell's tensors; those of the group before are dropped first."""
    if cell.group not in _loaded:
        _loaded.clear()
        _loaded[cell.group] = Loaded.of(cell, device)
    return _loaded[cell.group]


def _run(cell: Cell, settings: Settings) -> Record:
    device = torch.device(settings.device)
    return run_cell(cell, lambda wanted: _load(wanted, device), settings)
