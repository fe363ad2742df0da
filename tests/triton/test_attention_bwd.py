"""The Triton backward against autograd of the torch twin, in fp64 and in the kernels' dtype, with the lists frozen."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from pyramidbench.kernels.attention import sparse_attention
from pyramidbench.selection import BlockSelection
from pyramidbench.tiling import Tiling


@dataclass(frozen=True)
class Case:
    """One call; `keep` blocks are drawn per tile, or the first and the tile's own where `hot`; `sets` heads have lists of
    their own."""

    name: str
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int = 16
    head_dim_v: int = 16
    block_size: int = 16
    query_tile: int = 16
    sets: int = 1
    causal: bool = True
    keep: int = 3
    batch: int = 1
    hot: bool = False


SMALL = [
    Case("one-key-more-than-a-block", 1, 1, 17, 17),
    Case("two-blocks-and-17-group-3", 3, 1, 49, 49),
    Case("group-4-odd-dims-batch", 8, 2, 20, 55, 24, 40, sets=2, batch=2),
    Case("group-8-token-level", 8, 1, 21, 70, block_size=32, query_tile=1, keep=2),
    Case("group-16-token-level-hot", 16, 1, 34, 34, query_tile=1, hot=True),
    Case("hot-block-tile-32", 2, 2, 130, 130, query_tile=32, sets=2, hot=True),
    Case("more-queries-than-keys", 2, 1, 50, 30),
    Case("not-causal-block-size-no-power-of-two-set-a-head", 4, 2, 40, 81, block_size=48, sets=4, causal=False),
    Case("causal-set-a-head", 4, 2, 40, 49, sets=4),
    Case("tile-over-several-blocks", 2, 2, 140, 150, query_tile=128, sets=2, keep=5),
]
LARGE = [
    Case("tile-128", 4, 4, 2000, 2000, 128, 128, 64, 128, 4, keep=12),
    Case("tile-128-hot", 4, 4, 8000, 8000, 128, 128, 64, 128, 4, hot=True),
    Case("tile-64-group-3-one-key-more", 6, 2, 1300, 1345, 128, 128, 64, 64, 2, keep=6),
    Case("tile-16-group-4", 8, 2, 500, 2000, 64, 64, 64, 16, 2, keep=6),
    Case("tile-16-group-8", 16, 2, 500, 2001, 128, 128, 64, 16, 2, keep=7, batch=2),
    Case("tile-32-group-16", 16, 1, 700, 700, 128, 128, 64, 32, 1, keep=5),
    Case("token-level-group-4", 8, 2, 1000, 4000, 128, 128, 64, 1, 2, keep=11),
    Case("token-level-group-16-hot", 16, 1, 3000, 3000, 128, 128, 64, 1, 1, hot=True),
    Case("set-a-head", 8, 2, 700, 1300, 128, 128, 64, 64, 8, keep=6),
    Case("head-dims-96-64", 4, 2, 600, 900, 96, 64, 64, 128, 2, keep=6),
    Case("head-dim-256", 3, 1, 300, 1500, 256, 256, 64, 64, 1, keep=6),
    Case("head-dims-256-128-tile-128-blocks-of-128", 2, 1, 300, 1500, 256, 128, 128, 128, 1, keep=6),
    Case("blocks-of-128", 4, 4, 700, 700, 128, 128, 128, 128, 4, keep=3),
    Case("blocks-of-16", 4, 4, 700, 700, 128, 128, 16, 128, 4, keep=20),
    Case("not-causal-ragged", 2, 2, 500, 1111, 128, 128, 64, 128, 2, causal=False, keep=6),
    Case("more-queries-than-keys", 2, 2, 900, 500, 128, 128, 64, 128, 2, keep=6),
]


TOKEN_LEVEL = Case("group-3-odd-dims-batch-token-level", 6, 2, 40, 93, 24, 40, query_tile=1, sets=2, batch=2, keep=4)


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
    check(case, dtype, device, runs=2)


@pytest.mark.parametrize(
    ("case", "table_bytes"),
    [(SMALL[5], 2**20), (SMALL[8], 2**20), (SMALL[4], 1)],
    ids=["windows-hot", "windows-set-a-head", "runs"],
)
def test_cut_short(case: Case, table_bytes: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of few pairs, windows of one head, and runs of 32 tiles that add to one another; two runs agree."""
    from pyramidbench.kernels import attention_bwd

    plan = attention_bwd.plan
    monkeypatch.setattr(attention_bwd, "TABLE_BYTES", table_bytes)
    monkeypatch.setattr(attention_bwd, "PIECE_BYTES", 2**16)
    monkeypatch.setattr(attention_bwd, "plan", lambda *sizes: plan(*sizes[:4], chunk_rows=64))
    check(case, torch.float32, device, runs=2)


