"""Gradients of attention over listed blocks: right, from nowhere but the past, and as an operator among torch's own tools."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import pyramidbench
from pyramidbench import choosing
from pyramidbench.kernels import attention_grad, panels
from pyramidbench.kernels.attention import sparse_attention, sparse_log_sum_exp
from pyramidbench.kernels.attention_grad import attention
from pyramidbench.selection import BlockSelection
from pyramidbench.tiling import Tiling

MakeTensors = Callable[..., tuple[Tensor, Tensor, Tensor]]
MaskedDense = Callable[..., tuple[Tensor, Tensor]]
SMALL: dict[str, Any] = {"top_k": 2, "block_size": 8, "query_tile": 8}


def some_blocks(tiling: Tiling, *, sets: int = 1, batch: int = 1, empty: int = 0) -> BlockSelection:
    """Random visible blocks for every tile; the first `empty` tiles list none."""
    draw = torch.rand(batch, sets, tiling.tiles, tiling.blocks, generator=torch.Generator().manual_seed(0)) < 0.5
    tile, block = torch.arange(tiling.tiles)[:, None], torch.arange(tiling.blocks)
    if tiling.causal:
        draw &= block * tiling.block_size <= tiling.last_position(tile)
    draw[:, :, :empty] = False
    listed = torch.where(draw, block, tiling.blocks).sort(-1).values
    selection = BlockSelection.from_indices(listed.masked_fill(listed == tiling.blocks, -1), tiling)
    selection.check()
    return selection


def element_mask(selection: BlockSelection, heads: int) -> Tensor:
    """bool [B, H, M, N]: which keys a query sees."""
    tiling = selection.tiling
    blocks = selection.mask().repeat_interleave(heads // selection.indices.shape[1], 1)
    rows = blocks.repeat_interleave(tiling.query_tile, 2)[:, :, : tiling.seq_len_q]
    mask = rows.repeat_interleave(tiling.block_size, 3)[..., : tiling.seq_len_kv]
    if tiling.causal:
        mask = mask & torch.ones(tiling.seq_len_q, tiling.seq_len_kv, dtype=torch.bool).tril(tiling.offset)
    return mask


def gradients(output: Tensor, leaves: tuple[Tensor, ...] | list[Tensor]) -> tuple[Tensor, ...]:
    """For a seeded gradient of the output."""
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return torch.autograd.grad(output, leaves, upstream.to(output.dtype))


SHAPES = {
    "token-level": Tiling(20, 20, 4, 1, True),
    "tile": Tiling(32, 32, 8, 8, True),
    "ragged": Tiling(37, 37, 8, 6, True),
    "a-block-and-one": Tiling(9, 9, 8, 4, True),
    "two-blocks-and-17": Tiling(49, 49, 16, 16, True),
    "one-query": Tiling(1, 30, 8, 4, True),
    "more-keys": Tiling(11, 30, 8, 4, True),
    "more-queries": Tiling(30, 11, 4, 8, True),
    "full": Tiling(20, 27, 8, 4, False),
    "full-token-level": Tiling(27, 20, 8, 1, False),
}
HEADS = {"1:1": (1, 1, 1), "3:1": (3, 1, 1), "4:1": (4, 1, 1), "4:2": (4, 2, 2), "4:2-by-query-head": (4, 2, 4)}


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("tiling", [Tiling(4, 6, 2, 1, True), Tiling(6, 4, 2, 3, True), Tiling(4, 5, 2, 3, False)])
def test_gradcheck(tensors: MakeTensors, tiling: Tiling, heads: str) -> None:
    query_heads, kv_heads, sets = HEADS[heads]
    q, k, v = tensors(
        queries=tiling.seq_len_q, keys=tiling.seq_len_kv, heads=query_heads, kv_heads=kv_heads, dim=2, dim_v=1
    )
    selection = some_blocks(tiling, sets=sets, empty=1)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradcheck(lambda *x: attention(*x, selection, 0.7, "reference"), leaves)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_are_those_of_dense_attention_under_the_mask(
    tensors: MakeTensors, masked_dense: MaskedDense, shape: str, heads: str
) -> None:
    tiling, (query_heads, kv_heads, sets) = SHAPES[shape], HEADS[heads]
    lengths = {"queries": tiling.seq_len_q, "keys": tiling.seq_len_kv}
    q, k, v = tensors(**lengths, batch=2, heads=query_heads, kv_heads=kv_heads, dim=6, dim_v=10)
    selection = some_blocks(tiling, sets=sets, batch=2, empty=int(tiling.tiles > 1))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    expected, _ = masked_dense(q, k, v, element_mask(selection, query_heads), 0.3)
    output = attention(q, k, v, selection, 0.3, "reference")
    for one, other in zip(gradients(output, leaves), gradients(expected, leaves), strict=True):
        torch.testing.assert_close(one, other.nan_to_num(0), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_error_is_that_of_the_dtype(tensors: MakeTensors, masked_dense: MaskedDense, dtype: torch.dtype) -> None:
    q, k, v = (x.requires_grad_() for x in tensors(queries=60, heads=4, kv_heads=2, dim=16, dtype=dtype))
    selection = some_blocks(Tiling(60, 60, 8, 4, True), sets=2)
    mask = element_mask(selection, 4)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    exact = gradients(masked_dense(*wide, mask)[0], wide)
    logits = (q @ k.repeat_interleave(2, 1).mT * 0.25).masked_fill(~mask, -torch.inf)
    plain = logits.masked_fill(~mask.any(-1, keepdim=True), 0).softmax(-1).masked_fill(~mask, 0)
    rough = gradients(plain @ v.repeat_interleave(2, 1), (q, k, v))
    found = gradients(attention(q, k, v, selection, 0.25, "reference"), (q, k, v))
    for ours, theirs, expected in zip(found, rough, exact, strict=True):
        assert ours.dtype == dtype
        expected = expected.nan_to_num(0)
        slack = torch.finfo(dtype).eps * float(expected.abs().max())
        allowed = 2 * (float((theirs.double() - expected).abs().max()) + slack)
        assert float((ours.double() - expected).abs().max()) <= allowed


@pytest.mark.parametrize("tile", [1, 8])
def test_rows_without_a_key_give_and_get_no_gradient(tensors: MakeTensors, tile: int) -> None:
    leaves = [x.requires_grad_() for x in tensors(queries=40)]
    selection = some_blocks(Tiling(40, 40, 8, tile, True), empty=24 // tile)
    output = attention(*leaves, selection, 0.3, "reference")
    found = torch.autograd.grad(output[:, :, :24].sum() + output[:, :, :24].square().sum(), leaves, retain_graph=True)
    assert all(bool((gradient == 0).all()) for gradient in found)
    found = gradients(output, leaves)
    assert (found[0][:, :, :24] == 0).all()
    assert all(bool(gradient.isfinite().all()) and float(gradient.abs().sum()) > 0 for gradient in found)


@pytest.mark.parametrize("tile", [1, 4, 64])
@pytest.mark.parametrize("width", [0, 3])
def test_nothing_selected_at_all_gives_zeros(tensors: MakeTensors, tile: int, width: int) -> None:
    leaves = [x.requires_grad_() for x in tensors(queries=20)]
    tiling = Tiling(20, 20, 8, tile, True)
    selection = BlockSelection.from_indices(torch.full((1, 1, tiling.tiles, width), -1), tiling)
    output = attention(*leaves, selection, 0.3, "reference")
    assert all(bool((gradient == 0).all()) for gradient in (output, *gradients(output, leaves)))


@pytest.mark.parametrize("tile", [1, 8, 12])
@pytest.mark.parametrize("changed", [5, 24, 33])
def test_no_gradient_comes_from_the_future(tensors: MakeTensors, tile: int, changed: int) -> None:
    """Later keys and values change no bit of earlier rows' dq; they get exactly nothing from earlier outputs."""
    q, k, v = tensors(queries=40, dtype=torch.float32)
    selection = some_blocks(Tiling(40, 40, 8, tile, True))
    found = []
    for factor in (1, 1e4):
        later = torch.ones(40, 1)
        later[changed:] = factor
        leaves = [x.clone().requires_grad_() for x in (q, k * later, v * later)]
        output = attention(*leaves, selection, 0.3, "reference")
        found.append(torch.autograd.grad(output[:, :, :changed].square().sum(), leaves))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert all(bool((gradient[:, :, changed:] == 0).all()) for gradient in found[0])


