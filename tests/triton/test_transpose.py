"""The transposed list against a stable sort: equal, element by element."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor


def drawn(sets: int, tiles: int, width: int, blocks: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Ascending lists of distinct blocks; half of them hold block 1; garbage outside [begin, end)."""
    torch.manual_seed(0)
    scores = torch.rand(sets, tiles, blocks)
    scores[:, ::2, 1 % blocks] = 2
    lists = scores.topk(width, dim=-1).indices.sort(-1).values.to(torch.int32)
    ends = torch.randint(0, width + 1, (sets, tiles), dtype=torch.int32)
    begins = torch.minimum(torch.randint(0, 3, (sets, tiles), dtype=torch.int32), ends)
    slot = torch.arange(width)
    lists[(slot < begins[..., None]) | (slot >= ends[..., None])] = -(2**31)
    return lists.to(device), begins.to(device), ends.to(device)


CASES = [(1, 1, 1, 1, 1), (1, 32, 3, 5, 32), (2, 33, 5, 40, 33), (3, 70, 7, 9, 41), (1, 100, 65, 130, 30)]
LARGE = [(3, 5000, 48, 1700, 2500, 128)]
"""Sets, tiles, slots, blocks, tiles of a segment, and pairs of a chunk."""


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("most_pairs", [4, 16])
def test_equals_a_stable_sort(case: tuple[int, ...], most_pairs: int, device: str) -> None:
    check((*case, most_pairs), device)


@pytest.mark.gpu
@pytest.mark.parametrize("case", LARGE)
def test_many_lists(case: tuple[int, ...], device: str) -> None:
    check(case, device)


def test_no_pair_at_all(device: str) -> None:
    from pyramidbench.kernels.transpose import Cut, transpose, transposed_room

    zeros = torch.zeros(2, 40, dtype=torch.int32, device=device)
    lists, cut = torch.full((2, 40, 3), -1, dtype=torch.int32, device=device), Cut(2, 40, 40)
    room = transposed_room(cut, 2, 3, 6, 8, torch.device(device))
    transpose(lists, zeros, zeros, cut, 0, 8, room)
    assert room.chunk_counts.tolist() == [0, 0]


def check(case: tuple[int, ...], device: str) -> None:
    """Two segments at a time, into the same room."""
    from pyramidbench.kernels.transpose import Cut, transpose, transposed_room

    sets, tiles, width, blocks, run, most_pairs = case
    lists, begins, ends = drawn(sets, tiles, width, blocks, device)
    cut = Cut(sets, tiles, run)
    room = transposed_room(cut, 2, width, blocks, most_pairs, torch.device(device))
    for first in range(0, cut.segments, 2):
        transpose(lists, begins, ends, cut, first, most_pairs, room)
        for place in range(min(2, cut.segments - first)):
            which, start = divmod(first + place, cut.runs)
            part = slice(start * run, min((start + 1) * run, tiles))
            check_segment(room, place, start * run, [x[which, part] for x in (lists, begins, ends)], most_pairs)


def check_segment(room: object, place: int, first_tile: int, lists: list[Tensor], most_pairs: int) -> None:
    from pyramidbench.kernels.transpose import Transposed, transpose_reference

    assert isinstance(room, Transposed)
    pairs, sizes = transpose_reference(*lists, room.first.shape[1])
    assert torch.equal(room.pairs[place, : len(pairs)].long(), first_tile + pairs[:, 0])
    assert torch.equal(room.places[place, pairs[:, 0], pairs[:, 1]], torch.arange(len(pairs), device=pairs.device))
    ends = sizes.cumsum(0)
    assert torch.equal(room.first[place].long(), ends - sizes)
    expected = [
        [block, first, min(first + most_pairs, end)]
        for block, (begin, end) in enumerate(zip((ends - sizes).tolist(), ends.tolist(), strict=True))
        for first in range(begin, end, most_pairs)
    ]
    assert room.chunks[place, : int(room.chunk_counts[place])].tolist() == expected
