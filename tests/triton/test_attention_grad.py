"""The differentiable operator on the Triton kernels: wiring, lists with padding, and torch's own tools around it."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from pyramidbench.api import pyramid_attention
from pyramidbench.kernels.attention_grad import attention
from pyramidbench.selection import BlockSelection
from pyramidbench.tiling import Tiling


def call_of(device: str, tiling: Tiling, padding: int = 0) -> tuple[list[Tensor], BlockSelection]:
    """Leaves of 4 query heads and 2 key/value heads, and lists of the first block and the tile's own, with padding."""
    generator = torch.Generator().manual_seed(0)
    lengths = (tiling.seq_len_q, tiling.seq_len_kv, tiling.seq_len_kv)
    leaves = [
        torch.randn(1, heads, length, dim, generator=generator).to(device).requires_grad_()
        for heads, length, dim in zip((4, 2, 2), lengths, (16, 16, 32))
    ]
    own = tiling.last_position(torch.arange(tiling.tiles)) // tiling.block_size
    listed = torch.stack([torch.zeros_like(own), own], -1)
    listed[own == 0, 1] = -1
    listed[own < 0] = -1
    listed = torch.nn.functional.pad(listed, (0, padding), value=-1)
    return leaves, BlockSelection.from_indices(listed.expand(1, 2, -1, -1).contiguous().to(device), tiling)


def gradients(output: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    return torch.autograd.grad(output, leaves, upstream)


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize(
    "tiling", [Tiling(41, 41, 16, 16, True), Tiling(5, 37, 16, 1, True), Tiling(40, 20, 16, 8, True)], ids=str
)
def test_gradients_are_the_twin_s(device: str, tiling: Tiling, padding: int) -> None:
    leaves, selection = call_of(device, tiling, padding)
    output, expected = (attention(*leaves, selection, 0.3, backend) for backend in ("triton", "reference"))
    torch.testing.assert_close(output, expected, rtol=1e-3, atol=1e-3)
    for one, other in zip(gradients(output, leaves), gradients(expected, leaves)):
        assert one.is_contiguous()
        torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-3)


def test_a_sum_and_a_transposed_view_can_come_back(device: str) -> None:
    leaves, selection = call_of(device, Tiling(41, 41, 16, 16, True))
    both = []
    for backend in ("triton", "reference"):
        output = attention(*leaves, selection, 0.3, backend)
        both.append(torch.autograd.grad(output.sum(), leaves))
        output = attention(*leaves, selection, 0.3, backend)
        both.append(torch.autograd.grad(output.transpose(1, 2).flatten(2).square().sum(), leaves))
    for one, other in zip([*both[0], *both[1]], [*both[2], *both[3]]):
        torch.testing.assert_close(one, other, rtol=2e-3, atol=5e-3)


def test_checkpointed_compiled_and_without_gradients(device: str) -> None:
    leaves, selection = call_of(device, Tiling(41, 41, 16, 16, True))

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, selection, 0.3, "triton")

    expected = call(*leaves)
    whole = gradients(expected, leaves)
    torch._dynamo.reset()
    for again in (
        checkpoint(call, *leaves, use_reentrant=False),
        torch.compile(call, fullgraph=True, backend="aot_eager")(*leaves),
    ):
        assert torch.equal(again, expected)
        assert all(torch.equal(one, other) for one, other in zip(gradients(again, leaves), whole))
    with torch.no_grad():
        assert torch.equal(call(*leaves), expected)


@pytest.mark.gpu
@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
)  # inductor's own import
@pytest.mark.parametrize("head_reduce", ["sum_prob", "none"])
def test_the_whole_call_compiled_on_a_gpu(device: str, head_reduce: Literal["sum_prob", "none"]) -> None:
    """fp32 leaves under autocast: one graph for the first length and one for all others, the kernels' own gradients."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return pyramid_attention(q, k, v, top_k=4, preset="fast", head_reduce=head_reduce, implementation="triton")

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for length in (1000, 2049, 3000, 4097):
        leaves, _ = call_of(device, Tiling(length, length, 64, 128, True))
        output, expected = compiled(*leaves), call(*leaves)
        assert output.dtype == torch.bfloat16
        assert torch.equal(output, expected)
        assert all(torch.equal(*pair) for pair in zip(gradients(output, leaves), gradients(expected, leaves)))
    assert counter.frame_count == 2
