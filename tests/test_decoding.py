"""The pass "decode": what a step is, what a sweep says of it, and that every method can do one."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pyramidbench import sweep
from pyramidbench.cell import Cell
from pyramidbench.decoder import CacheLayout, RepeatingDecoder
from pyramidbench.decoding import decoding, held_bytes, hold
from pyramidbench.errors import UserError
from pyramidbench.gate import GateFailure, check_call, check_causal
from pyramidbench.kernels.backends import HAS_TRITON
from pyramidbench.kernels.decoder import BlockDecoder
from pyramidbench.method import BlockMethod, Method
from pyramidbench.outcome import Lost, Settings
from pyramidbench.problem import Problem
from pyramidbench.registry import create, method_names
from pyramidbench.runner import Runner
from pyramidbench.stages import listening
from pyramidbench.suite import load_suite, suite_from_flags
from pyramidbench.timing import stage_columns

Tensors = Callable[..., tuple[Tensor, Tensor, Tensor]]
SMALL: dict[str, Any] = {"top_k": 2, "block_size": 16, "query_tile": 1}
LAYOUT = CacheLayout(torch.device("cpu"))


def posed(tensors: Tensors, queries: int = 1, keys: int = 300) -> tuple[tuple[Tensor, Tensor, Tensor], Problem]:
    q, k, v = tensors(queries=queries, keys=keys, heads=4, kv_heads=2, dim=16, dtype=torch.float32)
    return (q, k, v), replace(Problem.of(q, k, v, causal=True, scale=None), direction="decode")


def plain(name: str) -> Method:
    method = create(name)
    return create(name, SMALL) if isinstance(method, BlockMethod) else method


def runs(name: str, problem: Problem) -> bool:
    return plain(name).unavailable() is None and decoding(plain(name)).unsupported(problem) is None


@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("name", [*method_names(), "flat:bounds", "flat:filtered", "pyramid:paper", "pyramid:fastest"])
def test_a_step_of_every_method_is_its_call_for_the_newest_queries(name: str, queries: int, tensors: Tensors) -> None:
    (q, k, v), problem = posed(tensors, queries)
    if not runs(name, problem):
        pytest.skip(f"{name} cannot run here")
    method, step = plain(name), decoding(plain(name))
    passed = check_call(step, q, k, v, problem)
    check_causal(step, q, k, v, problem, passed)
    expected = method.select(q, k, problem)
    if expected is None:
        assert passed.selection is None
    else:
        assert passed.selection is not None
        assert torch.equal(passed.selection.mask(), expected.mask())
    torch.testing.assert_close(step(q, k, v, problem), method.attend(q, k, v, expected, problem), rtol=0, atol=1e-5)


def test_what_decodes_says_of_itself_what_the_method_says() -> None:
    method = create("pyramid:fast", {"top_k": 3})
    step = decoding(method)
    assert isinstance(step, BlockMethod)
    assert (step.name, step.kind, step.__doc__) == (method.name, method.kind, method.__doc__)
    assert {f.name: getattr(step, f.name) for f in fields(step)} == {
        f.name: getattr(method, f.name) for f in fields(method)
    }
    assert decoding(method) == step


def test_a_repeated_step_appends_to_the_same_place(tensors: Tensors) -> None:
    (q, k, v), problem = posed(tensors)
    step = decoding(plain("pyramid"))
    seen: list[str] = []

    def listener(name: str) -> Any:
        seen.append(name)
        return torch.no_grad()

    first = step(q, k, v, problem)
    with listening(listener):
        for _ in range(3):
            assert torch.equal(step(q, k, v, problem), first)
    assert seen == ["append"] * 3


def test_other_tensors_and_changed_ones_are_noticed(tensors: Tensors) -> None:
    (q, k, v), problem = posed(tensors)
    step = decoding(plain("pyramid"))
    for change in (lambda: None, lambda: k.mul_(2), lambda: v[:, :, 7].add_(1)):
        change()
        torch.testing.assert_close(step(q, k, v, problem), decoding(plain("pyramid"))(q, k, v, problem), rtol=0, atol=0)
    other = v.clone().mul_(-1)
    assert torch.equal(step(q, k, other, problem), -step(q, k, v, problem))
    step.select(q, k, problem)
    torch.testing.assert_close(step.attend(q, k, v, None, problem), step(q, k, v, problem))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"causal": False}, "decoding is causal"),
        ({"seq_len_q": 17}, "1 to 16 new tokens, not 17"),
        ({"seq_len_q": 4, "seq_len_kv": 3}, "1 to 16 new tokens, not 4"),
    ],
)
def test_what_is_no_step_is_unsupported(changes: dict[str, Any], reason: str, tensors: Tensors) -> None:
    _, problem = posed(tensors)
    assert reason in (decoding(plain("pyramid")).unsupported(replace(problem, **changes)) or "")


def test_a_method_without_a_cache_of_its_own_keeps_keys_and_values(tensors: Tensors) -> None:
    (_, k, v), problem = posed(tensors)
    decoder = plain("random_blocks").decoder(problem, LAYOUT)
    assert isinstance(decoder, RepeatingDecoder)
    decoder.append(k[:, :, :200], v[:, :, :200])
    decoder.append(k[:, :, 200:], v[:, :, 200:])
    assert torch.equal(decoder.k, k)
    with pytest.raises(UserError, match="holds 300 tokens and 301"):
        decoder.append(k[:, :, :1], v[:, :, :1])
    with pytest.raises(UserError, match="no paged cache"):
        plain("random_blocks").decoder(problem, CacheLayout(torch.device("cpu"), paged=True))


@pytest.mark.parametrize("name", ["pyramid", "flat", "quest", "moba", "block_mean", "hisa", "sliding_window"])
def test_a_step_on_a_cache_builds_nothing_anew(name: str, tensors: Tensors) -> None:
    """One decoder, one cost and one backend for all rules that read means or bounds, so that their steps are comparable."""
    _, problem = posed(tensors)
    method = plain(name)
    decoder = method.decoder(problem, LAYOUT)
    assert isinstance(decoder, BlockDecoder)
    assert (decoder.backend, method.step_backend(problem)) == ("reference", "reference")
    assert [stage.stage for stage in method.step_cost(problem).stages if stage.stage == "build"] == []
    refused = create(name, {**SMALL, "implementation": "triton"}).unsupported
    assert name == "sliding_window" or "need a CUDA device" in (refused(problem) or "")


CACHED = ["pyramid", "pyramid:paper", "pyramid:fastest", "flat", "flat:exact", "flat:sub", "flat:bounds", "flat:filtered",
          "quest", "moba", "block_mean", "hisa", "sliding_window"]  # fmt: skip


@pytest.mark.skipif(not HAS_TRITON, reason="needs the package triton")
@pytest.mark.parametrize("name", CACHED)
def test_on_a_gpu_every_step_on_a_cache_is_the_kernels(name: str) -> None:
    sizes: dict[str, Any] = {
        "seq_len_q": 1,
        "seq_len_kv": 65536,
        "heads": 32,
        "kv_heads": 8,
        "head_dim": 128,
        "head_dim_v": 128,
    }
    problem = Problem(
        batch=1, causal=True, scale=0.1, dtype="bfloat16", device="cuda", direction="decode", **sizes
    )  # fmt: skip
    assert create(name, {"top_k": 32, "block_size": 64, "query_tile": 1}).step_backend(problem) == "triton"


def test_keys_in_place_of_means_are_not_in_a_cache(tensors: Tensors) -> None:
    """A cache keeps means and bounds; HiP judges a node by one of its keys."""
    _, problem = posed(tensors)
    assert isinstance(plain("hip").decoder(problem, LAYOUT), RepeatingDecoder)


def test_quest_by_a_stand_in_is_quest(tensors: Tensors) -> None:
    """With bounds alone a single pass chooses what Quest does, in the cache too."""
    (q, k, v), problem = posed(tensors, 3)
    flat = create("flat", {**SMALL, "bound_weight": 1, "head_reduce": "none"})
    chosen = [decoding(method).select(q, k, problem) for method in (plain("quest"), flat)]
    assert all(selection is not None for selection in chosen)
    assert torch.equal(*(selection.indices for selection in chosen if selection is not None))
    assert torch.equal(*(decoding(method)(q, k, v, problem) for method in (plain("quest"), flat)))


def test_a_step_that_forgets_its_token_is_incorrect(tensors: Tensors, monkeypatch: pytest.MonkeyPatch) -> None:
    (q, k, v), problem = posed(tensors)
    honest = RepeatingDecoder.append

    def forgetful(self: Any, k: Tensor, v: Tensor, *, at: int | None = None) -> None:
        honest(self, k, torch.zeros_like(v) if k.shape[2] == 1 else v, at=at)

    monkeypatch.setattr(RepeatingDecoder, "append", forgetful)
    with pytest.raises(GateFailure, match="output error"):
        check_call(decoding(plain("dense")), q, k, v, problem)


def test_a_length_is_the_context_and_every_token_has_its_own_set() -> None:
    flags: dict[str, Any] = {"method": ["dense", "pyramid:fast"], "pass_": "decode,forward", "top_k": "2"}
    cells = suite_from_flags(seq="256", **flags).cells()
    shapes = {(cell.direction, cell.method): (cell.seq_len, cell.seq_len_kv) for cell in cells}
    assert shapes[("decode", "dense")] == shapes[("decode", "pyramid:fast")] == (1, 256)
    assert shapes[("forward", "dense")] == (256, 256)
    tiles = {cell.direction: cell.make_method() for cell in cells if cell.method == "pyramid:fast"}
    assert {name: method.query_tile for name, method in tiles.items()} == {"decode": 1, "forward": 128}  # type: ignore[attr-defined]
    (chunk,) = suite_from_flags(seq="4", seq_kv="256", method=["dense"], pass_="decode").cells()
    assert (chunk.seq_len, chunk.seq_len_kv) == (4, 256)


def test_the_cost_of_a_step_has_no_build_and_does_not_grow_with_the_context() -> None:
    costs = {}
    for seq_len in (1 << 16, 1 << 20):
        cell = Cell(
            method="pyramid", seq_len=1, seq_len_kv=seq_len, direction="decode", heads=32, kv_heads=8, head_dim=128,
            dtype="bfloat16", parameters={"top_k": 32, "query_tile": 1},
        )  # fmt: skip
        costs[seq_len] = cell.make_method().cost(cell.problem("cpu"))
    assert [stage.stage for stage in costs[1 << 20].stages] == ["append", "route", "attend"]
    assert costs[1 << 20].bytes < 1.5 * costs[1 << 16].bytes
    # 26 MB at 1M tokens: leaves 12.6, attention 9.2, the levels above 4.
    assert 20e6 < costs[1 << 20].bytes < 40e6


def test_an_append_that_ends_a_part_of_a_block_reads_its_keys() -> None:
    costs = []
    for seq_len in (65536 - 48, 65536 - 47):
        cell = Cell(
            method="pyramid", seq_len=1, seq_len_kv=seq_len, direction="decode", heads=32, kv_heads=8, head_dim=128,
            dtype="bfloat16", parameters={"top_k": 32, "query_tile": 1, "leaf_score": "sub"},
        )  # fmt: skip
        costs.append(cell.make_method().cost(cell.problem("cpu")).stages[0])
    # 16 keys of four parts of 64, and a mean, for each of 8 heads.
    assert costs[0].bytes - costs[1].bytes == 8 * 17 * 128 * 2
    assert costs[0].flops - costs[1].flops == 8 * 16 * 128


@pytest.mark.parametrize("name", ["dense", "quest", "pyramid", "flat:sub", "sliding_window"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_decoder_holds_is_known_before_it_is_made(name: str, dtype: torch.dtype, tensors: Tensors) -> None:
    q, k, v = tensors(queries=1, keys=300, heads=4, kv_heads=2, dim=16, dtype=dtype)
    problem = replace(Problem.of(q, k, v, causal=True, scale=None), direction="decode")
    decoder = plain(name).decoder(problem, LAYOUT)
    held = decoder.k.nbytes + decoder.v.nbytes if isinstance(decoder, RepeatingDecoder) else decoder.bytes  # type: ignore[attr-defined]
    assert held_bytes(decoding(plain(name)), problem) == held
    assert held_bytes(plain(name), problem) == 0


class Counted:
    """Decoders that live, counted where they are made; `most` is how many did beside one another."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.living: weakref.WeakSet[Any] = weakref.WeakSet()
        self.most = self.made = 0
        for cls in (RepeatingDecoder, BlockDecoder):
            monkeypatch.setattr(cls, "__init__", self._counting(cls.__init__))

    def _counting(self, honest: Callable[..., None]) -> Callable[..., None]:
        def made(decoder: Any, *arguments: Any) -> None:
            honest(decoder, *arguments)
            self.living.add(decoder)
            self.most, self.made = max(self.most, len(self.living)), self.made + 1

        return made


