"""The worker: a process that measures cells one after another, so that a fault kills it and not the sweep."""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import TimeoutError as LimitReached
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from pebble import ProcessExpired, ProcessPool

from pyramidbench.allocator import keep_freed_memory
from pyramidbench.cell import Cell
from pyramidbench.outcome import Lost, Settings, failed, write_log
from pyramidbench.record import Record, Status
from pyramidbench.runner import Runner
from pyramidbench.timing import Timing

GRACE_S = 60.0
"""Seconds on top of what a task is predicted to take before its worker is stopped: a first cell also imports and compiles."""
LOG_BYTES = 1 << 20
"""Of what a worker wrote, the end that is kept."""
_VMSTAT = Path("/proc/vmstat")
_PR_SET_PDEATHSIG = 1


class Worker:
    """Runs tasks in one child process, restarted after any that died. Tensors stay loaded between cells of a group.

    What the process writes, and where it stands when it hangs or crashes, goes to the log of the cell that was at work.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.notes = Notes(Path(tempfile.mkdtemp(prefix="pyramidbench-")))
        self.pool = self._start()

    def _start(self) -> ProcessPool:
        # Threads that wait spin for some microseconds, then sleep. Endless spinning, the default, slows calls up to
        # tenfold on a busy machine; sleeping at once slows chunked calls by a third on an idle one (docs/performance.md).
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
        context = multiprocessing.get_context("spawn")
        given = [self.settings, self.notes, torch.get_num_threads(), os.getpid()]
        return ProcessPool(max_workers=1, context=context, initializer=_prepare, initargs=given)

    def judge(self, cell: Cell, limit_s: float) -> Record:
        """Gate and quality of a cell, whatever happens to the process."""
        return self._recorded(cell, self._run(_judge, [cell], limit_s))

    def verify(self, cell: Cell, limit_s: float) -> Record:
        """Whether a cell's method is right, whatever happens to the process."""
        return self._recorded(cell, self._run(_verify, [cell], limit_s))

    def time(self, cells: Sequence[Cell], limit_s: float, *, one_by_one: bool = False) -> list[Timing] | Lost:
        """Times of cells of one group in turns, or which cell ended it."""
        result: list[Timing] | Lost = self._run(_time, [list(cells), one_by_one], limit_s)
        if isinstance(result, Lost):
            self._keep_log(result.cell or cells[0].identity)
            self._renew_after(result.status)
        return result

    def finish(self, cell: Cell, judged: Record, timing: Timing, limit_s: float) -> Record:
        """The record of a cell that has been timed, whatever happens to the process."""
        return self._recorded(cell, self._run(_finish, [cell, judged, timing], limit_s))

    def _recorded(self, cell: Cell, result: Record | Lost) -> Record:
        if isinstance(result, Lost):
            result = failed(cell, self.settings, result.status, result.reason)
        self._keep_log(cell.identity)
        self._renew_after(result.status)
        return result

    def _run(self, task: Any, arguments: list[Any], limit_s: float) -> Any:
        """What the task returns, or a Lost where its process died or was stopped."""
        limit_s += GRACE_S
        killed_before = _killed_for_memory()
        future = self.pool.schedule(task, args=[limit_s, *arguments], timeout=limit_s)
        try:
            return future.result()
        except LimitReached:
            reason = f"no result after {limit_s:.0f} s, much longer than predicted; try a shorter cell"
            return Lost(self.notes.at_work(), "timeout", reason)
        except ProcessExpired as expired:
            at_work = self.notes.at_work()
            self._renew()
            return Lost(at_work, *_cause_of_death(expired.exitcode, killed_before))

    def _keep_log(self, identity: str) -> None:
        """What the process has written since the last time becomes part of a cell's log."""
        if text := self.notes.take_log():
            write_log(self.settings.folder, identity, text)

    def _renew_after(self, status: Status) -> None:
        if status in ("cuda_error", "oom"):
            self._renew()

    def _renew(self) -> None:
        """A fresh process: after a fault the old one's device state cannot be trusted."""
        self.pool.stop()
        self.pool.join()
        self.pool = self._start()

    def stop(self) -> None:
        """End the process at once."""
        self.pool.stop()
        self.pool.join()
        self.notes.remove()


