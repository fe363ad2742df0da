"""The passes with gradients: what a call does, what it costs, and what a sweep says of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor

from pyramidbench import sweep
from pyramidbench.cell import Cell
from pyramidbench.frame import summarise
from pyramidbench.passes import ATTENTION_WORK, Training, pass_cost
from pyramidbench.plan import Estimator, Rates, judge
from pyramidbench.problem import Pass, Problem
from pyramidbench.rates import rates, work
from pyramidbench.record import Record
from pyramidbench.registry import create
from pyramidbench.reporting.write import Source, write_report
from pyramidbench.stage_clock import stage_times, staged
from pyramidbench.tables import FAILURES, failure_columns, failures
from pyramidbench.timing import stage_columns, timed_call
from pyramidbench.verdict import verdict

Tensors = Callable[..., tuple[Tensor, Tensor, Tensor]]
SMALL: dict[str, Any] = {"top_k": 1, "block_size": 16, "query_tile": 16}
PROBLEM = Problem(1, 4, 2, 1024, 1024, 64, 64, "bfloat16", True, 0.125, device="cuda")


def training(tensors: Tensors, direction: Pass) -> Training:
    q, k, v = tensors(queries=96, heads=2, kv_heads=1, dim=16, dtype=torch.float32)
    problem = replace(Problem.of(q, k, v, causal=True, scale=None), direction=direction)
    return Training.of(create("pyramid", SMALL), q, k, v, problem)


def test_a_train_call_gives_the_gradients_of_a_forward_and_its_backward(tensors: Tensors) -> None:
    made = training(tensors, "train")
    output = made.attend(made.select())
    assert output.requires_grad
    for _ in range(2):
        for one, other in zip(made.train(), made.backward(output), strict=True):
            torch.testing.assert_close(one, other)
    assert all(leaf.grad is None for leaf in made.leaves)


def test_what_comes_back_is_random_and_the_same_every_time(tensors: Tensors) -> None:
    one, other = training(tensors, "train"), training(tensors, "train")
    assert torch.equal(one.d_out, other.d_out)
    assert 0.9 < float(one.d_out.std()) < 1.1
    assert one.d_out.shape == (1, 2, 96, 16)


def test_the_choice_leaves_no_graph(tensors: Tensors, monkeypatch: pytest.MonkeyPatch) -> None:
    made = training(tensors, "train")
    seen: list[bool] = []
    select = type(made.method).select

    def spy(self: Any, q: Tensor, k: Tensor, problem: Problem) -> Any:
        seen.append(torch.is_grad_enabled() or q.requires_grad or k.requires_grad)
        return select(self, q, k, problem)

    monkeypatch.setattr(type(made.method), "select", spy)
    made.train()
    assert seen == [False]


@pytest.mark.parametrize("name", ["dense:cudnn", "pyramid:fast", "sliding_window"])
def test_the_backward_is_two_and_a_half_forwards_of_attention(name: str) -> None:
    method = create(name)
    forward, backward, train = (pass_cost(method, replace(PROBLEM, direction=d)) for d in ATTENTION_WORK)
    attend = forward.stage("attend").flops
    assert forward == method.cost(PROBLEM)
    assert [stage.stage for stage in backward.stages] == ["backward"]
    assert backward.flops == 2.5 * attend
    assert train.flops == forward.flops + backward.flops
    assert train.bytes == forward.bytes + backward.bytes > 3 * forward.stage("attend").bytes


def test_memory_holds_gradients_and_what_is_saved() -> None:
    gradients = 2 * (4 + 2 + 2) * 1024 * 64
    rows = 2 * 4 * 4 * 1024
    summed = 4 * 4 * 1024 * 64  # the gradient of q in fp32
    held = pass_cost(create("dense:cudnn"), replace(PROBLEM, direction="train")).workspace_bytes
    assert held == gradients + rows + summed
    window = create("sliding_window", SMALL)
    lists = 2 * 4 * 2 * window.planned(PROBLEM).listed  # type: ignore[attr-defined]
    needed = {d: pass_cost(window, replace(PROBLEM, direction=d)).workspace_bytes for d in ATTENTION_WORK}
    scratch = window.cost(replace(PROBLEM, direction="train")).workspace_bytes
    assert needed["train"] == needed["backward"] == scratch + gradients + rows + lists
    assert needed["forward"] == window.cost(PROBLEM).workspace_bytes < scratch
    expected = work(window, replace(PROBLEM, direction="train"), None)["expected_memory_bytes"]
    assert expected == needed["train"] + 2 * 4 * 1024 * 64


def test_rates_count_the_work_of_the_pass() -> None:
    dense, pyramid = create("dense:cudnn"), create("pyramid:fast")
    of = {d: rates(dense, replace(PROBLEM, direction=d), None, 2.0) for d in ATTENTION_WORK}
    for direction, units in ATTENTION_WORK.items():
        for name in ("useful_flops_per_s", "executed_flops_per_s", "dense_equivalent_flops_per_s"):
            assert of[direction][name] == units * of["forward"][name]
    chosen = {d: rates(pyramid, replace(PROBLEM, direction=d), None, 1.0)["useful_flops_per_s"] for d in ATTENTION_WORK}
    assert chosen["train"] == pytest.approx(chosen["forward"] + chosen["backward"])


@pytest.mark.parametrize(("direction", "calls"), [("backward", "b"), ("train", "sab")])
def test_the_clock_sees_the_pass_and_nothing_else(
    tensors: Tensors, monkeypatch: pytest.MonkeyPatch, direction: Pass, calls: str
) -> None:
    """Which parts run inside a timed call."""
    made = training(tensors, direction)
    log: list[str] = []
    method_class = type(made.method)
    for letter, name in (("s", "select"), ("a", "attend")):
        honest = getattr(method_class, name)

        def logged(*arguments: Any, honest: Any = honest, letter: str = letter) -> Any:
            log.append(letter)
            return honest(*arguments)

        monkeypatch.setattr(method_class, name, logged)
    grad = torch.autograd.grad

    def logged_grad(*arguments: Any, **options: Any) -> Any:
        log.append("b")
        return grad(*arguments, **options)

    monkeypatch.setattr(torch.autograd, "grad", logged_grad)
    tensors_of = tuple(leaf.detach() for leaf in made.leaves)
    call = timed_call(made.method, tensors_of, made.problem, made)
    for _ in range(2):
        log.clear()
        call()
        assert "".join(log) == calls
    columns = stage_columns(made.method, tensors_of, made.problem, made, "warm", 0.01)
    assert all(columns[name] > 0 for name in ("build_s", "route_s", "attend_s", "backward_s"))


def test_a_stage_of_the_backward_runs_on_what_the_forward_gave() -> None:
    given: list[object] = []
    call = staged(lambda: None, lambda: "output", given.append)
    times = stage_times(call, torch.device("cpu"), "cold", 2)
    assert given == ["output", "output"]
    assert list(times.seconds) == ["select", "attend", "backward"]


def test_a_forward_kernel_says_that_it_has_no_backward() -> None:
    fa3 = create("dense:fa3")
    for direction in ("backward", "train"):
        said = fa3.unsupported(replace(PROBLEM, direction=direction))
        assert said == f"FlashAttention-3 is here a forward pass only, and the pass is {direction}; use dense:cudnn"
    assert "forward pass" not in (fa3.unsupported(PROBLEM) or "")


def test_the_plan_knows_the_pass() -> None:
    made = Estimator(Rates(1e12, 1e11), "cpu", 2.0)
    cells = {d: Cell(method="dense", seq_len=4096, seq_len_kv=4096, direction=d) for d in ATTENTION_WORK}
    raw = {d: made.call_seconds(cell) for d, cell in cells.items()}
    assert raw["forward"] < raw["backward"] < raw["train"]
    made.observe(cells["train"], Record(cell="", status="ok", method="dense", latency_s=100 * raw["train"]))
    assert made.call_seconds(cells["train"]) == pytest.approx(100 * raw["train"])
    assert list(made.ratios) == ["dense train"]
    problem = cells["train"].problem("cpu")
    needed = problem.io_bytes + made.cost(cells["train"]).workspace_bytes + problem.output_bytes
    assert judge(cells["train"], made, 1e9, needed).memory_bytes == needed
    assert judge(cells["train"], made, 1e9, needed - 1).verdict == "skipped"


@pytest.mark.usefixtures("no_workers")
def test_a_sweep_of_all_passes_keeps_them_apart(tmp_path: Path) -> None:
    run = sweep(
        seq="128,256", method=["dense:flash", "pyramid", "sliding_window"], pass_="forward,backward,train", top_k="1",
        block_size="16", query_tile="16", heads="2:1", head_dim="16", timing_s=0.02, device="cpu",
        out=tmp_path / "run",
    )  # fmt: skip
    frame = run.frame
    assert set(frame["status"]) <= {"ok", "low_n"}
    assert len(frame) == 18
    for (direction, length), rows in frame.groupby(["pass", "seq_len"]):
        assert rows["speedup_low"].notna().all(), (direction, length)
        assert rows["session"].nunique() == 1, "passes are not timed in turns with one another"
        assert set(rows["dense_method"]) == {"dense:flash"}
    assert frame["session"].nunique() == 6
    assert frame["backward_s"].notna().tolist() == (frame["pass"] != "forward").tolist()
    assert (frame["gate_error"] <= 1).all()
    memory = frame.set_index(["pass", "method", "seq_len"])["expected_memory_bytes"]
    assert (memory["train"] > memory["forward"]).all()
    assert (memory["train"] == memory["backward"]).all()
    write_report([Source(frame, run.manifest.model_dump(), run.device.model_dump())], tmp_path / "report")
    summary = (tmp_path / "report" / "summary.md").read_text()
    for direction in ("forward", "backward", "train"):
        assert f"causal, {direction}, blocks of 16" in summary
    header = (tmp_path / "report" / "results.csv").read_text().splitlines()[0].split(",")
    assert "backward_s" in header


@pytest.mark.usefixtures("no_workers")
def test_a_wrong_backward_is_incorrect_and_has_no_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Training.backward

    def wrong(self: Training, output: Tensor, d_out: Tensor | None = None) -> Any:
        d_q, d_k, d_v = honest(self, output, d_out)
        return d_q, 1.1 * d_k, d_v

    monkeypatch.setattr(Training, "backward", wrong)
    (record,) = sweep(seq="128", method=["dense"], pass_="train", timing_s=0.02, device="cpu", out=tmp_path).records
    assert record.status == "incorrect"
    assert "gradient of k against fp64" in (record.reason or "")
    assert (record.latency_s, record.direction) == (None, "train")


def test_the_verdict_names_a_pass_that_is_no_forward(shown_run: Any) -> None:
    said = {d: verdict(summarise(shown_run.assign(**{"pass": d}))).text for d in ATTENTION_WORK}
    assert "threads, gradients alone, " in said["backward"]
    assert said["train"].replace(", forward and backward", "", 1) == said["forward"]


def test_failures_name_their_pass_where_there_are_several(shown_run: Any) -> None:
    alone = summarise(shown_run)
    both = summarise(pd.concat([shown_run, shown_run.assign(**{"pass": "train"})], ignore_index=True))
    assert failure_columns(alone) == FAILURES
    columns = failure_columns(both)
    assert [column.header for column in columns][:3] == ["method", "pass", "N"]
    shown = {tuple(column.write(row) for column in columns[:3]) for row in failures(both)}
    assert {("dense", "forward", "16k"), ("dense", "train", "16k")} <= shown
