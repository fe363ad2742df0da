"""The plan: what each cell will cost before anything runs, and which cells cannot or should not run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

from pyramidbench.capture_file import InputDescription
from pyramidbench.cell import Cell
from pyramidbench.cost import Cost
from pyramidbench.decoding import held_bytes
from pyramidbench.errors import UserError
from pyramidbench.expand import DescribeInput
from pyramidbench.fastest import TIMING_S
from pyramidbench.inputs import describe_input
from pyramidbench.method import Kind
from pyramidbench.passes import pass_cost
from pyramidbench.record import MEASURED, Record
from pyramidbench.sampling import FEWEST_SAMPLES
from pyramidbench.units import duration, gibibytes, one_line

Verdict = Literal["run", "skipped", "unsupported"]

# First guesses; `Estimator.observe` corrects them as cells finish.
FLOP_EFFICIENCY: dict[Kind, float] = {"dense": 0.6, "selection": 0.1, "bound": 0.1}
"""Share of the measured peak of a matrix product that a call reaches, by the kind of method. On two CPU cores shared with
other work, 2k to 32k tokens: dense 0.4 to 1, the torch reference of block methods 0.05 to 0.18."""
CACHE_REUSE = 4.0
"""A stage's bytes count every read; so many of them are served for each one that memory serves."""
CALL_S = {"cpu": 1e-3, "cuda": 1e-4}
"""Fixed time of a call: launches and small tensors."""
CHECKS_S = {True: 1.0, False: 0.5}
"""Gate and quality, by whether the cell is timed: work that is sampled, so it hardly grows with length."""

CHECKED_CALLS = {True: 2, False: 1}
"""Calls that the gate makes, by whether the cell is timed: only a timed one is checked for look-ahead."""
TIMED_CALLS = 4
"""Further calls of a timed cell outside the clock: its stages (more often where calls are short), memory, the choice once more
for its rates or the host's time, the gate again."""
GRADIENT_CALLS = 5
"""Calls that the gate makes besides, where the pass has gradients."""
CHECKED_COPIES = 3
"""Copies of a decoding step's tensors, which are nearly all that it needs, that the gate holds beside them on its other seed:
new ones, in fp32 while they are drawn, those that a change is found by, and the values without their signs."""
CHOOSING_CALLS = 5
"""Calls of each alternative, at least: one for the gate, one to learn how long it takes, three samples."""
CLOCK_CALLS = 1 + FEWEST_SAMPLES
"""Calls under the clock at least: one to learn how long it takes, and the samples."""


@dataclass(frozen=True)
class Rates:
    """Peaks that were measured on the device: operations and bytes per second."""

    flops_per_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class PlannedCell:
    """A cell with its verdict. `seconds` (the whole cell) and `memory_bytes` are None where nothing can be predicted."""

    cell: Cell
    verdict: Verdict
    reason: str | None
    seconds: float | None
    memory_bytes: float | None

    @property
    def runs(self) -> bool:
        return self.verdict == "run"


@dataclass
class Observed:
    """A running mean; before the first observation it is the prior."""

    prior: float
    total: float = 0.0
    count: int = 0

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else self.prior

    def add(self, value: float) -> None:
        self.total += value
        self.count += 1


@dataclass
class Estimator:
    """Predicts how long cells take, and learns from those that have finished.

    A call takes, over the stages of the method's cost, the larger of operations ÷ reachable rate and bytes ÷ reachable
    bandwidth, times the geometric mean of observed ÷ predicted for that method (for all methods, until one is seen).
    `timing_s` is the time that the clock spends on a cell of short calls.
    """

    rates: Rates
    device_kind: str
    timing_s: float
    all_ratios: Observed = field(default_factory=lambda: Observed(0.0))
    ratios: dict[str, Observed] = field(default_factory=dict)
    checks: dict[bool, Observed] = field(default_factory=lambda: {key: Observed(s) for key, s in CHECKS_S.items()})
    costs: dict[str, Cost] = field(default_factory=dict)
    alternatives: dict[str, int] = field(default_factory=dict)

    def predict(self, cell: Cell) -> float:
        """Seconds that the whole cell takes: its calls, the gate and quality, and the choice among alternatives."""
        call_s = self.call_seconds(cell)
        return self._calls_s(cell, call_s) + self.checks[cell.timed].mean + self._choosing_s(cell, call_s)

    def call_seconds(self, cell: Cell) -> float:
        """Seconds of one call of the cell's method."""
        ratio = self.ratios.get(_learnt_as(cell), self.all_ratios)
        return self._raw_call(cell) * math.exp(ratio.mean)

    def observe(self, cell: Cell, record: Record, took_s: float | None = None) -> None:
        """Learn from a finished cell: from its latency, and from the wall time of the whole cell where it is known."""
        if record.status not in MEASURED:
            return
        if record.latency_s:
            ratio = math.log(record.latency_s / self._raw_call(cell))
            self.ratios.setdefault(_learnt_as(cell), Observed(0.0)).add(ratio)
            self.all_ratios.add(ratio)
        if took_s is not None:
            call = record.latency_s or self.call_seconds(cell)
            self.checks[cell.timed].add(max(0.0, took_s - self._calls_s(cell, call)))

    def cost(self, cell: Cell) -> Cost:
        """The cost of the cell's method, counted once: at token level and long lengths it takes a while."""
        if cell.identity not in self.costs:
            self.costs[cell.identity] = pass_cost(cell.make_method(), cell.problem(self.device_kind))
        return self.costs[cell.identity]

    def rivals(self, cell: Cell) -> int:
        """How many alternatives of the cell's method are timed before the cell; 0 where there is no choice. Looked up once:
        it asks which packages are installed."""
        if cell.identity not in self.alternatives:
            found = cell.make_method().alternatives(cell.problem(self.device_kind)) if cell.timed else ()
            self.alternatives[cell.identity] = len(found) if len(found) > 1 else 0
        return self.alternatives[cell.identity]

    def total(self, cells: Iterable[Cell]) -> float:
        """Seconds that these cells take one after another."""
        return sum(self.predict(cell) for cell in cells)

    def _calls_s(self, cell: Cell, call_s: float) -> float:
        if not cell.timed:
            return CHECKED_CALLS[False] * call_s
        return _unclocked_calls(cell) * call_s + max(self.timing_s, CLOCK_CALLS * call_s)

    def _choosing_s(self, cell: Cell, call_s: float) -> float:
        """Seconds that it takes to find the fastest of the method's alternatives, of which the slowest may take longer."""
        return self.rivals(cell) * (TIMING_S + CHOOSING_CALLS * call_s)

    def _raw_call(self, cell: Cell) -> float:
        """Seconds of one call before any correction."""
        flops_per_s = FLOP_EFFICIENCY[cell.make_method().kind] * self.rates.flops_per_s
        bytes_per_s = CACHE_REUSE * self.rates.bytes_per_s
        stages = self.cost(cell).stages
        spent = sum(max(stage.flops / flops_per_s, stage.bytes / bytes_per_s) for stage in stages)
        return spent + CALL_S[self.device_kind]


