"""Synthetic inputs: the same numbers everywhere, and attention concentrated where their docstrings say."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from pyramidbench import streams, synthetic
from pyramidbench.cell import Cell
from pyramidbench.errors import UserError
from pyramidbench.inputs import describe_input, input_label, load_inputs, synthetic_names, synthetic_summary
from pyramidbench.oracle import block_mass

CPU = torch.device("cpu")


def cell_of(name: str, length: int, *, queries: int | None = None, seed: int = 0, head_dim: int = 64) -> Cell:
    return Cell(
        method="dense",
        input=name,
        seq_len=queries or length,
        seq_len_kv=length,
        seed=seed,
        heads=2,
        kv_heads=1,
        head_dim=head_dim,
    )


@pytest.mark.parametrize("name", synthetic_names())
def test_a_synthetic_input_is_a_function_of_name_sizes_and_seed(name: str) -> None:
    first, again = (load_inputs(cell_of(name, 200), CPU) for _ in range(2))
    other = load_inputs(cell_of(name, 200, seed=1), CPU)
    for a, b, c in zip(first, again, other):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)
        assert torch.isfinite(a).all()


@pytest.mark.parametrize("name", synthetic_names())
def test_the_first_tokens_do_not_depend_on_the_length(name: str) -> None:
    # The rotation at the end of `topics` is a matrix product, whose rounding may depend on its shape.
    for short, long in zip(load_inputs(cell_of(name, 700), CPU), load_inputs(cell_of(name, 1500), CPU)):
        torch.testing.assert_close(short, long[:, :, :700], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("piece", [streams.PIECE, 64, 300, 299])
@pytest.mark.parametrize("name", synthetic_names())
def test_queries_are_the_last_positions(name: str, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "PIECE", piece)
    q, k, _ = load_inputs(cell_of(name, 300), CPU)
    q_last, k_last, _ = load_inputs(cell_of(name, 300, queries=7), CPU)
    assert torch.equal(q_last, q[:, :, -7:])
    assert torch.equal(k_last, k)


def test_the_queries_before_a_step_are_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be two thirds of all numbers: a step on a million tokens has one query a head."""
    drawn: list[int] = []

    def counted(stream: np.random.Generator, rows: int, columns: int) -> streams.Array:
        drawn.append(rows)
        return normal(stream, rows, columns)

    normal = streams.normal
    monkeypatch.setattr(streams, "normal", counted)
    monkeypatch.setattr(streams, "PIECE", 50)
    q, _, _ = load_inputs(cell_of("normal", 1000, queries=1), CPU)
    assert sum(drawn) <= 50 * q.shape[1]
    assert q.std() > 0.5


