"""Attention over listed blocks against dense float64 attention under the same element mask, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pyramidbench.kernels import panels
from pyramidbench.kernels.attention import sparse_attention, sparse_log_sum_exp
from pyramidbench.selection import BlockSelection
from pyramidbench.tiling import Tiling

MakeTensors = Callable[..., tuple[Tensor, Tensor, Tensor]]
MaskedDense = Callable[..., tuple[Tensor, Tensor]]


def some_blocks(tiling: Tiling, *, sets: int = 1, batch: int = 1, empty: int = 0, seed: int = 0) -> BlockSelection:
    """Random visible blocks for every tile; the first `empty` tiles list none."""
    generator = torch.Generator().manual_seed(seed)
    draw = torch.rand(batch, sets, tiling.tiles, tiling.blocks, generator=generator) < 0.4
    tile, block = torch.arange(tiling.tiles)[:, None], torch.arange(tiling.blocks)
    if tiling.causal:
        draw &= block * tiling.block_size <= tiling.last_position(tile)
        draw |= (block == tiling.last_position(tile) // tiling.block_size) & (tile % 3 > 0)
    draw[:, :, :empty] = False
    listed = torch.where(draw, block, tiling.blocks).sort(-1).values
    selection = BlockSelection.from_indices(listed.masked_fill(listed == tiling.blocks, -1), tiling)
    selection.check()
    return selection


def element_mask(selection: BlockSelection, heads: int) -> Tensor:
    """bool [B, H, M, N], one row and block at a time."""
    batch, sets = selection.indices.shape[:2]
    mask = torch.zeros(batch, heads, selection.seq_len_q, selection.seq_len_kv, dtype=torch.bool)
    offset, size = selection.seq_len_kv - selection.seq_len_q, selection.block_size
    for b in range(batch):
        for h in range(heads):
            lists = selection.indices[b, h * sets // heads].tolist()
            for row in range(selection.seq_len_q):
                for block in lists[row // selection.query_tile]:
                    stop = (block + 1) * size
                    stop = min(stop, row + offset + 1) if selection.causal else stop
                    if block >= 0 and stop > block * size:
                        mask[b, h, row, block * size : stop] = True
    return mask


def low_precision_error(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, reference: Tensor) -> float:
    """Largest error of plain attention that computes everything in q's dtype."""
    group = q.shape[1] // k.shape[1]
    logits = q @ k.repeat_interleave(group, 1).mT * q.shape[-1] ** -0.5
    weights = logits.masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num(0)
    return float(((weights @ v.repeat_interleave(group, 1)).double() - reference).abs().max())


SHAPES = {
    "token-level": Tiling(50, 50, 8, 1, True),
    "tile": Tiling(64, 64, 8, 16, True),
    "ragged-tile-and-block": Tiling(77, 77, 16, 12, True),
    "one-query": Tiling(1, 100, 16, 1, True),
    "one-query-wide-tile": Tiling(1, 100, 16, 64, True),
    "more-keys": Tiling(30, 100, 16, 4, True),
    "more-queries": Tiling(100, 30, 8, 16, True),
    "full": Tiling(40, 70, 16, 8, False),
    "full-token-level": Tiling(70, 40, 16, 1, False),
    "block-wider-than-keys": Tiling(9, 9, 64, 4, True),
    "below-a-block": Tiling(15, 15, 16, 16, True),
    "above-a-block": Tiling(17, 17, 16, 16, True),
    "two-blocks-and-17": Tiling(49, 49, 16, 16, True),
}


@pytest.fixture(params=SHAPES)
def tiling(request: pytest.FixtureRequest) -> Tiling:
    return SHAPES[request.param]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_output_is_attention_under_the_element_mask(
    tensors: MakeTensors, masked_dense: MaskedDense, tiling: Tiling, dtype: torch.dtype
) -> None:
    q, k, v = tensors(
        queries=tiling.seq_len_q, keys=tiling.seq_len_kv, batch=2, heads=4, kv_heads=2, dim=8, dim_v=12, dtype=dtype
    )
    selection = some_blocks(tiling, sets=2, batch=2)
    mask = element_mask(selection, 4)
    expected, row_sum = masked_dense(q, k, v, mask)
    output = sparse_attention(q, k, v, selection)
    assert output.dtype == dtype
    assert output.shape == (2, 4, tiling.seq_len_q, 12)
    slack = torch.finfo(dtype).eps * float(expected.abs().max())
    assert float((output.double() - expected).abs().max()) <= 2 * (low_precision_error(q, k, v, mask, expected) + slack)
    found = sparse_log_sum_exp(q, k, selection)
    assert torch.equal(found == -torch.inf, row_sum == -torch.inf)
    torch.testing.assert_close(found.double(), row_sum, rtol=0, atol=1e-5 if dtype != torch.float64 else 1e-12)


