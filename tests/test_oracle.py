"""The exact block mass and rows against a dense softmax, and their memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pyramidbench import oracle, oracle_rows
from pyramidbench.oracle import block_mass, exact_rows, sample_tiles
from pyramidbench.selection import BlockSelection
from pyramidbench.tiling import Tiling

MakeTensors = Callable[..., tuple[Tensor, Tensor, Tensor]]
MaskedDense = Callable[..., tuple[Tensor, Tensor]]
SHAPES = {
    "square": Tiling(64, 64, 16, 16, True),
    "ragged": Tiling(77, 77, 16, 12, True),
    "token-level": Tiling(40, 40, 8, 1, True),
    "more-keys": Tiling(20, 100, 16, 8, True),
    "more-queries": Tiling(60, 25, 8, 8, True),
    "full": Tiling(33, 50, 16, 8, False),
}


@pytest.fixture(params=SHAPES)
def tiling(request: pytest.FixtureRequest) -> Tiling:
    return SHAPES[request.param]


def make(tensors: MakeTensors, tiling: Tiling) -> tuple[Tensor, Tensor, Tensor]:
    return tensors(queries=tiling.seq_len_q, keys=tiling.seq_len_kv, batch=2, heads=4, kv_heads=2, dim_v=5)


def visible(tiling: Tiling) -> Tensor:
    mask = torch.ones(tiling.seq_len_q, tiling.seq_len_kv, dtype=torch.bool)
    return mask.tril(tiling.seq_len_kv - tiling.seq_len_q) if tiling.causal else mask


def mass_of(q: Tensor, k: Tensor, tiling: Tiling) -> Tensor:
    return block_mass(q, k, block_size=tiling.block_size, query_tile=tiling.query_tile, causal=tiling.causal)


def test_block_mass_is_the_mean_softmax_weight_in_each_block(tensors: MakeTensors, tiling: Tiling) -> None:
    q, k, _ = make(tensors, tiling)
    logits = q @ k.repeat_interleave(2, 1).mT * 8**-0.5
    weights = logits.masked_fill(~visible(tiling), -torch.inf).softmax(-1).nan_to_num(0)
    mass = mass_of(q, k, tiling)
    assert mass.shape == (2, 4, tiling.tiles, tiling.blocks)
    for tile in range(tiling.tiles):
        rows = weights[:, :, tile * tiling.query_tile : (tile + 1) * tiling.query_tile]
        for block in range(tiling.blocks):
            held = rows[..., block * tiling.block_size : (block + 1) * tiling.block_size].sum(-1).mean(-1)
            torch.testing.assert_close(mass[:, :, tile, block], held)


def test_mass_adds_to_the_share_of_rows_that_see_a_key(tensors: MakeTensors, tiling: Tiling) -> None:
    q, k, _ = make(tensors, tiling)
    sees = visible(tiling).any(-1).double()
    share = torch.stack([rows.mean() for rows in sees.split(tiling.query_tile)])
    torch.testing.assert_close(mass_of(q, k, tiling).sum(-1), share.expand(2, 4, -1))
    assert (share == 1).all() or tiling.seq_len_q > tiling.seq_len_kv


def test_sampled_tiles_agree_with_all_of_them(tensors: MakeTensors, tiling: Tiling) -> None:
    q, k, v = make(tensors, tiling)
    chosen = torch.tensor([0, tiling.tiles // 2, tiling.tiles - 1])
    everything = exact_rows(q, k, v, tiling, 0.3, torch.arange(tiling.tiles))
    some = exact_rows(q, k, v, tiling, 0.3, chosen)
    assert everything.output is not None
    assert some.output is not None
    torch.testing.assert_close(some.mass, everything.mass[:, :, chosen])
    torch.testing.assert_close(some.output, everything.output[:, :, chosen], equal_nan=True)


@pytest.mark.parametrize("sets", [None, 2, 4])
def test_rows_are_exact_attention_over_the_allowed_blocks(
    tensors: MakeTensors, masked_dense: MaskedDense, tiling: Tiling, sets: int | None
) -> None:
    q, k, v = make(tensors, tiling)
    mask, selection = visible(tiling).expand(2, 4, -1, -1), None
    if sets is not None:
        listed = torch.rand(2, sets, tiling.tiles, tiling.blocks, generator=torch.Generator().manual_seed(0)) < 0.5
        order = torch.where(listed, torch.arange(tiling.blocks), tiling.blocks).sort(-1).values
        selection = BlockSelection.from_indices(order.masked_fill(order == tiling.blocks, -1), tiling)
        allowed = listed.repeat_interleave(4 // sets, 1).repeat_interleave(tiling.query_tile, 2)
        allowed = allowed[:, :, : tiling.seq_len_q].repeat_interleave(tiling.block_size, 3)[..., : tiling.seq_len_kv]
        mask = mask & allowed
    expected, _ = masked_dense(q, k, v, mask)
    output = exact_rows(q, k, v, tiling, 8**-0.5, torch.arange(tiling.tiles), selection).output
    assert output is not None
    flat = output.flatten(2, 3)
    torch.testing.assert_close(flat[:, :, : tiling.seq_len_q], expected)
    assert flat[:, :, tiling.seq_len_q :].isnan().all()


def test_small_chunks_give_the_same_mass(tensors: MakeTensors, tiling: Tiling, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, _ = make(tensors, tiling)
    at_once = mass_of(q, k, tiling)
    monkeypatch.setattr(oracle_rows, "CHUNK_ELEMENTS", 1)
    torch.testing.assert_close(mass_of(q, k, tiling), at_once)


@pytest.mark.parametrize("sets", [None, 2, 4])
@pytest.mark.parametrize("queries", [1, 5])
def test_heads_of_few_rows_are_taken_together(
    tensors: MakeTensors, queries: int, sets: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of many sequences: the same numbers as of each head by itself."""
    tiling = Tiling(queries, 300, 16, 1, True)
    q, k, v = make(tensors, tiling)
    selection = None
    if sets is not None:
        lists = torch.stack([torch.randperm(18, generator=torch.Generator().manual_seed(i))[:4].sort().values
                             for i in range(2 * sets * queries)]).view(2, sets, queries, 4)  # fmt: skip
        selection = BlockSelection.from_indices(lists, tiling)
    tiles = torch.arange(queries)
    calls: list[int] = []
    honest = oracle_rows.TileRows.weights

    def counted(self: oracle_rows.TileRows, q: Tensor, keys: Tensor, allowed: Tensor | None) -> Tensor:
        calls.append(len(keys))
        return honest(self, q, keys, allowed)

    monkeypatch.setattr(oracle_rows.TileRows, "weights", counted)
    together = exact_rows(q, k, v, tiling, 0.3, tiles, selection)
    monkeypatch.setattr(oracle, "HEAD_ELEMENTS", 3 * 2 * 300 * k.shape[3])
    three = exact_rows(q, k, v, tiling, 0.3, tiles, selection)
    monkeypatch.setattr(oracle, "FEW_ROWS", 0)
    apart = exact_rows(q, k, v, tiling, 0.3, tiles, selection)
    assert calls == [4, 3, 1, 1, 1, 1, 1]
    assert together.output is not None
    for found in (together, three):
        torch.testing.assert_close(found.mass, apart.mass)
        torch.testing.assert_close(found.output, apart.output)