def test_decoders_live_beside_one_another_only_while_they_are_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a million tokens each takes gigabytes: judging and finishing hold one at a time."""
    counted = Counted(monkeypatch)
    runner = Runner(Settings("cpu", "Test CPU", tmp_path, 0.02, 1 << 20))
    cells = [
        Cell(method=method, seq_len=1, seq_len_kv=200, direction="decode", heads=2, head_dim=16, head_dim_v=16,
             parameters={} if method == "dense:math" else SMALL)
        for method in ("dense:math", "pyramid", "flat")
    ]  # fmt: skip
    judged = [runner.judge(cell) for cell in cells]
    assert {record.status for record in judged} == {"ok"}, [record.reason for record in judged]
    assert (counted.most, len(counted.living)) == (1, 0)
    timings = runner.time(cells)
    assert not isinstance(timings, Lost)
    assert (counted.most, len(counted.living)) == (3, 0)
    counted.most = 0
    records = [runner.finish(*entry) for entry in zip(cells, judged, timings)]
    assert {record.status for record in records} <= {"ok", "low_n"}, [record.reason for record in records]
    assert (counted.most, len(counted.living)) == (1, 0)
    assert counted.made == 3 * (1 + 1 + 2), "the gate, the clock, and stages beside the gate on another seed"


def test_decoders_are_given_up_where_timing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)

    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr("pyramidbench.runner.measure_in_turns", fail)
    runner = Runner(Settings("cpu", "Test CPU", tmp_path, 0.02, 1 << 20))
    cells = [
        Cell(method=name, seq_len=1, seq_len_kv=200, direction="decode", head_dim=16, head_dim_v=16, parameters=SMALL)
        for name in ("pyramid", "flat")
    ]
    lost = runner.time(cells)
    assert isinstance(lost, Lost)
    assert lost.status == "oom"
    assert (counted.most, len(counted.living)) == (2, 0)


def test_a_step_s_stages_hold_no_second_choice(tensors: Tensors, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step chooses inside its attention; asking for its blocks besides makes a GPU wait for the host."""
    (q, k, v), problem = posed(tensors)
    step = decoding(plain("pyramid"))
    hold(step, k, v, problem)
    monkeypatch.setattr(BlockDecoder, "select", lambda *_: pytest.fail("the blocks were asked for"))
    columns = stage_columns(step, (q, k, v), problem, None, "warm", 1e-3)
    assert columns["append_s"] > 0
    assert columns["attend_s"] > columns["append_s"]
    assert columns["index_s"] is columns["build_s"] is columns["route_s"] is None


