"""Faults that users of other kernels ran into, on ours: each on its whole kind, selection and attention by the kernels.

tests/methods/test_field_cases.py asks the same of every method on the torch twins.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pyramidbench.kernels.attention import sparse_attention
from pyramidbench.kernels.walk import build, route_reference
from pyramidbench.kernels.walk_rules import WalkRules
from pyramidbench.selection import BlockSelection, ranked_count, top_blocks
from pyramidbench.tiling import Tiling

BLOCK = 16
SHARED: dict[str, object] = {"sink_blocks": 1, "local_blocks": 2, "start_width": 4}
MEAN: dict[str, object] = {**SHARED, "tile_reduce": "mean", "leaf_score": "summary"}
ROWS: dict[str, object] = {**SHARED, "score_rows": 4}
EXACT: dict[str, object] = {**ROWS, "beam": 2, "leaf_candidates": 2}
FLAT: dict[str, object] = {**ROWS, "leaf_score": "summary", "levels": 1}
RULES = {
    "mean": MEAN,
    "exact": EXACT,
    "sub": {**EXACT, "leaf_score": "sub"},
    "paper": {**ROWS, "beam": 1, "levels": "full", "bound_weight": 0, "node_score": "children", "leaf_candidates": None,
              "head_reduce": "sum_lse"},
    "flat": FLAT,
}  # fmt: skip
QKV = tuple[Tensor, Tensor, Tensor]
every_rule = pytest.mark.parametrize("rules", RULES.values(), ids=RULES)


def tensors(device: str, queries: int, keys: int, heads: int = 2, kv_heads: int = 1, *, padding: int = 0) -> QKV:
    """Views into memory that holds `padding` rows of NaN behind the last one of every head."""
    generator = torch.Generator().manual_seed(0)

    def drawn(count: int, rows: int) -> Tensor:
        room = torch.full((1, count, rows + padding, 16), torch.nan)
        room[:, :, :rows] = torch.randn(1, count, rows, 16, generator=generator)
        return room.to(device)[:, :, :rows]

    return drawn(heads, queries), drawn(kv_heads, keys), drawn(kv_heads, keys)


def called(q: Tensor, k: Tensor, v: Tensor, rules: dict[str, object], tile: int) -> tuple[BlockSelection, Tensor]:
    """Lists and output of the kernels."""
    from pyramidbench.kernels import attention_fwd, pyramid_build
    from pyramidbench.kernels.pyramid import walked_levels
    from pyramidbench.kernels.route import route, route_gap

    walk, tiling = WalkRules(**rules), Tiling(q.shape[2], k.shape[2], BLOCK, tile, True)
    assert route_gap(walk, tiling, q.shape[3], "float32", q.shape[1] // k.shape[1]) is None
    levels = walked_levels(walk.levels, tiling.blocks, walk.branching, walk.start_width)
    weight = walk.bounds(k.shape[3]) if walk.needs_summaries(levels) else 0.0
    pyramid = pyramid_build.build(k, block_size=BLOCK, branching=walk.branching, levels=levels, bound_weight=weight)
    selection = route(q, k, pyramid, tiling, walk, 0.25)
    return selection, attention_fwd.attend(q, k, v, selection, 0.25)[0]


def agree(q: Tensor, k: Tensor, v: Tensor, rules: dict[str, object], tile: int) -> BlockSelection:
    """The kernels' lists and output, checked against the twins on tensors of their own memory."""
    selection, out = called(q, k, v, rules, tile)
    q, k, v = (x.clone() for x in (q, k, v))
    walk = WalkRules(**rules)
    twin = route_reference(q, k, build(k, selection.tiling, walk), selection.tiling, walk, 0.25)
    selection.check()
    assert torch.equal(selection.indices, twin)
    expected = sparse_attention(q.double(), k.double(), v.double(), selection, scale=0.25)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
    return selection


@every_rule
@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 17, 100])
def test_memory_behind_the_tensors_is_not_read(rules: dict[str, object], length: int, device: str) -> None:
    """flashinfer#5090, tilelang#2069: keys past the end attended to, or pooled into the last block's mean."""
    agree(*tensors(device, length, length, padding=90), {**rules, "top_k": 1}, 32)