def plan(
    cells: Sequence[Cell],
    estimator: Estimator,
    *,
    budget_s: float,
    memory_bytes: float,
    describe: DescribeInput = describe_input,
) -> list[PlannedCell]:
    """A verdict for each cell, in order; what does not run carries its reason, with the estimate.

    `budget_s` limits each cell's predicted seconds and `memory_bytes` its tensors and workspace. `describe` gives the
    description of a capture, and None for a synthetic input.
    """
    describe_once = cache(describe)
    return [judge(cell, estimator, budget_s, memory_bytes, describe_once) for cell in cells]


def judge(
    cell: Cell, estimator: Estimator, budget_s: float, memory_bytes: float, describe: DescribeInput = describe_input
) -> PlannedCell:
    """The verdict on one cell, by what the estimator knows now."""
    try:
        return _judge(cell, estimator, budget_s, memory_bytes, describe)
    except UserError:
        raise
    except Exception as error:  # a user's own method may raise anything, and the others go on
        reason = f"{cell.method} cannot be planned: {one_line(f'{type(error).__name__}: {error}')}"
        return PlannedCell(cell, "unsupported", reason, None, None)


def _judge(
    cell: Cell, estimator: Estimator, budget_s: float, memory_bytes: float, describe: DescribeInput
) -> PlannedCell:
    method, problem = cell.make_method(), cell.problem(estimator.device_kind)
    reason = method.unavailable() or method.unsupported(problem) or _input_limit(cell, describe(cell.input))
    if reason is not None:
        return PlannedCell(cell, "unsupported", reason, None, None)
    seconds, needed = estimator.predict(cell), problem.io_bytes + estimator.cost(cell).workspace_bytes
    needed += problem.output_bytes * problem.needs_gradients
    if problem.direction == "decode":
        needed += held_bytes(method, problem) + CHECKED_COPIES * problem.io_bytes
    if needed > memory_bytes:
        reason = (
            f"predicted {gibibytes(needed)} of memory exceeds the {gibibytes(memory_bytes)} that are free; "
            "use a shorter --seq, or fewer --heads or --batch"
        )
    elif seconds > budget_s:
        calls = _unclocked_calls(cell) + CLOCK_CALLS if cell.timed else CHECKED_CALLS[False]
        calls += CHOOSING_CALLS * estimator.rivals(cell)
        reason = (
            f"predicted {duration(seconds)} for {calls} calls exceeds the cell budget of {duration(budget_s)}; "
            "raise --cell-budget"
        )
    return PlannedCell(cell, "skipped" if reason else "run", reason, seconds, needed)


def _unclocked_calls(cell: Cell) -> int:
    """Calls of a timed cell that the clock does not see."""
    return CHECKED_CALLS[True] + TIMED_CALLS + GRADIENT_CALLS * (cell.direction != "forward")


def _learnt_as(cell: Cell) -> str:
    """Under which name an observed time is remembered: a method's passes differ in how fast they are."""
    return cell.method if cell.direction == "forward" else f"{cell.method} {cell.direction}"


def _input_limit(cell: Cell, held: InputDescription | None) -> str | None:
    """Why a capture cannot feed a cell, or None."""
    if held is None:
        return None
    if max(cell.seq_len, cell.seq_len_kv) > held.seq_len:
        return f"the capture holds {held.seq_len} tokens"
    if cell.seq_len_kv != held.seq_len and not held.prefixes_stand:
        return f"the capture is of {held.seq_len} tokens under a scaling that depends on their number: no other length"
    if cell.seq_len > cell.seq_len_kv:
        return f"a capture has one query for each key; it cannot give {cell.seq_len} queries on {cell.seq_len_kv} keys"
    return None
