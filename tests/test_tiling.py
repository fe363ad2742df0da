"""The geometry of tiles and blocks against counts over explicit element masks."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pyramidbench.tiling import Tiling

TILINGS = st.builds(
    Tiling,
    seq_len_q=st.integers(1, 60),
    seq_len_kv=st.integers(1, 60),
    block_size=st.sampled_from([1, 3, 8, 16]),
    query_tile=st.sampled_from([1, 4, 16]),
    causal=st.booleans(),
)
quick = settings(max_examples=50, deadline=None, derandomize=True)


def visible(tiling: Tiling) -> list[list[bool]]:
    """Element by element: does query i see key x?"""
    offset = tiling.seq_len_kv - tiling.seq_len_q
    return [[not tiling.causal or x <= i + offset for x in range(tiling.seq_len_kv)] for i in range(tiling.seq_len_q)]


def rows_of(tiling: Tiling, tile: int) -> range:
    return range(tile * tiling.query_tile, min((tile + 1) * tiling.query_tile, tiling.seq_len_q))


def all_tiles(tiling: Tiling) -> Tensor:
    return torch.arange(tiling.tiles)


@quick
@given(tiling=TILINGS)
def test_pairs_are_the_visible_elements(tiling: Tiling) -> None:
    seen = visible(tiling)
    pairs = tiling.pairs(all_tiles(tiling)[:, None], torch.arange(tiling.blocks))
    for tile in range(tiling.tiles):
        for block in range(tiling.blocks):
            keys = slice(block * tiling.block_size, (block + 1) * tiling.block_size)
            assert pairs[tile, block] == sum(sum(seen[row][keys]) for row in rows_of(tiling, tile))
    assert tiling.visible_pairs() == sum(map(sum, seen)) == int(pairs.sum())


@quick
@given(tiling=TILINGS, span=st.sampled_from([1, 2, 3]))
def test_a_run_of_keys_is_complete_when_the_first_query_sees_it_whole(tiling: Tiling, span: int) -> None:
    seen, width = visible(tiling), span * tiling.block_size
    nodes = torch.arange(-(-tiling.seq_len_kv // width) + 2)
    complete = tiling.complete(nodes, all_tiles(tiling)[:, None], width).expand(tiling.tiles, -1)
    for tile in range(tiling.tiles):
        for node in nodes.tolist():
            keys = range(node * width, min((node + 1) * width, tiling.seq_len_kv))
            expected = len(keys) > 0 and all(seen[rows_of(tiling, tile)[0]][x] for x in keys)
            assert complete[tile, node] == expected


@quick
@given(tiling=TILINGS, sinks=st.integers(0, 3), local=st.integers(1, 3))
def test_forced_blocks_and_what_is_left_to_rank(tiling: Tiling, sinks: int, local: int) -> None:
    local = local if tiling.causal else 0
    seen, size = visible(tiling), tiling.block_size
    forced = tiling.forced(all_tiles(tiling), sinks, local)
    eligible = tiling.eligible(all_tiles(tiling), forced)
    for tile in range(tiling.tiles):
        rows = rows_of(tiling, tile)
        first = rows[0] + tiling.seq_len_kv - tiling.seq_len_q
        some = [b for b in range(tiling.blocks) if any(seen[row][b * size] for row in rows)]
        near = [b for b in some if tiling.causal and b > first // size - local]
        expected = sorted({*(b for b in some if b < sinks), *near})
        assert [b for b in forced.list()[tile].tolist() if b >= 0] == expected
        assert forced.count()[tile] == len(expected)
        whole = tiling.complete(torch.arange(tiling.blocks), torch.tensor(tile), size)
        assert eligible[tile] == sum(bool(whole[b]) for b in range(tiling.blocks) if b not in expected)


@quick
@given(tiling=TILINGS, sinks=st.integers(0, 3), local=st.integers(1, 3), span=st.sampled_from([1, 2, 4]))
def test_a_node_contains_forced_blocks_when_one_of_its_blocks_is_forced(
    tiling: Tiling, sinks: int, local: int, span: int
) -> None:
    forced = tiling.forced(all_tiles(tiling), sinks, local)
    nodes = torch.arange(-(-tiling.blocks // span)).expand(tiling.tiles, -1)
    holds = forced.contains(nodes, span)
    for tile, listed in enumerate(forced.list().tolist()):
        assert holds[tile].tolist() == [any(b >= 0 and b // span == node for b in listed) for node in nodes[0].tolist()]


@quick
@given(tiling=TILINGS)
def test_every_straddling_node_is_forced(tiling: Tiling) -> None:
    """What a tile sees in part is always kept, so only complete blocks are ever ranked."""
    tiling = dataclasses.replace(tiling, causal=True)
    seen, block = visible(tiling), torch.arange(tiling.blocks)
    forced = tiling.forced(all_tiles(tiling), 0, 1)
    for tile in range(tiling.tiles):
        complete = tiling.complete(block, torch.tensor(tile), tiling.block_size)
        for b in range(tiling.blocks):
            starts_in_view = any(seen[row][b * tiling.block_size] for row in rows_of(tiling, tile))
            assert not starts_in_view or complete[b] or b in forced.list()[tile].tolist()


@pytest.mark.parametrize(
    ("queries", "keys", "first", "last"), [(1, 1000, 999, 999), (100, 1000, 900, 999), (1000, 100, -900, 99)]
)
def test_positions_are_aligned_at_the_end(queries: int, keys: int, first: int, last: int) -> None:
    tiling = Tiling(queries, keys, 64, 64, True)
    assert tiling.first_position(torch.tensor(0)) == first
    assert tiling.last_position(torch.tensor(tiling.tiles - 1)) == last


def test_visible_pairs_of_a_long_problem_need_no_loop() -> None:
    assert Tiling(1 << 20, 1 << 20, 64, 1, True).visible_pairs() == (1 << 19) * ((1 << 20) + 1)


@pytest.mark.parametrize("width", [4, 6])
def test_forced_blocks_are_listed_in_a_width_that_is_known_beforehand(width: int) -> None:
    """Of tiles that have at most 4; what is wider is padding."""
    tiling = Tiling(200, 200, 16, 24, causal=True)
    forced = tiling.forced(torch.arange(tiling.tiles), 1, 2)
    narrow = forced.list()
    assert narrow.shape[-1] == 4
    assert torch.equal(forced.list(width)[:, :4], narrow)
    assert bool((forced.list(width)[:, 4:] == -1).all())