@contextmanager
def working(settings: Settings) -> Iterator[Worker]:
    """A worker that is stopped at the end, whatever happens."""
    worker = Worker(settings)
    try:
        yield worker
    finally:
        worker.stop()


class Notes:
    """Files by which a process that may die at any moment says which cell is at work, and what it has to say."""

    def __init__(self, folder: Path) -> None:
        self.current = folder / "at-work"
        self.log = folder / "log"
        self.current.touch()
        self.log.touch()

    def at_work(self) -> str | None:
        """The cell that was announced last."""
        return self.current.read_text() or None

    def take_log(self) -> str:
        """The end of what was written, which is forgotten here."""
        text = self.log.read_bytes()[-LOG_BYTES:].decode(errors="replace")
        os.truncate(self.log, 0)
        return text

    def remove(self) -> None:
        self.current.unlink()
        self.log.unlink()
        self.log.parent.rmdir()


def _killed_for_memory() -> int | None:
    """How many processes Linux has killed for want of memory since it started; None where it does not tell."""
    if not _VMSTAT.exists():
        return None
    counts = (line.split() for line in _VMSTAT.read_text().splitlines())
    return next((int(count) for name, count in counts if name == "oom_kill"), None)


def _cause_of_death(exitcode: int, killed_before: int | None) -> tuple[Status, str]:
    """Status and reason of a worker that died: killed for memory, by somebody, by its own fault, or ended."""
    if exitcode >= 0:
        return "crashed", f"the worker died with exit code {exitcode}"
    name = signal.Signals(-exitcode).name
    if exitcode != -signal.SIGKILL:
        return "crashed", f"the worker died of {name}; its log says where"
    killed = _killed_for_memory()
    if killed is None or killed_before is None:
        return "oom", f"the worker was killed ({name}), most likely for memory"
    if killed > killed_before:
        return "oom", f"the worker was killed ({name}) by the system, for want of memory"
    return "crashed", f"the worker was killed ({name}), and not for want of memory"


_runner: Runner


def _prepare(settings: Settings, notes: Notes, threads: int, parent: int) -> None:
    """Make this process a worker: it dies with its parent, holds to so many threads, and writes to the notes."""
    global _runner
    _die_with(parent)
    torch.set_num_threads(threads)
    keep_freed_memory()
    log = os.open(notes.log, os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable(2)
    current = os.open(notes.current, os.O_WRONLY)
    _runner = Runner(settings, lambda identity: (os.pwrite(current, identity.encode(), 0), None)[1])


def _die_with(parent: int) -> None:
    """Linux: be killed when the parent dies, so that a killed sweep leaves no process that goes on computing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


@contextmanager
def _limited(limit_s: float) -> Iterator[None]:
    """Where the process stands shortly before its time is over goes to the log."""
    faulthandler.dump_traceback_later(max(0.5, limit_s - 1.0), file=2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        sys.stdout.flush()


def _judge(limit_s: float, cell: Cell) -> Record:
    with _limited(limit_s):
        return _runner.judge(cell)


def _verify(limit_s: float, cell: Cell) -> Record:
    with _limited(limit_s):
        return _runner.verify(cell)


def _time(limit_s: float, cells: list[Cell], one_by_one: bool) -> list[Timing] | Lost:
    with _limited(limit_s):
        return _runner.time(cells, one_by_one=one_by_one)


def _finish(limit_s: float, cell: Cell, judged: Record, timing: Timing) -> Record:
    with _limited(limit_s):
        return _runner.finish(cell, judged, timing)
