"""The runner: cells in one process, from method to record. The only place that catches everything.

Cells of one group share their tensors and are timed in turns, so a cell comes here three times: to be judged, to be timed
beside the others, and to be finished. One that is only verified comes once.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from pyramidbench.cell import Cell
from pyramidbench.clock import Call
from pyramidbench.decoding import hold, release
from pyramidbench.device import release_cached
from pyramidbench.errors import UserError
from pyramidbench.fastest import Choice
from pyramidbench.finishing import finish
from pyramidbench.gate import GateFailure
from pyramidbench.judging import Loaded, judge, seconds_of, verify
from pyramidbench.method import Method
from pyramidbench.outcome import Lost, Settings, classify, describe, failed, write_log
from pyramidbench.passes import Training
from pyramidbench.record import MEASURED, Record
from pyramidbench.timing import Timing, measure_in_turns, timed_call


class Runner:
    """Measures cells in this process, holding the tensors of one group. `announce(identity)` says which cell is at work."""

    def __init__(self, settings: Settings, announce: Callable[[str], None] = lambda _: None) -> None:
        self.settings = settings
        self.announce = announce
        self.device = torch.device(settings.device)
        self.group = self.tensors = ""
        self.loaded: Loaded | None = None
        self.compiled: dict[str, Method] = {}

    def judge(self, cell: Cell) -> Record:
        """Gate and quality of one cell: its record, without times where it is to be timed."""
        return self._recorded(cell, lambda: self._judge(cell))

    def time(self, cells: Sequence[Cell], *, one_by_one: bool = False) -> list[Timing] | Lost:
        """Times of cells of one group, in turns, once every one of them is compiled."""
        at_work = cells[0].identity

        def announce(index: int) -> None:
            nonlocal at_work
            at_work = cells[index].identity
            self.announce(at_work)

        try:
            calls = []
            for index, cell in enumerate(cells):
                announce(index)
                calls.append(self._call(cell))
            self._load(cells[0]).exact.clear()
            _set_garbage_aside()
            settings = self.settings
            with torch.no_grad():
                return measure_in_turns(
                    calls, self.device, settings.cache, settings.timing_s, announce, one_by_one=one_by_one
                )
        except (Exception, SystemExit) as error:
            write_log(self.settings.folder, at_work, traceback.format_exc())
            status, reason = classify(error)
            # A fault of a GPU shows late: another call than the one at fault may have been announced since.
            known = status != "cuda_error" or one_by_one
            return Lost(at_work if known else None, status, reason)
        finally:
            for method in self.compiled.values():
                release(method)

    def finish(self, cell: Cell, judged: Record, timing: Timing) -> Record:
        """The record of a cell that has been timed: stages, memory, rates, and the gate on another seed."""

        def whole() -> Record:
            loaded, method = self._load(cell), self._method(cell)
            with released(method):
                return finish(method, loaded, judged, timing, self.settings)

        return self._recorded(cell, whole)

    def verify(self, cell: Cell) -> Record:
        """Whether a cell's method is right: the gate on two sets of tensors, and nothing else."""
        return self._recorded(cell, lambda: self._verify(cell))

    def measure(self, cell: Cell) -> Record:
        """One cell from beginning to end, timed alone."""
        judged = self.judge(cell)
        if not is_ready(cell, judged):
            return judged
        timings = self.time([cell])
        if isinstance(timings, Lost):
            return failed(cell, self.settings, timings.status, timings.reason)
        return self.finish(cell, judged, timings[0])

    def _recorded(self, cell: Cell, measure: Callable[[], Record]) -> Record:
        """What `measure` returns; every failure is a record with its reason, and its traceback goes to logs/."""
        self.announce(cell.identity)
        try:
            return measure()
        except GateFailure as failure:
            return failed(cell, self.settings, "incorrect", str(failure))
        except UserError as error:
            return failed(cell, self.settings, "unsupported", str(error))
        except (Exception, SystemExit) as error:
            write_log(self.settings.folder, cell.identity, traceback.format_exc())
            status, reason = classify(error)
            return failed(cell, self.settings, status, reason)

    def _judge(self, cell: Cell) -> Record:
        start = time.perf_counter()
        method = cell.make_method()
        if (reason := self._refusal(method, cell)) is not None:
            return failed(cell, self.settings, "unsupported", reason)
        imported_s = time.perf_counter() - start
        release_cached(self.device)
        loaded = self._load(cell)
        choice = loaded.choose(method) if cell.timed else Choice(method)
        with released(choice.method):
            columns = describe(cell, self.settings) | judge(cell, choice.method, loaded, self.settings)
        columns["reason"] = choice.note
        if cell.timed:
            columns["setup_s"] += imported_s
            self.compiled[cell.identity] = choice.method
        return Record(status="ok", **columns)

    def _verify(self, cell: Cell) -> Record:
        method = cell.make_method()
        if (reason := self._refusal(method, cell)) is not None:
            return failed(cell, self.settings, "unsupported", reason)
        release_cached(self.device)
        loaded = self._load(cell)
        with released(method):
            columns = describe(cell, self.settings) | verify(method, loaded)
        return Record(status="ok", **columns)

    def _refusal(self, method: Method, cell: Cell) -> str | None:
        """Why the method cannot do the cell here, in its own words."""
        return method.unavailable() or method.unsupported(cell.problem(self.settings.device))

    def _load(self, cell: Cell) -> Loaded:
        """The cell's tensors; those of the group before, unless they are the same in another pass, and what was compiled for it
        are dropped first."""
        if self.loaded is None or cell.group != self.group:
            kept = self.loaded.tensors if self.loaded is not None and cell.tensors == self.tensors else None
            self.loaded, self.compiled = None, {}
            self.loaded = Loaded.of(cell, self.device, kept)
            self.group, self.tensors = cell.group, cell.tensors
        return self.loaded

    def _method(self, cell: Cell) -> Method:
        """The method that runs for a cell: the one that was judged here, or the fastest of its alternatives, found anew."""
        if cell.identity not in self.compiled:
            self.compiled[cell.identity] = self._load(cell).choose(cell.make_method()).method
        return self.compiled[cell.identity]

    def _call(self, cell: Cell) -> Call:
        """What is timed of a cell, compiled: where this process has not judged it, it is called once before."""
        loaded = self._load(cell)
        is_compiled = cell.identity in self.compiled
        method = self._method(cell)
        release_cached(self.device)
        training = Training.of(method, *loaded.tensors, loaded.problem) if loaded.problem.needs_gradients else None
        call = timed_call(method, loaded.tensors, loaded.problem, training)
        hold(method, loaded.k, loaded.v, loaded.problem)
        if not is_compiled:
            seconds_of(call, self.device)
        return call


@contextmanager
def released(method: Method) -> Iterator[None]:
    """What a method holds between its calls is given up at the end, whatever happens."""
    try:
        yield
    finally:
        release(method)


def _set_garbage_aside() -> None:
    """Collect garbage, and leave all that lives now out of later collections: among the objects of torch one takes 0.1 s, and
    the memory pass of every cell begins with one."""
    gc.collect()
    gc.freeze()


def is_ready(cell: Cell, judged: Record) -> bool:
    """Whether a cell passed the gate and is to be timed."""
    return cell.timed and judged.status in MEASURED