@pytest.mark.usefixtures("no_workers")
def test_a_sweep_measures_steps_beside_forwards(tmp_path: Path) -> None:
    run = sweep(
        seq="128,256", method=["dense", "pyramid", "flat", "sliding_window"], pass_="decode", top_k="1", block_size="16",
        heads="2:1", head_dim="16", timing_s=0.02, device="cpu", out=tmp_path / "run",
    )  # fmt: skip
    frame = run.frame
    assert set(frame["status"]) <= {"ok", "low_n"}, frame["reason"].tolist()
    assert (frame["seq_len"] == 1).all()
    assert (frame["append_s"] > 0).all()
    assert (frame["bytes_per_token"] > 0).all()
    assert frame["tokens_per_s"].tolist() == pytest.approx((1 / frame["latency_s"]).tolist())
    assert (frame["gate_error"] <= 1).all()
    assert set(frame.loc[frame["method"] == "pyramid", "backend"]) == {"reference"}


def test_the_suite_covers_what_it_says() -> None:
    cells = load_suite("decode").cells()
    assert {cell.direction for cell in cells} == {"decode"}
    assert {cell.batch for cell in cells} == {1, 8, 64}
    lengths = sorted({cell.seq_len_kv for cell in cells if cell.batch == 1})
    assert (lengths[0], lengths[-1]) == (4096, 1 << 20)
    assert {cell.seq_len_kv for cell in cells if cell.batch == 8} >= {1 << 17}
