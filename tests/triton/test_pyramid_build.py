"""The Triton pyramid against its torch twin."""

from __future__ import annotations

import pytest
import torch

from pyramidbench.kernels.pyramid import build_pyramid

SMALL = [
    pytest.param((1, 1, 1000, 16, 16, 2, 7, 0.35), id="two-launches"),
    pytest.param((2, 2, 555, 24, 16, 2, 6, 0.0), id="means-only"),
    pytest.param((1, 1, 700, 16, 16, 3, 4, 0.5), id="branching-3"),
    pytest.param((1, 1, 40, 16, 48, 2, 1, 0.5), id="one-ragged-block"),
    pytest.param((1, 1, 900, 16, 32, 4, 3, 1.0), id="bounds-only"),
]
LARGE = [
    pytest.param((1, 4, 100_001, 128, 64, 2, 9, 0.35), id="100k"),
    pytest.param((2, 2, 9000, 256, 64, 2, 5, 0.25), id="head-dim-256"),
]


@pytest.mark.parametrize("sizes", SMALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_small(sizes: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    check(sizes, dtype, device)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", LARGE)
def test_large(sizes: tuple[int, ...], device: str) -> None:
    check(sizes, torch.bfloat16, device)


def check(sizes: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    from pyramidbench.kernels.pyramid_build import build

    batch, heads, keys, head_dim, block_size, branching, levels, weight = sizes
    torch.manual_seed(0)
    room = torch.randn(batch, keys + 90, heads, head_dim, device=device).to(dtype)
    # Behind the last key stands what no mean, and what no maximum and no minimum may see.
    room[:, keys::3], room[:, keys + 1 :: 3], room[:, keys + 2 :: 3] = torch.nan, 6e4, -6e4
    k = room[:, :keys].transpose(1, 2)
    twin = build_pyramid(k, block_size=block_size, branching=branching, levels=levels, bound_weight=weight)
    built = build(k, block_size=block_size, branching=branching, levels=levels, bound_weight=weight)
    assert (built.offsets, built.block_size, built.branching) == (twin.offsets, twin.block_size, twin.branching)
    assert built.has_bounds == twin.has_bounds
    assert torch.equal(built.keys, twin.keys)
    assert built.nodes.dtype == dtype
    # Sums in another order, then a rounding.
    allowed = 4 * torch.finfo(dtype).eps * twin.nodes.abs().max()
    assert bool(((built.nodes - twin.nodes).abs() <= allowed).all())