@pytest.mark.parametrize("threads", [1, 5])
@pytest.mark.parametrize("name", synthetic_names())
def test_threads_change_no_number(name: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = streams.Sizes(batch=2, heads=4, kv_heads=2, queries=3, keys=50, head_dim=24, head_dim_v=10)
    heads = [
        synthetic.MODELS[name].head(replace(sizes, queries=50), streams.Streams(name, 7, b, g))
        for b in range(2)
        for g in range(2)
    ]
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    q, k, v = synthetic.synthetic_tensors(name, sizes, 7, torch.float32)
    for at, (queries, keys, values) in enumerate(heads):
        b, g = divmod(at, 2)
        assert np.array_equal(q[b, 2 * g : 2 * g + 2], queries[:, -3:])
        assert np.array_equal(k[b, g], keys)
        assert np.array_equal(v[b, g], values)


def test_no_more_heads_are_filled_at_once_than_memory_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = streams.Sizes(batch=1, heads=6, kv_heads=6, queries=8, keys=8, head_dim=16, head_dim_v=16)
    pools: list[int] = []

    class Pool(ThreadPoolExecutor):
        def __init__(self, workers: int) -> None:
            pools.append(workers)
            super().__init__(workers)

    monkeypatch.setattr("torch.get_num_threads", lambda: 4)
    monkeypatch.setattr(synthetic, "ThreadPoolExecutor", Pool)
    for room in (1, 3, 99):
        monkeypatch.setattr(synthetic, "ARRAY_BYTES", room * 4 * synthetic.MODELS["needles"].floats(sizes))
        synthetic.synthetic_tensors("needles", sizes, 0, torch.float32)
    assert pools == [1, 3, 4]


@pytest.mark.parametrize("name", synthetic_names())
def test_sizes_dtype_sequences_and_heads(name: str) -> None:
    cell = Cell(
        method="dense", input=name, batch=2, heads=4, kv_heads=2, seq_len=70, seq_len_kv=50, head_dim=24, head_dim_v=10,
        dtype="bfloat16",
    )  # fmt: skip
    q, k, v = load_inputs(cell, CPU)
    assert (q.shape, k.shape, v.shape) == ((2, 4, 70, 24), (2, 2, 50, 24), (2, 2, 50, 10))
    assert {q.dtype, k.dtype, v.dtype} == {torch.bfloat16}
    assert not torch.equal(k[0, 0], k[0, 1])
    assert not torch.equal(k[0, 0], k[1, 0])
    assert not torch.equal(q[0, 0], q[0, 1])


def test_the_numbers_stay_the_same_between_versions() -> None:
    q, k, _ = load_inputs(cell_of("normal", 64), CPU)
    assert q[0, 1, 0, :2].tolist() == pytest.approx([-0.24875338, 1.26530409], rel=1e-6)
    assert k[0, 0, 0, :2].tolist() == pytest.approx([-1.3330938, 0.60586292], rel=1e-6)


def best_tenth(name: str, length: int = 4096) -> float:
    """Mean mass in the best 10 % of the visible blocks of 64, over the tiles of the later half."""
    q, k, _ = load_inputs(cell_of(name, length), CPU)
    tiles = torch.arange(length // 128, length // 64, 4)
    mass = block_mass(q, k, block_size=64, query_tile=64, tiles=tiles)
    best = [
        mass[:, :, i, : t + 1].topk(round(0.1 * (t + 1))).values.sum(-1).mean() for i, t in enumerate(tiles.tolist())
    ]
    return float(torch.stack(best).mean())


def test_attention_is_concentrated_on_topics_and_needles_but_not_on_normal() -> None:
    assert best_tenth("normal") == pytest.approx(0.11, abs=0.01)
    assert 0.75 < best_tenth("topics") < 0.95
    assert 0.45 < best_tenth("needles") < 0.8


def test_topics_have_a_sink_and_near_keys_gain() -> None:
    q, k, v = load_inputs(cell_of("topics", 4096), CPU)
    mass = block_mass(q, k, block_size=64, query_tile=64, tiles=torch.tensor([40, 60]))[0]
    assert (mass[:, :, 0] > 20 * mass[:, :, 1:4].mean(-1)).all()
    near, further = torch.stack([mass[:, 0, 40], mass[:, 1, 60]]), torch.stack([mass[:, 0, 30], mass[:, 1, 50]])
    assert (near > 3 * further).all()
    assert v[0, 0, 0].norm() < 0.2 * v[0, 0, 1:].norm(dim=-1).mean()


def test_a_needle_is_one_key_that_takes_most_of_its_queries_attention() -> None:
    q, k, _ = load_inputs(cell_of("needles", 4096), CPU)
    weights = (q[0, 0, -512:].double() @ k[0, 0].double().mT / 8).softmax(-1)
    largest = weights.max(-1)
    assert largest.values.median() > 0.5
    assert largest.indices.unique().numel() <= 512 // 32 + 8


def test_topics_need_room_for_their_parts() -> None:
    with pytest.raises(UserError, match="head_dim of at least 8, given 4"):
        load_inputs(cell_of("topics", 64, head_dim=4), CPU)


@pytest.mark.parametrize("name", synthetic_names())
def test_a_synthetic_input_says_what_it_models_and_what_it_cannot_show(name: str) -> None:
    assert describe_input(name) is None
    assert input_label(name) == name
    assert "cannot show" in synthetic_summary(name)