@pytest.mark.parametrize("group", [1, 3, 4, 8, 16])
@pytest.mark.parametrize("per_head", [False, True])
def test_each_query_head_reads_its_own_key_value_head(
    tensors: MakeTensors, masked_dense: MaskedDense, group: int, per_head: bool
) -> None:
    q, k, v = tensors(queries=40, heads=2 * group, kv_heads=2)
    selection = some_blocks(Tiling(40, 40, 8, 4, True), sets=2 * group if per_head else 2)
    expected, _ = masked_dense(q, k, v, element_mask(selection, 2 * group))
    torch.testing.assert_close(sparse_attention(q, k, v, selection), expected)
    v = torch.tensor([3.0, 5.0], dtype=v.dtype)[None, :, None, None].expand_as(v).contiguous()
    mean = sparse_attention(q, k, v, selection)
    seen = sparse_log_sum_exp(q, k, selection) > -torch.inf
    assert torch.equal(mean[:, :group].round(decimals=9), 3.0 * seen[:, :group, :, None].expand_as(mean[:, :group]))
    assert torch.equal(mean[:, group:].round(decimals=9), 5.0 * seen[:, group:, :, None].expand_as(mean[:, group:]))


@pytest.mark.parametrize("layout", ["bshd", "fused-qkv", "sliced-heads"])
def test_strided_views_give_the_same_output(tensors: MakeTensors, layout: str) -> None:
    q, k, v = tensors(queries=45, batch=2, heads=4, kv_heads=4)
    selection = some_blocks(Tiling(45, 45, 8, 4, True), sets=4, batch=2)
    expected = sparse_attention(q, k, v, selection)
    if layout == "bshd":
        views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    elif layout == "fused-qkv":
        fused = torch.stack([q, k, v], 3).permute(0, 2, 3, 1, 4).contiguous()
        views = [fused[:, :, i].transpose(1, 2) for i in range(3)]
    else:
        views = [torch.cat([x, torch.full_like(x, torch.nan)], 1)[:, :4] for x in (q, k, v)]
    assert all(torch.equal(view, x) for view, x in zip(views, (q, k, v), strict=True))
    assert layout == "sliced-heads" or not views[0].is_contiguous()
    assert torch.equal(sparse_attention(views[0], views[1], views[2], selection), expected)


@pytest.mark.parametrize("length", [15, 16, 17, 49, 100])
def test_memory_past_the_last_key_is_not_read(tensors: MakeTensors, length: int) -> None:
    q, k, v = tensors(queries=length)
    selection = some_blocks(Tiling(length, length, 16, 1, True))
    long = [torch.nn.functional.pad(x, (0, 0, 0, 40), value=torch.nan) for x in (q, k, v)]
    views = [x[:, :, :length] for x in long]
    output = sparse_attention(views[0], views[1], views[2], selection)
    assert torch.equal(output, sparse_attention(q, k, v, selection))
    assert torch.equal(sparse_log_sum_exp(views[0], views[1], selection), sparse_log_sum_exp(q, k, selection))


@pytest.mark.parametrize("tile", [1, 8])
@pytest.mark.parametrize("causal", [True, False])
def test_a_row_with_no_key_gives_zero_and_passes_no_gradient(tensors: MakeTensors, tile: int, causal: bool) -> None:
    q, k, v = (x.requires_grad_() for x in tensors(queries=40))
    selection = some_blocks(Tiling(40, 40, 8, tile, causal), empty=24 // tile)
    output = sparse_attention(q, k, v, selection)
    assert (output[:, :, :24] == 0).all()
    assert (sparse_log_sum_exp(q, k, selection)[:, :, :24] == -torch.inf).all()
    assert output[:, :, 24:].abs().sum() > 0
    gradients = torch.autograd.grad(output.sum() + (output**2).sum(), (q, k, v))
    assert (gradients[0][:, :, :24] == 0).all()
    assert all(bool(g.isfinite().all()) and float(g.abs().sum()) > 0 for g in gradients)


@pytest.mark.parametrize("tile", [1, 8])
def test_nothing_selected_at_all_is_zero(tensors: MakeTensors, tile: int) -> None:
    q, k, v = (x.requires_grad_() for x in tensors(queries=20))
    tiling = Tiling(20, 20, 8, tile, True)
    selection = BlockSelection.from_indices(torch.full((1, 1, tiling.tiles, 0), -1), tiling)
    output = sparse_attention(q, k, v, selection)
    assert torch.equal(output, torch.zeros_like(output))
    assert (sparse_log_sum_exp(q, k, selection) == -torch.inf).all()
    assert all((g == 0).all() for g in torch.autograd.grad(output.sum(), (q, k, v)))


@pytest.mark.parametrize("shape", ["token-level", "ragged-tile-and-block", "more-queries", "full", "more-keys"])
@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (4, 2)], ids=["1:1", "3:1", "4:2"])
def test_gradients_are_those_of_dense_attention_under_the_mask(
    tensors: MakeTensors, masked_dense: MaskedDense, shape: str, heads: tuple[int, int]
) -> None:
    tiling = SHAPES[shape]
    q, k, v = tensors(
        queries=tiling.seq_len_q, keys=tiling.seq_len_kv, heads=heads[0], kv_heads=heads[1], dim=6, dim_v=10
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    selection = some_blocks(tiling, sets=heads[1], empty=1)
    expected, _ = masked_dense(q, k, v, element_mask(selection, heads[0]))
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=expected.dtype)
    theirs = torch.autograd.grad(expected, leaves, upstream)
    ours = torch.autograd.grad(sparse_attention(q, k, v, selection), leaves, upstream)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other.nan_to_num(0), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("tile", [1, 4])