def test_low_precision_inputs_are_summed_in_fp32(tensors: MakeTensors) -> None:
    q, k, _ = tensors(queries=100, dtype=torch.bfloat16)
    tiling = Tiling(100, 100, 16, 16, True)
    mass = mass_of(q, k, tiling)
    assert mass.dtype == torch.float32
    torch.testing.assert_close(mass.double(), mass_of(q.double(), k.double(), tiling), rtol=0, atol=1e-6)


@pytest.mark.parametrize("heads", [1, 8])
@pytest.mark.parametrize(("length", "tile"), [(100, 1), (1000, 16), (65536, 64)])
@pytest.mark.parametrize("elements", [1, 1 << 22, 1 << 40])
def test_sampled_tiles_are_distinct_evenly_spaced_and_affordable(
    heads: int, length: int, tile: int, elements: int
) -> None:
    tiling = Tiling(length, length, 64, tile, True)
    chosen = sample_tiles(tiling, heads, elements, torch.device("cpu"))
    assert chosen.min() >= 0
    assert chosen.max() < tiling.tiles
    assert len(chosen) == tiling.tiles or len(chosen) * tile * length * heads <= max(
        elements, 16 * tile * length * heads
    )
    assert len(chosen) >= min(16, tiling.tiles)
    assert (chosen.diff() >= 1).all()
    assert chosen.diff().max() - chosen.diff().min() <= 1
    assert len(chosen) < tiling.tiles or torch.equal(chosen, torch.arange(tiling.tiles))