@named([SMALL[3], TOKEN_LEVEL, SMALL[6], SMALL[7]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_queries_by_key(case: Case, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks and windows of few pairs."""
    by_key(
        monkeypatch,
        chunk_rows=48,
        window=33,
        **(dict.fromkeys(("sum_slots", "sum_rows"), 2) if device == "cpu" else {}),
    )
    check(case, dtype, device)


@pytest.mark.gpu
@named([case for case in LARGE if case.query_tile * case.heads // case.sets <= 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_queries_by_key_large(case: Case, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    by_key(monkeypatch, chunk_rows=256, window=300)
    check(case, dtype, device, runs=2)


def test_queries_of_many_lists_go_by_key(device: str) -> None:
    from pyramidbench.kernels.attention_bwd import chosen_tiles
    from pyramidbench.kernels.attention_dq_by_key import GradientTile

    for heads, queries, expected in ((4, 2**15, True), (4, 2**14, False), (16, 2**15, False)):
        q, k = (torch.empty(1, n, queries, 16, dtype=torch.bfloat16, device=device) for n in (heads, 1))
        lists = torch.zeros(1, 1, queries, 1, dtype=torch.int32, device=device)
        selection = BlockSelection.from_indices(lists, Tiling(queries, queries, 64, 1, True))
        assert isinstance(chosen_tiles(q, k, k, q, selection)[0], GradientTile) == expected


def test_unlisted_blocks_and_rows_without_a_key_get_zeros(device: str) -> None:
    case = Case("", 1, 1, 40, 20)
    tiling = Tiling(40, 20, 16, 16, True)
    selection = BlockSelection.from_indices(torch.tensor([[[[-1], [0], [0]]]], device=device), tiling)
    dq, dk, dv = gradients(*tensors(case, torch.float32, device), selection)
    assert bool((dq[:, :, :20] == 0).all())
    assert bool((dq[:, :, 21:] != 0).any())
    assert bool((dk[:, :, 16:] == 0).all())
    assert bool((dv[:, :, 16:] == 0).all())
    assert bool((dv[:, :, :16] != 0).any())


def test_nothing_listed(device: str) -> None:
    case = Case("", 2, 1, 20, 20)
    lists = torch.empty(1, 1, 2, 0, dtype=torch.int32, device=device)
    selection = BlockSelection.from_indices(lists, Tiling(20, 20, 16, 16, True))
    q, k, v, d_out = tensors(case, torch.float32, device)
    out, lse = torch.zeros_like(q), torch.full(q.shape[:3], -torch.inf, device=device)
    from pyramidbench.kernels.attention_bwd import attend_backward

    for gradient, tensor in zip(attend_backward(q, k, v, out, lse, d_out, selection, 0.25), (q, k, v)):
        assert torch.equal(gradient, torch.zeros_like(tensor))


def test_gradient_of_a_sum(device: str) -> None:
    """An expanded gradient has strides of 0."""
    case = SMALL[1]
    q, k, v, _ = tensors(case, torch.float32, device)
    ones = torch.ones((), device=device)
    shape = (*q.shape[:3], v.shape[3])
    expected = gradients(q, k, v, ones.repeat(shape), lists_of(case, device))
    for gradient, other in zip(gradients(q, k, v, ones.expand(shape), lists_of(case, device)), expected):
        assert torch.equal(gradient, other)


def test_pieces_of_large_calls_stay_bounded() -> None:
    from pyramidbench.kernels.attention_bwd import CHUNK_ROWS, PIECE_BYTES, TABLE_BYTES, plan
    from pyramidbench.kernels.attention_pieces import piece_places

    for queries, query_tile, kv_heads, sets in (
        (2**16, 1, 16, 16),
        (2**18, 128, 16, 16),
        (2**20, 1, 8, 32),
        (2**20, 128, 2, 16),
    ):
        tiling = Tiling(queries, queries, 64, query_tile, True)
        lists = torch.empty(1, sets, tiling.tiles, 67, dtype=torch.int32, device="meta")
        selection = BlockSelection(lists, lists[..., 0], 64, query_tile, queries, queries, True)
        cuts = plan(selection, kv_heads, query_tile, 256, CHUNK_ROWS)
        table_bytes = cuts.tabled * cuts.cut.parts() * tiling.blocks * 8
        pieces = cuts.windowed * piece_places(cuts.cut.run * 67, cuts.most_pairs)
        assert table_bytes <= TABLE_BYTES
        assert pieces * 64 * 256 * 4 <= PIECE_BYTES + 2 * 64 * 256 * 4


def check(case: Case, dtype: torch.dtype, device: str, runs: int = 1) -> None:
    """Gradients against fp64, and the same bit for bit on further runs."""
    inputs = tensors(case, dtype, device)
    selection = lists_of(case, device)
    found = gradients(*inputs, selection)
    for _ in range(runs - 1):
        assert all(torch.equal(x, again) for x, again in zip(found, gradients(*inputs, selection)))
    exact = twin_gradients(*(x.double() for x in inputs), selection)
    twin = twin_gradients(*inputs, selection)
    for name, gradient, right, other in zip("qkv", found, exact, twin):
        assert gradient.dtype == dtype
        assert gradient.shape == right.shape
        error = float((other - right).abs().max()) + torch.finfo(dtype).eps * float(right.abs().max())
        assert float((gradient - right).abs().max()) <= 2 * error, f"d{name}"


def by_key(monkeypatch: pytest.MonkeyPatch, **changes: int) -> None:
    """From here on dQ goes block by block, with `changes` of its tile sizes."""
    from pyramidbench.kernels import attention_bwd
    from pyramidbench.kernels.attention_dq_by_key import gradient_tile

    choose = attention_bwd.chosen_tiles

    def chosen(q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, selection: BlockSelection) -> object:
        rows = q.shape[1] // selection.indices.shape[1] * selection.query_tile
        sizes = (selection.indices.shape[-1], selection.tiling.blocks, q.shape[3], v.shape[3], q.element_size())
        tile = replace(gradient_tile(rows, *sizes), **changes)
        return replace(tile, BLOCK_M=max(tile.BLOCK_M, rows)), choose(q, k, v, d_out, selection)[1]

    monkeypatch.setattr(attention_bwd, "chosen_tiles", chosen)


def gradients(q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, selection: BlockSelection) -> tuple[Tensor, ...]:
    from pyramidbench.kernels.attention_bwd import attend_backward
    from pyramidbench.kernels.attention_fwd import attend

    scale = q.shape[3] ** -0.5
    out, lse = attend(q, k, v, selection, scale)
    return attend_backward(q, k, v, out, lse, d_out, selection, scale)


def twin_gradients(q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, selection: BlockSelection) -> tuple[Tensor, ...]:
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(sparse_attention(*inputs, selection), inputs, d_out)


def tensors(case: Case, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and the output's gradient; all but k are strided views, and NaN stands past the keys' end."""
    torch.manual_seed(0)

    def drawn(heads: int, rows: int, dim: int) -> Tensor:
        room = torch.full((case.batch, rows + 70, heads, dim), torch.nan, device=device, dtype=dtype)
        room[:, :rows] = torch.randn(case.batch, rows, heads, dim, device=device, dtype=dtype)
        return room[:, :rows].transpose(1, 2)

    q, d_out = (drawn(case.heads, case.queries, dim) for dim in (case.head_dim, case.head_dim_v))
    k, v = (drawn(case.kv_heads, case.keys, dim) for dim in (case.head_dim, case.head_dim_v))
    return q, k.contiguous(), v, d_out


def lists_of(case: Case, device: str) -> BlockSelection:
    """Random lists of up to `keep` blocks that the tile can see, with the last one that it overlaps; or the hot ones."""
    torch.manual_seed(1)
    tiling = Tiling(case.queries, case.keys, case.block_size, case.query_tile, case.causal)
    block = torch.arange(tiling.blocks)
    scores = torch.rand(case.batch, case.sets, tiling.tiles, tiling.blocks)
    last = tiling.last_position(torch.arange(tiling.tiles))[:, None]
    own = block == last // tiling.block_size
    if case.hot:
        scores = torch.where(own | (block == 0), 2.0, -1.0).expand_as(scores)
    if case.causal:
        scores = scores.masked_fill(own, 2).masked_fill(block * tiling.block_size > last, -1)
    values, best = scores.topk(min(2 if case.hot else case.keep, tiling.blocks), dim=-1)
    best = best.masked_fill(values < 0, tiling.blocks).sort(-1).values
    return BlockSelection.from_indices(best.masked_fill(best == tiling.blocks, -1).to(device), tiling)
