"""The attention by key block against the torch twin and fp64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from pyramidbench.kernels.attention import sparse_attention, sparse_log_sum_exp
from pyramidbench.selection import BlockSelection
from pyramidbench.tiling import Tiling

if TYPE_CHECKING:
    from pyramidbench.kernels.attention_by_key import KeyTile


@dataclass(frozen=True)
class Case:
    """One call; `keep` blocks are drawn per tile, `sets` is the number of heads with a list of their own."""

    name: str
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    head_dim_v: int
    block_size: int
    query_tile: int
    sets: int
    causal: bool = True
    keep: int = 3
    batch: int = 1
    window: int = 33


SMALL = [
    Case("token-level-group-4", 4, 1, 40, 90, 32, 32, 16, 1, 1, keep=5, window=20),
    Case("odd-group-odd-dims", 6, 2, 13, 93, 24, 40, 16, 1, 2, batch=2, keep=5),
    Case("more-queries-than-keys", 2, 1, 40, 20, 16, 16, 16, 1, 1),
    Case("block-size-no-power-of-two", 4, 2, 40, 81, 16, 16, 48, 1, 4, causal=False),
    Case("tile-of-5", 2, 1, 48, 70, 16, 16, 16, 5, 1, keep=4),
    Case("group-16", 16, 1, 12, 100, 16, 16, 16, 1, 1, keep=4),
    Case("one-query", 3, 3, 1, 50, 16, 16, 16, 1, 3),
]
LARGE = [
    Case("group-16", 16, 1, 2000, 8192, 128, 128, 64, 1, 1, keep=19, window=500),
    Case("group-4", 8, 2, 3000, 8111, 128, 128, 64, 1, 2, keep=19, window=1000),
    Case("group-1-head-dim-96-64", 2, 2, 3000, 8111, 96, 64, 64, 1, 2, keep=12, window=8000),
    Case("group-3-head-dim-256", 6, 2, 1000, 4000, 256, 256, 64, 1, 2, keep=7, window=300),
    Case("tile-of-4", 4, 2, 1001, 4000, 128, 128, 64, 4, 2, keep=7, window=100),
    Case("not-causal-ragged", 4, 2, 500, 1111, 128, 128, 64, 1, 2, causal=False, keep=6),
]


def named(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


@named(SMALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_small(case: Case, dtype: torch.dtype, device: str) -> None:
    check(case, dtype, device)


@pytest.mark.gpu
@named(LARGE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_large(case: Case, dtype: torch.dtype, device: str) -> None:
    check(case, dtype, device)


def test_rows_without_a_key(device: str) -> None:
    from pyramidbench.kernels.attention_by_key import KeyTile, attend_by_key

    tiling = Tiling(40, 20, 16, 16, True)
    q, k, v = tensors(Case("", 1, 1, 40, 20, 16, 16, 16, 16, 1), torch.float32, device)
    tile = KeyTile(16, band_rows=16, chunk_rows=32, window=30)
    out, lse = attend_by_key(q, k, v, drawn(tiling, 1, 1, 2, device), 0.25, tile)
    assert bool((out[:, :, :20] == 0).all())
    assert bool((lse[:, :, :20] == -torch.inf).all())
    assert bool(lse[:, :, 20:].isfinite().all())


@pytest.mark.parametrize(("heads", "queries", "by_key"), [(4, 2**15, True), (4, 2**14, False), (16, 2**15, False)])
def test_many_lists_of_few_rows_go_by_key(heads: int, queries: int, by_key: bool, device: str) -> None:
    from pyramidbench.kernels.attention_by_key import KeyTile
    from pyramidbench.kernels.attention_fwd import chosen_tile

    q, k = (torch.empty(1, n, queries, 16, dtype=torch.bfloat16, device=device) for n in (heads, 1))
    lists = torch.zeros(1, 1, queries, 1, dtype=torch.int32, device=device)
    selection = BlockSelection.from_indices(lists, Tiling(queries, queries, 64, 1, True))
    assert isinstance(chosen_tile(q, k, k, selection), KeyTile) == by_key


def check(case: Case, dtype: torch.dtype, device: str) -> None:
    from pyramidbench.kernels.attention_by_key import attend_by_key

    q, k, v = tensors(case, dtype, device)
    tiling = Tiling(case.queries, case.keys, case.block_size, case.query_tile, case.causal)
    selection = drawn(tiling, case.batch, case.sets, case.keep, device)
    out, lse = attend_by_key(q, k, v, selection, case.head_dim**-0.5, small_tile(case, dtype, device))
    exact = sparse_attention(q.double(), k.double(), v.double(), selection)
    exact_lse = sparse_log_sum_exp(q.double(), k.double(), selection)
    twin = sparse_attention(q, k, v, selection)
    assert out.dtype == dtype
    allowed = 2 * (float((twin - exact).abs().max()) + torch.finfo(dtype).eps * float(exact.abs().max()))
    assert float((out - exact).abs().max()) <= allowed
    assert torch.equal(lse == -torch.inf, exact_lse == -torch.inf)
    assert float((lse - exact_lse).nan_to_num(0).abs().max()) <= 1e-4


def small_tile(case: Case, dtype: torch.dtype, device: str) -> KeyTile:
    """Tile sizes that cut chunks and windows often."""
    from pyramidbench.kernels.attention_by_key import KeyTile, key_tile

    if device == "cpu":
        return KeyTile(16, band_rows=32, chunk_rows=48, combine_rows=32, combine_slots=2, window=case.window)
    chosen = key_tile(16, 32, 128, case.head_dim, case.head_dim_v, dtype.itemsize)
    return replace(chosen, chunk_rows=2 * chosen.BLOCK_M, window=case.window)


def tensors(case: Case, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """q and v as strided views, k contiguous."""
    torch.manual_seed(0)
    q = torch.randn(case.batch, case.queries, case.heads, case.head_dim, device=device, dtype=dtype).transpose(1, 2)
    k = torch.randn(case.batch, case.kv_heads, case.keys, case.head_dim, device=device, dtype=dtype)
    v = torch.randn(case.batch, case.keys, case.kv_heads, case.head_dim_v, device=device, dtype=dtype).transpose(1, 2)
    return q, k, v


def drawn(tiling: Tiling, batch: int, sets: int, keep: int, device: str) -> BlockSelection:
    """Random lists of up to `keep` blocks that the tile can see."""
    torch.manual_seed(1)
    tile, block = torch.arange(tiling.tiles), torch.arange(tiling.blocks)
    scores = torch.rand(batch, sets, tiling.tiles, tiling.blocks)
    if tiling.causal:
        last = tiling.last_position(tile)[:, None]
        scores = scores.masked_fill(block * tiling.block_size > last, -1)
        # Most lists hold the first and the last two blocks, and some lack one of them.
        always = (block == 0) | (block == last // tiling.block_size) | (block == last // tiling.block_size - 1)
        scores = torch.where(always & (torch.rand(scores.shape) < 0.9) & (scores >= 0), 2 + scores, scores)
    values, best = scores.topk(min(keep, tiling.blocks), dim=-1)
    best = best.masked_fill(values < 0, tiling.blocks).sort(-1).values
    return BlockSelection.from_indices(best.masked_fill(best == tiling.blocks, -1).to(device), tiling)