def test_gradcheck(tensors: MakeTensors, tile: int) -> None:
    q, k, v = (x.requires_grad_() for x in tensors(queries=9, keys=12, heads=4, kv_heads=2, dim=3, dim_v=2))
    selection = some_blocks(Tiling(9, 12, 4, tile, True), sets=2, empty=1)
    assert torch.autograd.gradcheck(lambda *x: sparse_attention(x[0], x[1], x[2], selection), (q, k, v))


@pytest.mark.parametrize("which", [0, 1, 2], ids=["q", "k", "v"])
def test_one_tensor_alone_can_require_a_gradient(tensors: MakeTensors, which: int) -> None:
    selection = some_blocks(Tiling(40, 40, 8, 4, True))
    leaves = [x.requires_grad_() for x in tensors(queries=40)]
    expected = torch.autograd.grad(sparse_attention(leaves[0], leaves[1], leaves[2], selection).sum(), leaves)
    alone = tensors(queries=40)
    alone[which].requires_grad_()
    (found,) = torch.autograd.grad(sparse_attention(*alone, selection).sum(), alone[which])
    torch.testing.assert_close(found, expected[which])


@pytest.mark.parametrize("tile", [1, 8])
def test_chunks_do_not_change_the_result(tensors: MakeTensors, monkeypatch: pytest.MonkeyPatch, tile: int) -> None:
    q, k, v = (x.requires_grad_() for x in tensors(queries=300))
    selection = some_blocks(Tiling(300, 300, 8, tile, True))
    at_once = sparse_attention(q, k, v, selection)
    whole = torch.autograd.grad((at_once**2).sum(), (q, k, v))
    monkeypatch.setattr(panels, "CHUNK_ELEMENTS", 1)
    in_parts = sparse_attention(q, k, v, selection)
    torch.testing.assert_close(in_parts, at_once)
    for one, other in zip(torch.autograd.grad((in_parts**2).sum(), (q, k, v)), whole, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("scale", [0.1, 1.0])
def test_scale_multiplies_the_logits(tensors: MakeTensors, masked_dense: MaskedDense, scale: float) -> None:
    q, k, v = tensors(queries=40)
    selection = some_blocks(Tiling(40, 40, 8, 4, True))
    expected, _ = masked_dense(q, k, v, element_mask(selection, 2), scale)
    torch.testing.assert_close(sparse_attention(q, k, v, selection, scale=scale), expected)


@pytest.mark.parametrize(
    ("tiling", "sets", "batch", "message"),
    [
        (Tiling(32, 40, 8, 4, True), 1, 1, "made for 32 queries and 40 keys; q and k have 40 and 40"),
        (Tiling(40, 48, 8, 4, True), 1, 1, "made for 40 queries and 48 keys; q and k have 40 and 40"),
        (Tiling(40, 40, 8, 4, True), 3, 1, "batch 1 and 3 sets of blocks; accepted here: batch 1 and 2 sets"),
        (Tiling(40, 40, 8, 4, True), 2, 2, "batch 2 and 2 sets"),
    ],
    ids=["queries", "keys", "sets", "batch"],
)
def test_a_selection_that_does_not_fit_is_refused(
    tensors: MakeTensors, tiling: Tiling, sets: int, batch: int, message: str
) -> None:
    q, k, v = tensors(queries=40, heads=4, kv_heads=2)
    selection = some_blocks(tiling, sets=sets, batch=batch)
    with pytest.raises(ValueError, match=message):
        sparse_attention(q, k, v, selection)
    with pytest.raises(ValueError, match=message):
        sparse_log_sum_exp(q, k, selection)