@pytest.mark.parametrize("tile", [1, 8])
def test_chunks_do_not_change_the_gradients(tensors: MakeTensors, monkeypatch: pytest.MonkeyPatch, tile: int) -> None:
    leaves = [x.requires_grad_() for x in tensors(queries=150)]
    selection = some_blocks(Tiling(150, 150, 8, tile, True))
    whole = gradients(attention(*leaves, selection, 0.3, "reference"), leaves)
    monkeypatch.setattr(panels, "CHUNK_ELEMENTS", 1)
    for one, other in zip(gradients(attention(*leaves, selection, 0.3, "reference"), leaves), whole, strict=True):
        torch.testing.assert_close(one, other)


def test_one_block_that_every_query_lists(tensors: MakeTensors, masked_dense: MaskedDense) -> None:
    leaves = [x.requires_grad_() for x in tensors(queries=200)]
    tiling = Tiling(200, 200, 8, 1, True)
    selection = BlockSelection.from_indices(torch.zeros(1, 1, 200, 1, dtype=torch.int32), tiling)
    expected, _ = masked_dense(*leaves, element_mask(selection, 2), 0.3)
    found = gradients(attention(*leaves, selection, 0.3, "reference"), leaves)
    for one, other in zip(found, gradients(expected, leaves), strict=True):
        torch.testing.assert_close(one, other)
    assert (found[1][:, :, 8:] == 0).all()


