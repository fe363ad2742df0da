"""Which cells are compared: pairs by identity or by columns, and refusals that say why."""

from __future__ import annotations

from typing import Any

import pytest

from pyramidbench.comparing.matching import Matched, match_methods, match_runs
from pyramidbench.errors import UserError
from pyramidbench.record import Record


def record(method: str = "flat", seq_len: int = 1024, **columns: Any) -> Record:
    usual: dict[str, Any] = {
        "cell": f"{method}-{seq_len}", "status": "ok", "method": method, "device": "X", "batch": 1, "heads": 2, "kv_heads": 1,
        "head_dim": 64, "dtype": "float32", "causal": True, "pass": "forward", "input": "topics", "seq_len": seq_len,
        "seq_len_kv": seq_len, "parameters": "{}", "seed": 0, "latency_s": 1.0, "clock": "perf_counter",
    }  # fmt: skip
    return Record(**(usual | columns))


def names(matched: Matched) -> list[tuple[str, str]]:
    return [(pair.a.cell, pair.b.cell) for pair in matched.pairs]


def test_runs_are_paired_by_identity_whatever_their_order() -> None:
    a = [record("flat", 1024), record("flat", 2048), record("dense", 1024)]
    matched = match_runs(a, [a[2], a[0], record("dense", 4096)])
    assert names(matched) == [("flat-1024", "flat-1024"), ("dense-1024", "dense-1024")]
    assert [r.cell for r in matched.only_a] == ["flat-2048"]
    assert [r.cell for r in matched.only_b] == ["dense-4096"]
    assert all(pair.notes == () for pair in matched.pairs)


def test_a_capture_that_lies_elsewhere_has_another_identity_and_the_same_columns() -> None:
    matched = match_runs([record(cell="here", input="model:text")], [record(cell="there", input="model:text")])
    assert names(matched) == [("here", "there")]


def test_a_changed_default_is_the_same_cell_and_is_noted() -> None:
    (pair,) = match_runs([record(parameters='{"beam": 4}')], [record(parameters='{"beam": 2}')]).pairs
    assert pair.notes == ("parameters differs",)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"device": "Y"}, ["device (X against Y)", "--allow device."]),
        ({"cell": "c", "heads": 8}, ["heads (2 against 8)", "--allow shape."]),
        ({"cell": "c", "dtype": "bfloat16"}, ["dtype (float32 against bfloat16)", "--allow shape."]),
        ({"cell": "c", "direction": "train"}, ["pass (forward against train)", "--allow shape."]),
        ({"cell": "c", "input": "needles"}, ["input (topics against needles)", "--allow input."]),
        ({"cell": "c", "seed": 5}, ["seed (0 against 5)", "--allow input."]),
        ({"cell": "c", "device": "Y", "heads": 8}, ["device", "heads", "--allow device,shape."]),
        ({"clock": "CUDA events, cold L2"}, ["'perf_counter'", "'CUDA events, cold L2'", "--allow clock."]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_what_must_not_differ_is_refused_with_its_reason_and_may_be_allowed(
    change: dict[str, Any], parts: list[str]
) -> None:
    a = record()
    renamed = {"pass" if name == "direction" else name: value for name, value in change.items()}
    b = Record(**(a.model_dump(by_alias=True) | renamed))
    with pytest.raises(UserError) as refused:
        match_runs([a], [b])
    for part in parts:
        assert part in str(refused.value)
    allow = str(refused.value).split("--allow ")[1].rstrip(".").split(",")
    assert len(match_runs([a], [b], allow).pairs) == 1
    for name in allow:
        fewer = [other for other in allow if other != name]
        with pytest.raises(UserError):
            match_runs([a], [b], fewer)


def test_another_method_is_no_partner_whatever_is_allowed() -> None:
    with pytest.raises(UserError, match=r"method \(flat against dense\)") as refused:
        match_runs([record("flat")], [record("dense")], ["device", "shape", "input", "clock"])
    assert "--allow" not in str(refused.value)


def test_with_shapes_allowed_two_lengths_of_one_method_are_not_paired_by_guess() -> None:
    a, b = [record(seq_len=1024), record(seq_len=2048)], [record(seq_len=4096), record(seq_len=8192)]
    with pytest.raises(UserError):
        match_runs(a, b, ["shape"])
    assert names(match_runs(a[:1], b[:1], ["shape"])) == [("flat-1024", "flat-4096")]


@pytest.mark.parametrize(("a", "b", "which"), [([], [record()], "first"), ([record()], [], "second")])
def test_an_empty_run_is_named(a: list[Record], b: list[Record], which: str) -> None:
    with pytest.raises(UserError, match=f"the {which} run holds no cell"):
        match_runs(a, b)


def test_methods_are_paired_on_each_problem_and_layer() -> None:
    run = [record(method, n, layer=layer, cell=f"{method}{n}{layer}")
           for method in ("dense", "flat") for n in (1024, 2048) for layer in (0, 7)]  # fmt: skip
    matched = match_methods(run, "dense", "flat")
    assert names(matched) == [(f"dense{n}{layer}", f"flat{n}{layer}") for n in (1024, 2048) for layer in (0, 7)]


def test_one_dense_cell_stands_beside_every_budget_and_budgets_stand_beside_their_own() -> None:
    flat = [record("flat", top_k=k, block_size=64, query_tile=64, cell=f"flat{k}") for k in (4, 8)]
    pyramid = [record("pyramid", top_k=k, block_size=64, query_tile=64, cell=f"pyramid{k}") for k in (8, 4, 2)]
    run = [record("dense", cell="dense"), *flat, *pyramid]
    assert names(match_methods(run, "dense", "flat")) == [("dense", "flat4"), ("dense", "flat8")]
    both = match_methods(run, "flat", "pyramid")
    assert names(both) == [("flat4", "pyramid4"), ("flat8", "pyramid8")]
    assert [r.cell for r in both.only_b] == ["pyramid2"]


def test_cells_that_nothing_tells_apart_are_refused() -> None:
    run = [
        record(m, top_k=4, block_size=64, query_tile=64, levels=n, cell=f"{m}{n}") for m in ("a", "b") for n in (1, 2)
    ]
    with pytest.raises(UserError, match="nothing says which belong together"):
        match_methods(run, "a", "b")


def test_methods_on_two_devices_of_one_merged_run_are_not_mixed() -> None:
    run = [record("dense", device="X"), record("flat", device="Y")]
    with pytest.raises(UserError, match=r"device \(X against Y\)"):
        match_methods(run, "dense", "flat")
    with pytest.raises(UserError, match="Did you mean 'dense'"):
        match_methods(run, "dens", "flat")
