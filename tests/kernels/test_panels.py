"""Panels: every tile and row once, evenly spaced sample rows, and unions of node lists."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyramidbench.kernels import panels
from pyramidbench.kernels.panels import membership, panels_of, unite
from pyramidbench.tiling import Tiling

CPU = torch.device("cpu")


@pytest.mark.parametrize("queries", [1, 63, 64, 65, 100, 200])
@pytest.mark.parametrize("tile", [1, 7, 16, 64, 128])
@pytest.mark.parametrize("chunk", [1, 3000, 1 << 22])
def test_all_rows_come_once_and_in_order(monkeypatch: pytest.MonkeyPatch, queries: int, tile: int, chunk: int) -> None:
    monkeypatch.setattr(panels, "CHUNK_ELEMENTS", chunk)
    tiling = Tiling(queries, 500, 16, tile, True)
    rows, tiles = [], []
    for part in panels_of(tiling, None, 48, 2, 8, CPU):
        assert part.ragged == (not part.real.all())
        assert part.row.shape == part.real.shape
        assert ((part.row >= 0) & (part.row < queries)).all()
        assert torch.equal(part.row // tile, part.tile[..., None].expand_as(part.row))
        rows += part.row[part.real].tolist()
        tiles += part.tile.flatten().tolist()
    assert tiles[: tiling.tiles] == list(range(tiling.tiles))
    assert set(tiles[tiling.tiles :]) <= {tiling.tiles - 1}
    assert rows[:queries] == list(range(queries))


@pytest.mark.parametrize("count", [1, 2, 3, 5, 16, 99])
def test_sample_rows_are_evenly_spaced_in_their_tile(count: int) -> None:
    tiling = Tiling(40, 40, 8, 16, True)
    (part,) = panels_of(tiling, count, 8, 1, 8, CPU)
    for tile, held in ((0, 16), (1, 16), (2, 8)):
        rows = part.row.view(-1, part.row.shape[-1])[tile][part.real.view(-1, part.row.shape[-1])[tile]] - tile * 16
        assert len(rows) == min(count, held)
        gaps = torch.cat([rows[:1] + 0.5, rows.diff(), held - 0.5 - rows[-1:]])
        step = held / len(rows)
        assert (gaps[1:-1] - step).abs().max() < 1 if len(rows) > 1 else True
        assert (gaps[[0, -1]] - step / 2).abs().max() <= 1


def test_queries_are_laid_out_by_panel_tile_head_and_row() -> None:
    tiling = Tiling(100, 100, 8, 16, True)
    q = torch.arange(3 * 100 * 2).view(3, 100, 2)
    (part,) = panels_of(tiling, None, 8, 3, 2, CPU)
    laid = part.queries(q)
    assert laid.shape == (2, 4, 3, 16, 2)
    assert torch.equal(laid[1, 1, 2, 7], q[2, 5 * 16 + 7])


lists = st.lists(st.integers(0, 9), max_size=6, unique=True).map(sorted)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(rows=st.lists(st.tuples(lists, lists, lists), min_size=1, max_size=4))
def test_a_union_holds_each_node_once_and_slots_find_it(rows: list[tuple[list[int], ...]]) -> None:
    nodes = torch.tensor([[tile + [-1] * (6 - len(tile)) for tile in panel] for panel in rows])
    union, slot = unite(nodes)
    member = membership(nodes, slot, union.shape[1])
    for p, panel in enumerate(rows):
        expected = sorted({node for tile in panel for node in tile})
        assert [node for node in union[p].tolist() if node >= 0] == expected
        assert union[p, : len(expected)].tolist() == expected
        for t, tile in enumerate(panel):
            assert union[p][slot[p, t, : len(tile)]].tolist() == tile
            assert union[p][member[p, t]].tolist() == tile


def test_a_panel_of_one_tile_is_its_own_union() -> None:
    nodes = torch.tensor([[[3, 5, -1]], [[0, 2, 9]]])
    union, slot = unite(nodes)
    assert torch.equal(union, nodes[:, 0])
    assert membership(nodes, slot, 3).tolist() == [[[True, True, False]], [[True, True, True]]]