def test_memory_that_nobody_wrote_reaches_no_gradient(tensors: MakeTensors, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory holds NaN, and so do the places around strided inputs."""
    length = 37
    q, k, v = tensors(queries=length)
    selection = some_blocks(Tiling(length, length, 8, 6, True))
    expected = gradients(
        attention(*(leaves := [x.requires_grad_() for x in (q, k, v)]), selection, 0.3, "reference"), leaves
    )
    empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *a, **b: x.fill_(torch.nan) if (x := empty(*a, **b)).is_floating_point() else x
    )
    wide = [torch.nn.functional.pad(x.detach(), (0, 3, 0, 40), value=torch.nan).requires_grad_() for x in (q, k, v)]
    views = [x[:, :, :length, :8] for x in wide]
    for one, other in zip(gradients(attention(*views, selection, 0.3, "reference"), wide), expected, strict=True):
        assert torch.equal(one[:, :, :length, :8], other)


@pytest.mark.parametrize("wanted", ["q", "k", "v", "qk", "qv", "kv"])
def test_some_inputs_alone_can_require_a_gradient(tensors: MakeTensors, wanted: str) -> None:
    selection = some_blocks(Tiling(40, 40, 8, 4, True))
    leaves = dict(zip("qkv", tensors(queries=40), strict=True))
    every = [x.detach().requires_grad_() for x in leaves.values()]
    expected = dict(zip("qkv", gradients(attention(*every, selection, 0.3, "reference"), every), strict=True))
    for name in wanted:
        leaves[name].requires_grad_()
    output = attention(*leaves.values(), selection, 0.3, "reference")
    found = gradients(output, [leaves[name] for name in wanted])
    assert all(torch.equal(gradient, expected[name]) for name, gradient in zip(wanted, found, strict=True))


def test_one_tensor_as_queries_keys_and_values(tensors: MakeTensors) -> None:
    selection = some_blocks(Tiling(40, 40, 8, 4, True), sets=2)
    x, _, _ = tensors(queries=40, heads=2)
    x.requires_grad_()
    parts = [x.detach().clone().requires_grad_() for _ in range(3)]
    expected = sum(gradients(attention(*parts, selection, 0.3, "reference"), parts))
    torch.testing.assert_close(gradients(attention(x, x, x, selection, 0.3, "reference"), [x])[0], expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_without_gradients_the_output_is_the_same(tensors: MakeTensors, mode: Callable[[], Any]) -> None:
    q, k, v = (x.requires_grad_() for x in tensors(queries=40))
    tracked = pyramidbench.pyramid_attention(q, k, v, **SMALL)
    with mode():
        output = pyramidbench.pyramid_attention(q, k, v, **SMALL)
    assert tracked.requires_grad
    assert not output.requires_grad
    assert torch.equal(output, tracked)
    assert not pyramidbench.pyramid_attention(q.detach(), k.detach(), v.detach(), **SMALL).requires_grad


def test_a_second_derivative_is_refused(tensors: MakeTensors) -> None:
    leaves = [x.requires_grad_() for x in tensors(queries=20)]
    output = attention(*leaves, some_blocks(Tiling(20, 20, 8, 4, True)), 0.3, "reference")
    first = torch.autograd.grad(output.square().sum(), leaves, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(first[0].sum(), leaves)


def test_what_is_kept_for_the_backward_is_inputs_output_log_sum_exp_and_lists(tensors: MakeTensors) -> None:
    q, k, v = (x.requires_grad_() for x in tensors(queries=40, heads=4, kv_heads=2))
    selection = some_blocks(Tiling(40, 40, 8, 4, True), sets=2)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        output = attention(q, k, v, selection, 0.3, "reference")
    expected = [q, k, v, output, sparse_log_sum_exp(q, k, selection, scale=0.3), selection.indices, selection.counts]
    assert [x.shape for x in kept] == [x.shape for x in expected]
    assert all(torch.equal(one, other) for one, other in zip(kept, expected, strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(tensors: MakeTensors, reentrant: bool) -> None:
    leaves = [x.requires_grad_() for x in tensors(queries=40)]

    def call(*x: Tensor) -> Tensor:
        return pyramidbench.pyramid_attention(*x, **SMALL)

    expected = gradients(call(*leaves), leaves)
    checkpoint(call, *leaves, use_reentrant=reentrant).backward(
        torch.randn(1, 2, 40, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    )
    assert all(torch.equal(x.grad, other) for x, other in zip(leaves, expected, strict=True) if x.grad is not None)
    assert all(x.grad is not None for x in leaves)


@pytest.mark.parametrize(
    "dtypes",
    [(torch.float32,) * 3, (torch.float32, torch.bfloat16, torch.float16), (torch.float64,) * 3],
    ids=["float32", "mixed", "float64"],
)
def test_autocast_casts_as_for_dense_attention(tensors: MakeTensors, dtypes: tuple[torch.dtype, ...]) -> None:
    leaves = [x.to(dtype).requires_grad_() for x, dtype in zip(tensors(queries=40, kv_heads=2), dtypes, strict=True)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = pyramidbench.pyramid_attention(*leaves, **SMALL)
        dense = scaled_dot_product_attention(*leaves)
        chosen = pyramidbench.select_blocks(*leaves[:2], **SMALL)
        again = pyramidbench.sparse_attention(*leaves, chosen)
    assert output.dtype == dense.dtype
    assert torch.equal(output, again)
    cast = [x.detach().to(dense.dtype).requires_grad_() for x in leaves]
    outside = pyramidbench.pyramid_attention(*cast, **SMALL)
    assert torch.equal(output, outside)
    for leaf, found, expected in zip(leaves, gradients(output, leaves), gradients(outside, cast), strict=True):
        assert found.dtype == leaf.dtype
        assert torch.equal(found, expected.to(leaf.dtype))


def test_backward_under_autocast_is_the_same(tensors: MakeTensors) -> None:
    leaves = [x.requires_grad_() for x in tensors(queries=40, dtype=torch.float32)]
    selection = some_blocks(Tiling(40, 40, 8, 4, True))
    expected = gradients(attention(*leaves, selection, 0.3, "reference"), leaves)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = gradients(attention(*leaves, selection, 0.3, "reference"), leaves)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("needs_gradients", [True, False])
def test_the_operators_keep_torch_s_rules(tensors: MakeTensors, needs_gradients: bool) -> None:
    q, k, v = tensors(queries=20, heads=4, kv_heads=2, dim_v=12)
    selection = some_blocks(Tiling(20, 20, 8, 4, True), sets=2)
    lists = (selection.indices, selection.counts, 8, 4, True, 0.3, "reference")
    out, lse = attention_grad._forward(q, k, v, *lists, True)
    leaves = [x.requires_grad_(needs_gradients) for x in (q, k, v)]
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(attention_grad._attend, (*leaves, *lists, needs_gradients), test_utils=checks)
    plain = [x.detach() for x in leaves]
    torch.library.opcheck(attention_grad._attend_backward, (*plain, out, lse, out, *lists), test_utils=checks)
    text = choosing.Chooser.of("pyramid", SMALL).text
    torch.library.opcheck(choosing._choose, (*plain[:2], text, True, 0.3), test_utils=checks)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def choose_then_attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    selection = pyramidbench.select_blocks(q, k, method="pyramid:fast", **SMALL)
    return pyramidbench.sparse_attention(q, k, v, selection)


CALLS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "pyramid_attention": lambda q, k, v: pyramidbench.pyramid_attention(q, k, v, **SMALL),
    "per-query-head": lambda q, k, v: pyramidbench.pyramid_attention(q, k, v, head_reduce="none", **SMALL),
    "not-causal": lambda q, k, v: pyramidbench.pyramid_attention(q, k, v, causal=False, sink_blocks=1, **SMALL),
    "choose-then-attend": choose_then_attend,
}


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad], ids=["gradients", "no_grad"])
@pytest.mark.parametrize("call", CALLS)
def test_compiled_whole_for_any_length(
    tensors: MakeTensors, call: str, mode: Callable[[], AbstractContextManager[None]]
) -> None:
    """No graph break; a second graph for the lengths that follow the first, and no third."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(CALLS[call], fullgraph=True, backend=counter)
    for length in (30, 61, 97, 100, 150):
        leaves = [x.requires_grad_() for x in tensors(queries=length, heads=4, kv_heads=2, dtype=torch.float32)]
        with mode():
            output, expected = compiled(*leaves), CALLS[call](*leaves)
        torch.testing.assert_close(output, expected)
        assert output.requires_grad == expected.requires_grad
        if output.requires_grad:
            for one, other in zip(gradients(output, leaves), gradients(expected, leaves), strict=True):
                torch.testing.assert_close(one, other)
    assert counter.frame_count == 2


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_under_autocast_and_checkpoint(tensors: MakeTensors) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return checkpoint(CALLS["pyramid_attention"], q, k, v, use_reentrant=False)

    leaves = [x.requires_grad_() for x in tensors(queries=60, dtype=torch.float32)]
    output = torch.compile(call, fullgraph=True, backend="aot_eager")(*leaves)
    assert output.dtype == torch.bfloat16
    for one, other in zip(gradients(output, leaves), gradients(call(*leaves), leaves), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_code_says_what_a_method_cannot_do(tensors: MakeTensors) -> None:
    q, k, _ = tensors(queries=30)
    compiled = torch.compile(lambda q, k: pyramidbench.select_blocks(q, k, method="dense").indices, backend="aot_eager")
    with pytest.raises(Exception, match="has no budget of blocks; call it without"):
        compiled(q, k)


def test_the_output_is_the_twin_s(tensors: MakeTensors) -> None:
    q, k, v = tensors(queries=40)
    selection = some_blocks(Tiling(40, 40, 8, 4, True))
    expected = sparse_attention(q, k, v, selection, scale=0.3)
    assert torch.equal(attention(q, k, v, selection, 0.3, "reference"), expected)
    assert torch.equal(attention(q.requires_grad_(), k, v, selection, 0.3, "reference"), expected)
