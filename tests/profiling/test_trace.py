"""Reading a trace: whose kernel is whose, own times, busy time; on made-up traces in the format of torch.profiler."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pyramidbench.profiling.spans import Spans
from pyramidbench.profiling.trace import Traced, TracedKernel, read_trace, record_trace
from pyramidbench.stages import part, stage


def event(category: str, name: str, start: float, end: float, thread: int = 1, **arguments: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": start,
        "dur": end - start,
        "pid": 0,
        "tid": thread,
        "args": arguments,
    }


def span(path: str, start: float, end: float) -> dict[str, Any]:
    return event("user_annotation", f"pyramidbench/{path}", start, end)


def read(tmp_path: Path, events: list[dict[str, Any]], calls: int = 1, known: tuple[str, ...] = ()) -> Traced:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(
        gzip.compress(json.dumps({"traceEvents": [{"ph": "M", "name": "process_name"}, *events]}).encode())
    )
    return read_trace(path, calls, known)


def launch(start: float, correlation: int, thread: int = 1, category: str = "cuda_driver") -> dict[str, Any]:
    return event(category, "cuLaunchKernelEx", start, start + 1, thread, correlation=correlation)


def kernel(name: str, start: float, end: float, correlation: int) -> dict[str, Any]:
    return event("kernel", name, start, end, 7, correlation=correlation)


def test_a_kernel_belongs_to_the_span_of_its_launch_whenever_it_runs(tmp_path: Path) -> None:
    traced = read(tmp_path, [
        span("call", 0, 200), span("select", 0, 40), span("select/route", 5, 35), span("attend", 40, 80),
        launch(10, 1), kernel("_walk", 50, 90, 1),
        launch(45, 2), kernel("_attend", 90, 150, 2),
        launch(38, 3), kernel("_fill", 150, 155, 3),
        launch(300, 4), kernel("_other", 310, 320, 4),
    ])  # fmt: skip
    assert traced.on_device
    assert traced.kernels == (
        TracedKernel("_attend", "attend", 1, pytest.approx(60e-6)),
        TracedKernel("_walk", "select/route", 1, pytest.approx(40e-6)),
        TracedKernel("_fill", "select", 1, pytest.approx(5e-6)),
    )
    assert traced.busy_s == pytest.approx(105e-6)
    assert traced.span_s == pytest.approx(200e-6)


def test_kernels_that_overlap_are_busy_once_and_launches_are_per_call(tmp_path: Path) -> None:
    traced = read(tmp_path, [
        span("call", 0, 100), span("call", 100, 200),
        launch(1, 1), kernel("_a", 10, 30, 1), launch(2, 2), kernel("_a", 20, 40, 2),
        launch(101, 3), kernel("_a", 110, 130, 3), launch(102, 4, category="cuda_runtime"), kernel("_b", 140, 150, 4),
    ], calls=2)  # fmt: skip
    assert traced.busy_s == pytest.approx((30 + 20 + 10) * 1e-6 / 2)
    assert [(k.name, k.launches) for k in traced.kernels] == [("_a", 1.5), ("_b", 0.5)]


def test_a_launch_in_autograds_own_thread_is_found_by_its_time(tmp_path: Path) -> None:
    traced = read(tmp_path, [
        span("call", 0, 100), span("backward", 0, 90), event("user_annotation", "pyramidbench/backward/transpose", 20, 30, 2),
        launch(25, 1, thread=2), kernel("_mark", 40, 50, 1),
    ])  # fmt: skip
    assert [k.path for k in traced.kernels] == ["backward/transpose"]


def test_the_operator_that_launched_a_kernel_is_named_and_a_known_one_stands_for_what_it_calls(tmp_path: Path) -> None:
    events = [
        span("call", 0, 100), event("cpu_op", "aten::clone", 5, 30), event("cpu_op", "aten::copy_", 10, 20),
        launch(12, 1), kernel("void copy<float>(int)", 40, 50, 1), launch(60, 2), kernel("_walk", 70, 80, 2),
    ]  # fmt: skip
    by_name = {k.name: k.operator for k in read(tmp_path, events).kernels}
    assert by_name == {"void copy<float>(int)": "aten::copy_", "_walk": None}
    known = read(tmp_path, events, known=("aten::clone",))
    assert {k.name: k.operator for k in known.kernels}["void copy<float>(int)"] == "aten::clone"


def test_operators_of_a_cpu_have_their_own_times(tmp_path: Path) -> None:
    events = [
        span("call", 0, 100), span("attend", 10, 90),
        event("cpu_op", "aten::matmul", 20, 60), event("cpu_op", "aten::bmm", 30, 55),
        event("cpu_op", "aten::exp", 70, 80), event("cpu_op", "aten::exp", 200, 210),
    ]  # fmt: skip
    traced = read(tmp_path, events)
    assert not traced.on_device
    assert {(k.name, k.path): k.seconds for k in traced.kernels} == {
        ("aten::bmm", "attend"): pytest.approx(25e-6),
        ("aten::matmul", "attend"): pytest.approx(15e-6),
        ("aten::exp", "attend"): pytest.approx(10e-6),
    }
    assert traced.busy_s == pytest.approx(50e-6)
    whole = read(tmp_path, events, known=("aten::matmul",))
    assert {k.name: k.seconds for k in whole.kernels}["aten::matmul"] == pytest.approx(40e-6)
    assert "aten::bmm" not in {k.name for k in whole.kernels}


def test_a_real_trace_has_every_operator_in_its_stage(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    a = torch.randn(64, 64)

    def call(spans: Spans) -> None:
        with spans("select"), stage("route"):
            for level in (1, 0):
                with part(f"level {level}"):
                    a.exp()
        with spans("attend"):
            a.mm(a)

    traced = record_trace(call, torch.device("cpu"), 2, tmp_path / "trace.json.gz")
    runs = {(k.name, k.path): k.launches for k in traced.kernels}
    assert runs["aten::mm", "attend"] == 1
    assert runs["aten::exp", "select/route/level 1"] == runs["aten::exp", "select/route/level 0"] == 1
    assert 0 < traced.busy_s < traced.span_s
    names = {e["name"] for e in json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]}
    assert {"pyramidbench/call", "pyramidbench/select/route/level 1", "aten::mm"} <= names
    assert capfd.readouterr().err == ""
