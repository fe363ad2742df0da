"""The fastest of several methods: decided by measuring, after the gate, on the cell's own tensors, and told in the row."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from torch import Tensor

from pyramidbench import fastest as choosing
from pyramidbench.cell import Cell
from pyramidbench.fastest import Choice, fastest
from pyramidbench.method import Method
from pyramidbench.outcome import Settings
from pyramidbench.problem import Problem
from pyramidbench.registry import create
from pyramidbench.runner import Runner

QKV = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Slowed(Method):
    """Dense attention that takes longer, is wrong, or raises, as asked."""

    delay_s: float = 0.0
    fault: str = ""
    rivals: tuple[Method, ...] = ()

    def backend(self, problem: Problem) -> str:  # noqa: ARG002 - part of the contract
        return f"slowed-{1e3 * self.delay_s:.0f}{self.fault}"

    def alternatives(self, problem: Problem) -> tuple[Method, ...]:  # noqa: ARG002 - part of the contract
        return self.rivals

    def select(self, q: Tensor, k: Tensor, problem: Problem) -> None:  # noqa: ARG002 - part of the contract
        return None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, selection: object, problem: Problem) -> Tensor:  # noqa: ARG002
        if self.fault.startswith("raises"):
            raise RuntimeError(self.fault)
        time.sleep(self.delay_s)
        return create("dense:math").attend(q, k, v, None, problem) * (2 if self.fault == "wrong" else 1)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "TIMING_S", 0.02)


@pytest.fixture
def problem(tensors: Callable[..., QKV]) -> tuple[Problem, QKV]:
    q, k, v = tensors(queries=32, heads=2)
    return Problem.of(q, k, v, causal=True, scale=None), (q, k, v)


@pytest.mark.parametrize("direction", ["forward", "train", "backward"])
def test_the_fastest_wins_and_the_others_are_told(problem: tuple[Problem, QKV], direction: str) -> None:
    sizes, tensors = replace(problem[0], direction=direction), problem[1]
    rivals = (Slowed(0.02), Slowed(0.004), Slowed(0.03)) if direction != "backward" else (Slowed(0.0), Slowed(0.001))
    choice = fastest(Slowed(rivals=rivals), *tensors, sizes)
    if direction != "backward":  # its time is that of the gradients alone, which are the same here
        assert choice.method == Slowed(0.004)
    assert choice.note is not None
    assert choice.note.startswith("the fastest of ")
    assert all(f"{rival.backend(sizes)} " in choice.note for rival in rivals)
    assert choice.note.count(" ms") == len(rivals)


def test_one_that_is_wrong_or_fails_is_left_out_whatever_its_speed(problem: tuple[Problem, QKV]) -> None:
    rivals = (Slowed(fault="wrong"), Slowed(fault="raises"), Slowed(0.005))
    choice = fastest(Slowed(rivals=rivals), *problem[1], problem[0])
    assert choice.method == rivals[2]
    assert "slowed-0wrong failed (output error" in (choice.note or "")
    assert "slowed-0raises failed (raises)" in (choice.note or "")


def test_where_all_fail_the_first_is_left_to_fail_in_its_row(problem: tuple[Problem, QKV]) -> None:
    rivals = (Slowed(fault="wrong"), Slowed(fault="raises"))
    assert fastest(Slowed(rivals=rivals), *problem[1], problem[0]).method == rivals[0]


def test_a_lost_device_is_no_reason_to_go_on(problem: tuple[Problem, QKV]) -> None:
    rivals = (Slowed(fault="raises CUDA error: an illegal memory access"), Slowed())
    with pytest.raises(RuntimeError, match="illegal memory access"):
        fastest(Slowed(rivals=rivals), *problem[1], problem[0])


def test_a_method_without_alternatives_is_not_timed(
    problem: tuple[Problem, QKV], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choosing, "sample_in_turns", lambda *_: pytest.fail("timed"))
    assert fastest(Slowed(), *problem[1], problem[0]) == Choice(Slowed())
    assert fastest(Slowed(rivals=(Slowed(0.1),)), *problem[1], problem[0]) == Choice(Slowed(0.1))


def test_plain_dense_is_measured_once_per_problem_and_its_row_names_what_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = Cell(method="dense", heads=2, seq_len=96, seq_len_kv=96, head_dim=16, head_dim_v=16)
    settings = Settings("cpu", "a CPU", tmp_path, 0.01, 1 << 20)
    runner = Runner(settings)
    record = runner.measure(cell)
    assert record.status in ("ok", "low_n")
    assert record.backend in ("sdpa-flash", "sdpa-math")
    assert record.reason is not None
    assert "sdpa-flash " in record.reason
    assert "sdpa-math " in record.reason
    monkeypatch.setattr(choosing, "_seconds", lambda *_: pytest.fail("measured again"))
    again = runner.measure(cell)
    assert (again.backend, again.reason) == (record.backend, record.reason)
    untimed = Runner(settings).measure(cell.model_copy(update={"timed": False}))
    assert (untimed.status, untimed.backend, untimed.reason) == ("ok", "sdpa-flash", None)


def test_a_kernel_that_holds_the_whole_matrix_is_no_candidate_at_length() -> None:
    short = Problem(1, 8, 8, 512, 512, 64, 64, "float32", True, 0.125)
    names = [rival.backend(short) for rival in create("dense").alternatives(short)]
    assert names == ["sdpa-flash", "sdpa-math"]
    long = replace(short, seq_len_q=32768, seq_len_kv=32768)
    assert [rival.backend(long) for rival in create("dense").alternatives(long)] == ["sdpa-flash"]
    only = replace(long, head_dim_v=32)
    assert [rival.backend(only) for rival in create("dense").alternatives(only)] == ["sdpa-math"]
