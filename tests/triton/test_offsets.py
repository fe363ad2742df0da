"""Offsets beyond int32 and grids beyond 65 535: what wraps silently elsewhere (shared with nothing smaller than a GPU)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pyramidbench.kernels.attention import sparse_attention
from pyramidbench.kernels.walk import build, route_reference
from pyramidbench.kernels.walk_rules import WalkRules
from pyramidbench.selection import BlockSelection
from pyramidbench.tiling import Tiling

pytestmark = pytest.mark.gpu
RULES = {"top_k": 8, "sink_blocks": 1, "local_blocks": 2}
MEAN = {**RULES, "beam": 2, "tile_reduce": "mean", "leaf_score": "summary"}
EXACT = {**RULES, "beam": 2, "leaf_candidates": 2, "score_rows": 16}


def fused_views(parts: int, length: int, device: str) -> tuple[Tensor, ...]:
    """q, k, v and so on of 4 heads inside one [N, parts·64·128] buffer of 6.4·10⁹ elements; the last tiles lie past 2³¹."""
    heads, dim = 64, 128
    fused = torch.empty(length, parts, heads, dim, dtype=torch.bfloat16, device=device)
    assert fused.numel() > 2**32
    mine = slice(heads - 4, heads)
    generator = torch.Generator(device).manual_seed(0)
    for part in range(parts):
        fused[:, part, mine] = torch.randn(length, 4, dim, device=device, generator=generator).to(fused.dtype)
    return tuple(fused[:, part, mine].transpose(0, 1)[None] for part in range(parts))


@pytest.mark.parametrize("rules", [MEAN, EXACT], ids=["mean", "exact"])
def test_views_of_a_fused_buffer_beyond_int32(rules: dict[str, object], device: str) -> None:
    length = 262144
    q, k, v = fused_views(3, length, device)
    selection, out = routed(q, k, v, rules, 128)
    compact = tuple(x.contiguous() for x in (q, k, v))
    again, expected = routed(*compact, rules, 128)
    assert torch.equal(selection.indices, again.indices)
    assert torch.equal(out, expected)
    last = slice(length - 256, length)
    tail = BlockSelection.from_indices(selection.indices[:, :, -2:], Tiling(256, length, 64, 128, True))
    exact = sparse_attention(compact[0][:, :, last].double(), compact[1].double(), compact[2].double(), tail)
    assert float((out[:, :, last] - exact).norm() / exact.norm()) < 5e-3


@pytest.mark.parametrize("query_tile", [16, 64])
def test_65536_heads(query_tile: int, device: str) -> None:
    """B·H = 65 536, the size at which a second grid dimension ends."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(8192, 8, 256, 64, dtype=torch.bfloat16, device=device) for _ in range(3))
    rules = {**MEAN, "top_k": 2, "start_width": 4, "beam": 1}
    selection, out = routed(q, k, v, rules, query_tile, block_size=16)
    few = torch.tensor([0, 1, 4095, 8191], device=device)
    tiling = Tiling(256, 256, 16, query_tile, True)
    pyramid = build(k[few], tiling, WalkRules(**rules))
    twin = route_reference(q[few], k[few], pyramid, tiling, WalkRules(**rules), 0.125)
    assert float((selection.indices[few] != twin).any(-1).double().mean()) < 1e-2
    listed = BlockSelection.from_indices(selection.indices[few], tiling)
    exact = sparse_attention(q[few].double(), k[few].double(), v[few].double(), listed)
    assert float((out[few] - exact).norm() / exact.norm()) < 5e-3


def test_gradients_of_views_beyond_int32(device: str) -> None:
    """The output's gradient is such a view too. The gradients of the views are those of copies, bit by bit."""
    q, k, v, d_out = fused_views(4, 196608, device)
    selection, _ = routed(q, k, v, MEAN, 128)
    found = gradients(q, k, v, d_out, selection)
    for gradient, expected in zip(found, gradients(*(x.contiguous() for x in (q, k, v, d_out)), selection)):
        assert bool(gradient.isfinite().all())
        assert torch.equal(gradient, expected)


def test_gradients_of_65536_heads(device: str) -> None:
    """B·H = 65 536, against the same calls on a few of the batch."""
    torch.manual_seed(0)
    q, k, v, d_out = (torch.randn(8192, 8, 128, 64, dtype=torch.bfloat16, device=device) for _ in range(4))
    rules = {**MEAN, "top_k": 2, "start_width": 4, "beam": 1}
    selection, _ = routed(q, k, v, rules, 64, block_size=16)
    found = gradients(q, k, v, d_out, selection)
    few = torch.tensor([0, 1, 4095, 8191], device=device)
    listed = BlockSelection.from_indices(selection.indices[few], selection.tiling)
    exact = [x[few].double().requires_grad_() for x in (q, k, v)]
    expected = torch.autograd.grad(sparse_attention(*exact, listed), exact, d_out[few].double())
    for gradient, right in zip(found, expected):
        assert float((gradient[few] - right).norm() / right.norm()) < 1e-2


def gradients(q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, selection: BlockSelection) -> tuple[Tensor, ...]:
    from pyramidbench.kernels import attention_bwd, attention_fwd

    scale = q.shape[-1] ** -0.5
    out, lse = attention_fwd.attend(q, k, v, selection, scale)
    return attention_bwd.attend_backward(q, k, v, out, lse, d_out, selection, scale)


def routed(
    q: Tensor, k: Tensor, v: Tensor, rules: dict[str, object], query_tile: int, block_size: int = 64
) -> tuple[BlockSelection, Tensor]:
    """Selection and output of the kernels alone, the pyramid built by them too."""
    from pyramidbench.kernels import attention_fwd, pyramid_build
    from pyramidbench.kernels.pyramid import walked_levels
    from pyramidbench.kernels.route import route

    walk = WalkRules(**rules)
    tiling = Tiling(q.shape[2], k.shape[2], block_size, query_tile, True)
    levels = walked_levels(walk.levels, tiling.blocks, walk.branching, walk.start_width)
    pyramid = pyramid_build.build(
        k, block_size=block_size, branching=walk.branching, levels=levels, bound_weight=walk.bounds(k.shape[-1])
    )
    scale = q.shape[-1] ** -0.5
    selection = route(q, k, pyramid, tiling, walk, scale)
    return selection, attention_fwd.attend(q, k, v, selection, scale)[0]
