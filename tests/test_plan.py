"""The plan: verdicts and their reasons, predictions by hand, and an estimator that learns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from pyramidbench import plan as planning
from pyramidbench.capture_file import InputDescription
from pyramidbench.cell import Cell
from pyramidbench.cost import Cost
from pyramidbench.methods.dense import Dense
from pyramidbench.plan import Estimator, PlannedCell, Rates, plan
from pyramidbench.problem import Problem
from pyramidbench.record import Record, Status
from pyramidbench.units import duration

FAST = Rates(flops_per_s=1e15, bytes_per_s=1e15)
PLENTY = 1e18


def cell(method: str = "dense", length: int = 1024, *, timed: bool = True, **fields: object) -> Cell:
    return Cell.model_validate({"method": method, "seq_len": length, "seq_len_kv": length, "timed": timed, **fields})


def record(of: Cell, latency_s: float | None, status: Status = "ok") -> Record:
    return Record(cell=of.identity, status=status, method=of.method, latency_s=latency_s)


def estimator(rates: Rates = FAST, timing_s: float = 2.0) -> Estimator:
    return Estimator(rates, "cpu", timing_s)


def judge(
    one: Cell, *, rates: Rates = FAST, budget_s: float = PLENTY, memory_bytes: float = PLENTY, tokens: int | None = None
) -> PlannedCell:
    held = None if tokens is None else cast(InputDescription, SimpleNamespace(seq_len=tokens, prefixes_stand=True))
    (planned,) = plan([one], estimator(rates), budget_s=budget_s, memory_bytes=memory_bytes, describe=lambda _: held)
    return planned


def test_a_cell_that_fits_runs_with_its_estimate() -> None:
    planned = judge(cell("pyramid"))
    assert planned.runs
    assert planned.verdict == "run"
    assert planned.reason is None
    assert planned.seconds == estimator().predict(planned.cell)


def test_a_call_is_predicted_from_operations_or_bytes_whichever_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "FLOP_EFFICIENCY", {"dense": 0.5, "selection": 0.25, "bound": 0.25})
    monkeypatch.setattr(planning, "CACHE_REUSE", 2.0)
    monkeypatch.setattr(planning, "CALL_S", {"cpu": 0.125})
    one = cell("dense")
    (attend,) = one.make_method().cost(one.problem("cpu")).stages
    by_flops = estimator(Rates(attend.flops, attend.bytes * 1e6)).call_seconds(one)
    assert by_flops == pytest.approx(2 + 0.125, rel=1e-12)
    by_bytes = estimator(Rates(attend.flops * 1e6, attend.bytes)).call_seconds(one)
    assert by_bytes == pytest.approx(0.5 + 0.125, rel=1e-12)


def test_a_block_methods_stages_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "FLOP_EFFICIENCY", {"selection": 0.25})
    monkeypatch.setattr(planning, "CALL_S", {"cpu": 0.0})
    one = cell("pyramid", 4096)
    flops = one.make_method().cost(one.problem("cpu")).flops
    assert estimator(Rates(1e9, 1e30)).call_seconds(one) == pytest.approx(4 * flops / 1e9, rel=1e-9)


def test_a_cell_takes_its_calls_the_clock_and_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Estimator, "call_seconds", lambda _, one: 10.0 if one.seq_len > 2048 else 0.01)
    made = estimator(timing_s=2.0)
    long, short, untimed = cell("dense:flash", 4096), cell("dense:flash", 1024), cell("dense:flash", 4096, timed=False)
    assert made.predict(long) == pytest.approx((2 + 4 + 4) * 10 + 1.0)
    assert made.predict(short) == pytest.approx((2 + 4) * 0.01 + 2.0 + 1.0)
    assert made.predict(untimed) == pytest.approx(10 + 0.5)
    assert made.total([long, untimed]) == pytest.approx(101 + 10.5)
    # Plain dense is one of two kernels here: half a second and five calls for each, before it is measured.
    assert made.predict(cell("dense", 4096)) == pytest.approx(101 + 2 * (0.5 + 5 * 10))
    assert made.predict(cell("dense", 4096, timed=False)) == pytest.approx(10 + 0.5)


def test_a_cell_over_its_budget_is_skipped_with_the_estimate() -> None:
    slow = Rates(flops_per_s=1e9, bytes_per_s=1e9)
    planned = judge(cell("dense", 16384), rates=slow, budget_s=60)
    assert planned.verdict == "skipped"
    assert not planned.runs
    assert planned.seconds is not None
    assert planned.seconds > 60
    assert planned.reason == (
        f"predicted {duration(planned.seconds)} for 10 calls exceeds the cell budget of 60 s; raise --cell-budget"
    )
    assert judge(cell("dense", 16384), rates=slow, budget_s=planned.seconds).runs


def test_a_cell_over_the_memory_is_skipped_with_the_estimate() -> None:
    one = cell("dense:math", 16384)
    problem = one.problem("cpu")
    needed = problem.io_bytes + one.make_method().cost(problem).workspace_bytes
    planned = judge(one, memory_bytes=needed - 1, budget_s=0)
    assert planned.verdict == "skipped"
    assert planned.memory_bytes == needed
    assert planned.reason is not None
    assert planned.reason.startswith(
        "predicted 3.02 GiB of memory exceeds the 3.02 GiB that are free; use a shorter --seq"
    )
    assert judge(one, memory_bytes=needed).runs


def test_a_step_needs_memory_for_its_cache_and_for_what_the_gate_holds() -> None:
    """64 sequences of 128k tokens: 34 GB of keys and values, as much in the cache, and three times that at the gate."""
    one = cell("dense:flash", seq_len=1, seq_len_kv=1 << 17, direction="decode", batch=64, heads=32, kv_heads=8, head_dim=128,
               head_dim_v=128, dtype="bfloat16")  # fmt: skip
    tokens = 64 * 8 * (1 << 17) * 256 * 2
    needed = judge(one).memory_bytes
    assert needed is not None
    assert 5 * tokens <= needed < 5.2 * tokens
    assert judge(one, memory_bytes=140e9).verdict == "skipped"
    pyramid = one.model_copy(update={"method": "pyramid", "parameters": {"query_tile": 1}})
    assert 0.05 * tokens < (judge(pyramid).memory_bytes or 0) - needed < 0.15 * tokens


def test_what_a_method_cannot_do_is_unsupported_and_has_no_estimate() -> None:
    planned = judge(cell("sliding_window", causal=False))
    assert planned.verdict == "unsupported"
    assert planned.reason == "a window that ends at the query needs causal attention"
    assert planned.seconds is None
    assert planned.memory_bytes is None


def test_a_method_without_its_package_is_unsupported(tmp_path: Path) -> None:
    own = tmp_path / "absent.py"
    own.write_text(
        "from dataclasses import dataclass\n"
        "from pyramidbench.methods.dense import Dense\n"
        "@dataclass(frozen=True)\n"
        "class Absent(Dense):\n"
        "    def unavailable(self):\n"
        "        return 'needs the package absent'\n"
    )
    planned = judge(cell(str(own)))
    assert (planned.verdict, planned.reason) == ("unsupported", "needs the package absent")


def test_a_capture_that_is_too_short_is_said_so() -> None:
    assert judge(cell(length=8192), tokens=8192).runs
    planned = judge(cell(length=8193), tokens=8192)
    assert (planned.verdict, planned.reason) == ("unsupported", "the capture holds 8192 tokens")
    uneven = judge(cell(length=2048, seq_len_kv=1024), tokens=8192)
    assert uneven.verdict == "unsupported"
    assert uneven.reason is not None
    assert "one query for each key" in uneven.reason


def test_each_input_is_described_once_and_the_order_stays() -> None:
    asked: list[str] = []

    def describe(name: str) -> None:
        asked.append(name)

    cells = [cell(length=length, input=name) for name in ("normal", "topics") for length in (512, 1024)]
    planned = plan(cells, estimator(), budget_s=PLENTY, memory_bytes=PLENTY, describe=describe)
    assert [made.cell for made in planned] == cells
    assert asked == ["normal", "topics"]


def test_one_observation_makes_the_same_cell_predicted_exactly() -> None:
    made, one = estimator(), cell("pyramid")
    made.observe(one, record(one, 3.0))
    assert made.call_seconds(one) == pytest.approx(3.0, rel=1e-12)


def test_ratios_are_geometric_means_per_method() -> None:
    made, flat, dense = estimator(), cell("flat"), cell("dense")
    before = made.call_seconds(flat)
    made.observe(flat, record(flat, 2 * before))
    made.observe(flat, record(flat, 8 * before))
    made.observe(dense, record(dense, 7 * made.call_seconds(dense)))
    assert made.call_seconds(flat) == pytest.approx(4 * before, rel=1e-9)


def test_a_method_not_seen_yet_is_judged_by_the_others() -> None:
    made, seen, unseen = estimator(), cell("flat"), cell("pyramid", 2048)
    before = made.call_seconds(unseen)
    made.observe(seen, record(seen, 5 * made.call_seconds(seen)))
    assert made.call_seconds(unseen) == pytest.approx(5 * before, rel=1e-9)


def test_learning_carries_over_to_longer_cells_and_to_their_verdicts() -> None:
    short, long = cell("dense", 1024), cell("dense", 16384)
    made = estimator(Rates(1e11, 1e11))
    first = made.call_seconds(long)
    made.observe(short, record(short, 50 * made.call_seconds(short)))
    assert made.call_seconds(long) == pytest.approx(50 * first, rel=1e-9)
    judged = plan([long], made, budget_s=11 * first + 5, memory_bytes=PLENTY, describe=lambda _: None)
    assert [planned.verdict for planned in judged] == ["skipped"]


@pytest.mark.parametrize("status", ["oom", "timeout", "incorrect", "crashed", "unsupported", "skipped"])
def test_a_cell_that_failed_teaches_nothing(status: Status) -> None:
    made, one = estimator(), cell("flat")
    before = made.predict(one)
    made.observe(one, record(one, None, status), took_s=100.0)
    assert made.predict(one) == before


def test_the_wall_time_of_whole_cells_teaches_what_the_checks_take() -> None:
    made = estimator(timing_s=2.0)
    timed, untimed = cell("flat"), cell("flat", timed=False)
    made.observe(timed, record(timed, 0.5), took_s=5 * 0.5 + 2.0 + 4.0)
    assert made.predict(timed) == pytest.approx(5 * 0.5 + 2.0 + 4.0, rel=1e-9)
    made.observe(untimed, record(untimed, None), took_s=0.5 + 3.0)
    assert made.predict(untimed) == pytest.approx(0.5 + 3.0, rel=1e-9)
    made.observe(untimed, record(untimed, None), took_s=0.0)
    assert made.predict(untimed) == pytest.approx(0.5 + 1.5, rel=1e-9)


@pytest.fixture
def count_costs(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often an estimator asked a dense method for its cost."""
    asked: list[Problem] = []
    original = Dense.cost

    def counted(method: Dense, problem: Problem) -> Cost:
        asked.append(problem)
        return original(method, problem)

    monkeypatch.setattr(Dense, "cost", counted)
    return lambda: len(asked)


def test_asking_again_for_the_time_left_costs_nothing(count_costs: Callable[[], int]) -> None:
    made = estimator()
    cells = [cell(length=length) for length in (512, 1024)]
    for _ in range(3):
        made.total(cells)
    assert count_costs() == 2