@pytest.mark.parametrize("rules", [MEAN, EXACT], ids=["mean", "exact"])
@pytest.mark.parametrize("top_k", [1, 2, 3, 5, 7, 17])
def test_any_number_of_blocks(rules: dict[str, object], top_k: int, device: str) -> None:
    """A K that is no power of two, or no multiple of a tile, dropped blocks; K = 1 became full attention (MoBA#26)."""
    selection = agree(*tensors(device, 384, 384), {**rules, "top_k": top_k}, 64)
    seen = (selection.tiling.last_position(torch.arange(6, device=device)) + 1) // BLOCK
    forced = 1 + 64 // BLOCK + 1  # the first block, those that the tile overlaps, and the one before them
    assert torch.equal(selection.counts[0, 0].long(), seen.clamp(max=forced + top_k))


@every_rule
@pytest.mark.parametrize("queries", [1, 40])
def test_fewer_queries_than_keys_are_the_last_rows(rules: dict[str, object], queries: int, device: str) -> None:
    """Two alignments of a causal mask are in use; ours ends bottom right."""
    agree(*tensors(device, queries, 200), {**rules, "top_k": 2}, 16)


@pytest.mark.parametrize("tile", [1, 16])
@pytest.mark.parametrize("group", [1, 3, 4, 8, 16])
def test_a_query_head_reads_its_own_key_value_head(group: int, tile: int, device: str) -> None:
    """native-sparse-attention#11, LMCache#3092. Values are the number of their head, so the output is that number."""
    q, k, v = tensors(device, 5 if tile == 1 else 33, 33, heads=2 * group, kv_heads=2)
    v = torch.arange(2.0, device=device).view(1, 2, 1, 1).expand_as(v).contiguous()
    _, out = called(q, k, v, {**EXACT, "top_k": 1}, tile)
    heads = torch.arange(2.0, device=device).repeat_interleave(group).view(1, -1, 1, 1)
    torch.testing.assert_close(out, heads.expand_as(out))


@every_rule
@pytest.mark.parametrize("tile", [1, 16])
def test_equal_keys_tie_to_the_first_blocks(rules: dict[str, object], tile: int, device: str) -> None:
    """Top-k's ties differ by backend; here the lower block wins. The twin is no judge: a product on a CPU may round equal
    columns differently."""
    q, k, v = tensors(device, 6 if tile == 1 else 20, 160)
    k = k[:, :, :1].expand_as(k).contiguous()
    selection, _ = called(q, k, v, {**rules, "top_k": 3, "bound_weight": 0}, tile)
    tiling = selection.tiling
    tiles = torch.arange(tiling.tiles, device=device)
    forced = tiling.forced(tiles, 1, 2)
    equal = torch.zeros(1, 1, tiling.tiles, tiling.blocks, device=device)
    expected = top_blocks(equal, tiles, tiling, forced, ranked_count(3, forced, False))
    assert torch.equal(selection.indices.long(), expected[..., : selection.indices.shape[-1]].long())


@every_rule
@pytest.mark.parametrize("tile", [1, 32])
def test_a_changed_key_leaves_earlier_rows_alone(rules: dict[str, object], tile: int, device: str) -> None:
    """Lists and outputs of every tile that ends before it, bit by bit. MInference#108: early rows saw the future."""
    queries, rows = (12, 7) if tile == 1 else (96, 64)
    q, k, v = tensors(device, queries, 176)
    before, out = called(q, k, v, {**rules, "top_k": 2}, tile)
    first, tiles = 176 - queries + rows, rows // tile
    k, v = k.clone(), v.clone()
    # Finite: a kernel that multiplies what is masked with 0, as all of them do, makes NaN of NaN.
    k[:, :, first:], v[:, :, first:] = 50.0, 1e4
    after, again = called(q, k, v, {**rules, "top_k": 2}, tile)
    assert torch.equal(before.mask()[:, :, :tiles], after.mask()[:, :, :tiles])
    assert torch.equal(out[:, :, :rows], again[:, :, :rows])
    assert float((out - again)[:, :, rows:].abs().min()) > 0


@pytest.mark.parametrize("rules", [EXACT, RULES["sub"]], ids=["exact", "sub"])
def test_the_next_key_weighs_nothing(rules: dict[str, object], device: str) -> None:
    """A row's normaliser takes in its own block, up to itself: for every row, with garbage from the very next key on."""
    q, k, v = tensors(device, 10, 106, heads=3)
    before, _ = called(q, k, v, {**rules, "top_k": 2}, 1)
    garbage = 20 * torch.randn(k.shape, generator=torch.Generator().manual_seed(1)).to(device)
    for row in range(9):
        spoiled = k.clone()
        spoiled[:, :, 97 + row :] = garbage[:, :, 97 + row :]
        after, _ = called(q, spoiled, v, {**rules, "top_k": 2}, 1)
        assert torch.equal(before.mask()[:, :, : row + 1], after.mask()[:, :, : row + 1]), row
