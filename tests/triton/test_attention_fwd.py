"""The Triton attention against its torch twin and fp64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from pyramidbench.kernels.attention import sparse_attention, sparse_log_sum_exp
from pyramidbench.selection import BlockSelection
from pyramidbench.tiling import Tiling

if TYPE_CHECKING:
    from pyramidbench.kernels.attention_hopper import HopperTile


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


SMALL = [
    Case("one-tile-per-block", 2, 1, 100, 100, 16, 16, 32, 32, 1),
    Case("odd-group-odd-dims-small-blocks", 6, 2, 50, 93, 24, 40, 16, 16, 2, batch=2),
    Case("more-queries-than-keys", 2, 1, 50, 30, 16, 16, 16, 16, 1),
    Case("block-size-no-power-of-two", 4, 2, 40, 81, 16, 16, 48, 16, 4, causal=False),
    Case("token-level", 4, 1, 9, 90, 32, 32, 32, 1, 1),
    Case("tile-over-several-blocks", 2, 2, 140, 200, 16, 16, 32, 128, 2),
]
LARGE = [
    Case("tile-128", 4, 4, 2000, 2000, 128, 128, 64, 128, 4, keep=12),
    Case("tile-64-group-5", 10, 2, 700, 1300, 128, 128, 64, 64, 2, keep=6),
    Case("tile-16-group-4", 8, 2, 500, 2000, 64, 64, 64, 16, 2, keep=6),
    Case("token-level-group-16", 16, 1, 300, 3000, 128, 128, 64, 1, 1, keep=8),
    Case("head-dim-96", 4, 2, 600, 900, 96, 64, 64, 128, 2, keep=6),
    Case("head-dim-256", 3, 1, 300, 1500, 256, 256, 64, 64, 1, keep=6),
    Case("head-dim-256-tile-128", 2, 1, 300, 1500, 256, 128, 64, 128, 1, keep=6),
    Case("blocks-of-128", 4, 4, 700, 700, 128, 128, 128, 128, 4, keep=3),
    Case("blocks-of-16", 4, 4, 700, 700, 128, 128, 16, 128, 4, keep=20),
    Case("not-causal-ragged", 2, 2, 500, 1111, 128, 128, 64, 128, 2, causal=False, keep=6),
]
# What the Hopper kernel takes; some have more programs than any Hopper GPU has multiprocessors, so that one does several.
HOPPER = [
    Case("one-tile-one-block", 1, 1, 64, 64, 128, 128, 64, 128, 1),
    Case("ragged-ends", 4, 4, 2000, 2000, 128, 128, 64, 128, 4, keep=12, batch=3),
    Case("odd-counts", 4, 4, 2000, 2000, 128, 128, 64, 128, 4, keep=9),
    Case("tile-64", 4, 4, 700, 1300, 128, 128, 64, 64, 4, keep=6, batch=4),
    Case("tile-64-group-5", 10, 2, 700, 1300, 128, 128, 64, 64, 2, keep=6),
    Case("tile-64-blocks-of-128", 4, 4, 700, 1300, 128, 128, 128, 64, 4, keep=3),
    Case("tile-16-group-4", 8, 2, 500, 2000, 128, 128, 64, 16, 2, keep=12),
    Case("tile-16-group-8-dim-64", 16, 2, 500, 2000, 64, 64, 64, 16, 2, keep=12),
    Case("more-queries-than-keys", 2, 2, 900, 500, 128, 128, 64, 128, 2, keep=6),
    Case("dims-64-and-128-not-causal", 2, 2, 500, 1111, 64, 128, 64, 128, 2, causal=False, keep=6),
    Case("blocks-of-128", 4, 4, 1500, 1500, 128, 128, 128, 128, 4, keep=5),
    Case("long-lists", 2, 2, 9000, 9000, 128, 128, 64, 128, 2, keep=140),
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


@pytest.mark.gpu
@named(HOPPER)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_hopper(case: Case, dtype: torch.dtype, device: str) -> None:
    from pyramidbench.kernels.attention_fwd import attend
    from pyramidbench.kernels.attention_hopper import hopper_gap, hopper_tile

    q, k, v, selection = call(case, dtype, device)
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the kernel's matrix instructions are Hopper's alone")
    assert hopper_gap(q, v, selection) is None
    rows = case.heads // case.sets * case.query_tile
    tile = hopper_tile(rows, case.block_size, case.head_dim, case.head_dim_v)
    check(case, dtype, device, tile)
    out, lse = attend(q, k, v, selection, case.head_dim**-0.5, tile)
    for _ in range(3):
        again, again_lse = attend(q, k, v, selection, case.head_dim**-0.5, tile)
        assert torch.equal(again, out)
        assert torch.equal(again_lse, lse)


def test_rows_without_a_key(device: str) -> None:
    from pyramidbench.kernels.attention_fwd import attend

    tiling = Tiling(40, 20, 16, 16, True)
    q, k, v = tensors(Case("", 1, 1, 40, 20, 16, 16, 16, 16, 1), torch.float32, device)
    out, lse = attend(q, k, v, drawn(tiling, 1, 1, 2, device), 0.25)
    assert bool((out[:, :, :20] == 0).all())
    assert bool((lse[:, :, :20] == -torch.inf).all())
    assert bool(lse[:, :, 20:].isfinite().all())


def check(case: Case, dtype: torch.dtype, device: str, tile: HopperTile | None = None) -> None:
    """The kernel that `attend` chooses, or the one that `tile` names, against the twin and fp64."""
    from pyramidbench.kernels.attention_fwd import attend

    q, k, v, selection = call(case, dtype, device)
    out, lse = attend(q, k, v, selection, case.head_dim**-0.5, tile)
    exact = sparse_attention(q.double(), k.double(), v.double(), selection)
    exact_lse = sparse_log_sum_exp(q.double(), k.double(), selection)
    twin = sparse_attention(q, k, v, selection)
    assert out.dtype == dtype
    allowed = 2 * (float((twin - exact).abs().max()) + torch.finfo(dtype).eps * float(exact.abs().max()))
    assert float((out - exact).abs().max()) <= allowed
    assert torch.equal(lse == -torch.inf, exact_lse == -torch.inf)
    assert float((lse - exact_lse).nan_to_num(0).abs().max()) <= 1e-4


def call(case: Case, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor, BlockSelection]:
    tiling = Tiling(case.queries, case.keys, case.block_size, case.query_tile, case.causal)
    return *tensors(case, dtype, device), drawn(tiling, case.batch, case.sets, case.keep, device)


def tensors(case: Case, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """q and v as strided views, k contiguous."""
    torch.manual_seed(0)
    q = torch.randn(case.batch, case.queries, case.heads, case.head_dim, device=device, dtype=dtype).transpose(1, 2)
    k = torch.randn(case.batch, case.kv_heads, case.keys, case.head_dim, device=device, dtype=dtype)
    v = torch.randn(case.batch, case.keys, case.kv_heads, case.head_dim_v, device=device, dtype=dtype).transpose(1, 2)
    return q, k, v


def drawn(tiling: Tiling, batch: int, sets: int, keep: int, device: str) -> BlockSelection:
    """Random lists of up to `keep` blocks that the tile can see, with the last one that it overlaps."""
    torch.manual_seed(1)
    tile, block = torch.arange(tiling.tiles), torch.arange(tiling.blocks)
    scores = torch.rand(batch, sets, tiling.tiles, tiling.blocks)
    if tiling.causal:
        last = tiling.last_position(tile)[:, None]
        scores = scores.masked_fill(block * tiling.block_size > last, -1)
        scores = scores.masked_fill(block == last // tiling.block_size, 2)
    values, best = scores.topk(min(keep, tiling.blocks), dim=-1)
    best = best.masked_fill(values < 0, tiling.blocks).sort(-1).values
    return BlockSelection.from_indices(best.masked_fill(best == tiling.blocks, -1).to(device), tiling)
