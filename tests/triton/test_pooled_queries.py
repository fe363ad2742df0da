"""The Triton means of runs of rows against their torch twins: queries of a tile, parts of a block."""

from __future__ import annotations

import pytest
import torch

from pyramidbench.kernels.panels import panels_of
from pyramidbench.kernels.pyramid import sub_block_means as sub_block_means_reference
from pyramidbench.kernels.scores import mean_query
from pyramidbench.tiling import Tiling

# Batch, heads, queries, head dim, tile.
SMALL = [
    pytest.param((1, 1, 300, 16, 128), id="ragged-last-tile"),
    pytest.param((2, 3, 50, 24, 20), id="odd-tile-odd-dim"),
    pytest.param((1, 2, 90, 16, 16), id="several-tiles-a-program"),
    pytest.param((1, 1, 9, 16, 1), id="token-level"),
    pytest.param((1, 1, 5000, 16, 2048), id="tile-longer-than-a-load"),
]
LARGE = [
    pytest.param((1, 4, 100_001, 128, 128), id="100k"),
    pytest.param((2, 2, 3000, 256, 64), id="head-dim-256"),
]


# Batch, heads, keys, head dim, block, parts.
SMALL_PARTS = [
    pytest.param((1, 2, 300, 16, 64, 4), id="ragged-last-block"),
    pytest.param((2, 3, 101, 24, 20, 3), id="parts-that-do-not-divide"),
    pytest.param((1, 1, 40, 16, 16, 16), id="a-part-is-a-key"),
    pytest.param((1, 1, 33, 16, 16, 5), id="parts-without-a-key"),
]
LARGE_PARTS = [
    pytest.param((1, 4, 100_001, 128, 64, 4), id="100k"),
    pytest.param((2, 2, 3000, 256, 128, 8), id="head-dim-256"),
]


@pytest.mark.parametrize("sizes", SMALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_small(sizes: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    check(sizes, dtype, device)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", LARGE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_large(sizes: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    check(sizes, dtype, device)


def check(sizes: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    from pyramidbench.kernels.pooled_queries import mean_queries

    batch, heads, queries, head_dim, tile = sizes
    torch.manual_seed(0)
    q = torch.randn(batch, queries, heads, head_dim, device=device).to(dtype).transpose(1, 2)
    tiling = Tiling(queries, queries, 16, tile, True)
    out = mean_queries(q, tiling)
    assert (out.shape, out.dtype) == ((batch, heads, tiling.tiles, head_dim), torch.float32)
    for item in range(batch):
        parts = [
            mean_query(panels.queries(q[item].float()), panels.real)[..., 0, :].flatten(0, 1)
            for panels in panels_of(tiling, None, 1, heads, head_dim, q.device)
        ]
        twin = torch.cat(parts)[: tiling.tiles].transpose(0, 1)
        # fp32 sums in another order.
        assert float((out[item] - twin).abs().max()) <= 1e-6


@pytest.mark.parametrize("sizes", SMALL_PARTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_small_parts(sizes: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    check_parts(sizes, dtype, device)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", LARGE_PARTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_large_parts(sizes: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    check_parts(sizes, dtype, device)


def check_parts(sizes: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    from pyramidbench.kernels.pooled_queries import sub_block_means

    batch, heads, keys, head_dim, block, parts = sizes
    torch.manual_seed(0)
    k = torch.randn(batch, keys, heads, head_dim, device=device).to(dtype).transpose(1, 2)
    out = sub_block_means(k, block_size=block, parts=parts)
    twin = sub_block_means_reference(k, block_size=block, parts=parts)[0].flatten(2, 3)
    exact = sub_block_means_reference(k.double(), block_size=block, parts=parts)[0].flatten(2, 3)
    assert (out.shape, out.dtype) == (twin.shape, dtype)
    twin_error = float((twin - exact).abs().max())
    assert float((out - exact).abs().max()) <= 2 * (twin_error + torch.finfo(dtype).eps * float(exact.abs().max()))
