"""Node summaries against means, maxima and minima computed one node at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import Tensor

from pyramidbench.kernels.pyramid import build_pyramid, level_count, sub_block_means, walked_levels

MakeTensors = Callable[..., tuple[Tensor, Tensor, Tensor]]
LENGTHS = [1, 15, 16, 17, 49, 100, 128, 1000]


def expected_node(k: Tensor, level: int, node: int, size: int, branching: int, alpha: float) -> tuple[Tensor, int]:
    """[u, w] of one node over k [B, G, N, D] (u alone when α is 0), and its number of keys."""
    width = size * branching**level
    keys = k[:, :, node * width : (node + 1) * width]
    mean = keys.mean(2)
    if alpha == 0:
        return mean, keys.shape[2]
    ends = [(1 - alpha) * mean + alpha * end for end in (keys.amax(2), keys.amin(2))]
    return torch.cat(ends, -1), keys.shape[2]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("branching", [2, 3, 4])
@pytest.mark.parametrize("alpha", [0, 0.5, 1])
def test_every_node_holds_the_summary_of_its_keys(
    tensors: MakeTensors, length: int, branching: int, alpha: float
) -> None:
    _, k, _ = tensors(queries=length, batch=2, heads=2, kv_heads=2, dim=5)
    levels = level_count(-(-length // 16), branching)
    pyramid = build_pyramid(k, block_size=16, branching=branching, levels=levels, bound_weight=alpha)
    assert pyramid.size(levels - 1) == 1
    assert pyramid.has_bounds == (alpha > 0)
    assert pyramid.nodes.shape == (2, 2, pyramid.offsets[-1], 10 if alpha else 5)
    for level in range(levels):
        assert pyramid.size(level) == -(-length // (16 * branching**level))
        for node in range(pyramid.size(level)):
            summary, keys = expected_node(k, level, node, 16, branching, alpha)
            torch.testing.assert_close(pyramid.at(level)[:, :, node], summary)
            assert pyramid.log_keys(level)[node] == torch.tensor(float(keys)).double().log()


def test_bounds_are_the_extremes_exactly(tensors: MakeTensors) -> None:
    _, k, _ = tensors(queries=100)
    pyramid = build_pyramid(k, block_size=8, branching=3, levels=4, bound_weight=1)
    high, low = pyramid.at(3)[0, 0, 0].chunk(2)
    assert torch.equal(high, k[0, 0].amax(0))
    assert torch.equal(low, k[0, 0].amin(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("alpha", [0, 0.25])
def test_low_precision_keys_round_only_once(tensors: MakeTensors, dtype: torch.dtype, alpha: float) -> None:
    """Sums run in fp32, so a stored summary is within one rounding of its float64 value, at the root too."""
    _, k, _ = tensors(queries=1000, dtype=dtype)
    pyramid = build_pyramid(k, block_size=16, branching=2, levels=7, bound_weight=alpha)
    assert pyramid.nodes.dtype == dtype
    for level in range(7):
        for node in range(pyramid.size(level)):
            summary, _ = expected_node(k.double(), level, node, 16, 2, alpha)
            stored = pyramid.at(level)[:, :, node].double()
            assert ((stored - summary).abs() <= 0.51 * torch.finfo(dtype).eps * summary.abs() + 1e-7).all()


@pytest.mark.parametrize("length", [15, 16, 17, 49, 1000])
@pytest.mark.parametrize("alpha", [0, 0.5])
def test_memory_past_the_last_key_is_not_read(tensors: MakeTensors, length: int, alpha: float) -> None:
    _, k, _ = tensors(queries=length)
    buffer = torch.full((1, 1, length + 64, 8), torch.nan, dtype=k.dtype)
    buffer[:, :, :length] = k
    view = buffer[:, :, :length]
    arguments = {"block_size": 16, "branching": 3, "levels": 3, "bound_weight": alpha}
    assert torch.equal(build_pyramid(view, **arguments).nodes, build_pyramid(k, **arguments).nodes)  # type: ignore[arg-type]
    for padded, exact in zip(
        sub_block_means(view, block_size=16, parts=4), sub_block_means(k, block_size=16, parts=4), strict=True
    ):
        assert torch.equal(padded, exact)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 100])
@pytest.mark.parametrize("parts", [1, 3, 4, 16])
def test_parts_of_a_block_hold_the_means_of_their_keys(tensors: MakeTensors, length: int, parts: int) -> None:
    _, k, _ = tensors(queries=length)
    means, counts = sub_block_means(k, block_size=16, parts=parts)
    size = -(-16 // parts)
    assert means.shape == (1, 1, -(-length // 16), parts, 8)
    for block in range(means.shape[2]):
        for part in range(parts):
            first = block * 16 + part * size
            keys = k[:, :, first : min(first + size, (block + 1) * 16, length)]
            assert counts[block, part] == keys.shape[2]
            expected = keys.mean(2) if keys.shape[2] else torch.zeros(1, 1, 8, dtype=k.dtype)
            torch.testing.assert_close(means[:, :, block, part], expected)


@pytest.mark.parametrize(
    ("levels", "blocks", "branching", "start_width", "walked"),
    [
        ("full", 1, 2, 64, 1),
        ("full", 2, 2, 64, 2),
        ("full", 1000, 2, 64, 11),
        ("full", 1000, 3, 64, 8),
        ("auto", 64, 2, 64, 1),
        ("auto", 65, 2, 64, 2),
        ("auto", 1024, 2, 64, 5),
        ("auto", 1024, 4, 64, 3),
        ("auto", 1000, 2, 1, 11),
        (1, 1000, 2, 64, 1),
        (3, 1000, 2, 64, 3),
        (99, 1000, 2, 64, 11),
    ],
)
def test_levels_walked(
    levels: Literal["full", "auto"] | int, blocks: int, branching: int, start_width: int, walked: int
) -> None:
    assert walked_levels(levels, blocks, branching, start_width) == walked
