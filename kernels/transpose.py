"""The transposed list: for each key block, the query tiles that list it, in query order.

The lists [sets, tiles, S] are cut into segments, runs of one set's tiles (`Cut`). From the slots [begin, end) that count:
a segment's pairs (tile, slot), ordered by block, then tile; the place of each pair among them, by tile and slot; and a work
list that cuts every block's pairs into chunks of a bounded number, so that one block that every query chose does not
serialise a launch.
No atomics in the order: 32 tiles make a part, and a table [part, block] holds, in its low word, a bit for each tile of the
part that lists the block (an OR, whatever its order), in its high word the pairs of the block in the parts before. So a
pair's place is first(block) + high word + the ones below its bit: the result is the same, bit for bit, on every run.
Steps: mark (OR; one program = one part), count (scan of the parts; one program = COUNT_BLOCKS blocks of a segment), chunks
(scan of the blocks; one program = one segment), fill (one program = one part). Each is one launch for many segments.
Lists hold no block twice. Cost: each pair is one OR, one 8-byte gather, one 4-byte scatter and one 4-byte store; the table
takes 8·blocks bytes per 32 tiles, written, read and rewritten once. Bound by scattered L2 accesses.
`transpose_reference` (a stable sort) is the torch twin.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

PART = tl.constexpr(32)
COUNT_BLOCKS = 32
COUNT_PARTS = 64
SCAN_BLOCKS = 1024


@dataclass(frozen=True)
class Cut:
    """Lists [sets, tiles] in segments of at most `run` tiles of one set; sets count through the batch."""

    sets: int
    tiles: int
    run: int

    @property
    def runs(self) -> int:
        """Segments of a set."""
        return triton.cdiv(self.tiles, self.run)

    @property
    def segments(self) -> int:
        return self.sets * self.runs

    def parts(self) -> int:
        """Parts of a segment."""
        return triton.cdiv(self.run, PART.value)


@dataclass(frozen=True)
class Transposed:
    """Pairs by key block, for `pairs.shape[0]` segments at a time; all on the device. Places past the counts hold garbage.

    pairs: int32 [segments, run·S], the tile (in its set) of each pair; places: int32 [segments, run, S], where in `pairs` a
    slot stands; chunks: int32 [segments, most chunks, 3]: block, first pair and end; chunk_counts: int32 [segments].
    first: int32 [segments, blocks], a block's first pair; table: int64 [segments, parts, blocks].
    """

    pairs: Tensor
    places: Tensor
    chunks: Tensor
    chunk_counts: Tensor
    first: Tensor
    table: Tensor


@triton.jit
def _ones(bits):
    """Ones in each of int32 `bits`."""
    x = bits.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _part_tiles(begin_ptr, end_ptr, first_segment, sets, tiles, run):
    """A part's tiles in their segment and in their set, their lists, and the slots [begin, end) that count: all [PART]."""
    parts = tl.cdiv(run, PART)
    program = tl.program_id(0).to(tl.int64)
    runs = tl.cdiv(tiles, run)
    segment = first_segment + program // parts
    in_run = (program % parts).to(tl.int32) * PART + tl.arange(0, PART)
    tile = (segment % runs).to(tl.int32) * run + in_run
    item = segment // runs * tiles + tile
    live = (in_run < run) & (tile < tiles) & (item < sets * tiles)
    begin = tl.load(begin_ptr + item, mask=live, other=0)
    end = tl.load(end_ptr + item, mask=live, other=0)
    return in_run, tile, item, begin, end


@triton.jit(do_not_specialize=["first_segment"])
def _mark(
    lists_ptr, begin_ptr, end_ptr, table_ptr, first_segment, sets, tiles, run, width, blocks, SLOTS: tl.constexpr
):  # fmt: skip
    _, _, item, begin, end = _part_tiles(begin_ptr, end_ptr, first_segment, sets, tiles, run)
    bit = (tl.full([PART], 1, tl.int32) << tl.arange(0, PART))[:, None]
    # The low words of the part's entries.
    table_ptr += tl.program_id(0).to(tl.int64) * blocks * 2
    for start in range(0, width, SLOTS):
        slot = start + tl.arange(0, SLOTS)[None, :]
        # of shape [PART, SLOTS]
        counts = (slot >= begin[:, None]) & (slot < end[:, None])
        block = tl.load(lists_ptr + item[:, None] * width + slot, mask=counts, other=0)
        tl.atomic_or(table_ptr + block * 2, bit.broadcast_to(PART, SLOTS), mask=counts, sem="relaxed")


@triton.jit
def _count(table_ptr, first_ptr, blocks, parts, PARTS: tl.constexpr, BLOCKS: tl.constexpr):
    groups = tl.cdiv(blocks, BLOCKS)
    program = tl.program_id(0).to(tl.int64)
    segment = program // groups
    block = (program % groups).to(tl.int32) * BLOCKS + tl.arange(0, BLOCKS)
    before = tl.zeros([BLOCKS], tl.int32)
    for start in tl.range(0, parts, PARTS, num_stages=2):
        part = start + tl.arange(0, PARTS)
        inside = (part < parts)[:, None] & (block < blocks)[None, :]
        at = table_ptr + (segment * parts + part[:, None]) * blocks + block[None, :]
        # of shape [PARTS, BLOCKS]
        entry = tl.load(at, mask=inside, other=0)
        ones = _ones(entry.to(tl.int32))
        high = before[None, :] + tl.cumsum(ones, 0) - ones
        tl.store(at, entry | (high.to(tl.int64) << 32), mask=inside)
        before += tl.sum(ones, 0)
    tl.store(first_ptr + segment * blocks + block, before, mask=block < blocks)


@triton.jit
def _chunks(first_ptr, chunks_ptr, chunk_count_ptr, blocks, most_pairs, most_chunks, BLOCKS: tl.constexpr):
    """Turn the pairs of each block into its first pair, and cut them into chunks."""
    segment = tl.program_id(0).to(tl.int64)
    pairs = 0
    chunks = 0
    for start in tl.range(0, blocks, BLOCKS, num_stages=2):
        block = start + tl.arange(0, BLOCKS)
        at = first_ptr + segment * blocks + block
        total = tl.load(at, mask=block < blocks, other=0)
        first = pairs + tl.cumsum(total) - total
        tl.store(at, first, mask=block < blocks)
        cuts = tl.cdiv(total, most_pairs)
        chunk_at = chunks_ptr + (segment * most_chunks + chunks + tl.cumsum(cuts) - cuts) * 3
        for cut in range(0, tl.max(cuts)):
            begin = first + cut * most_pairs
            tl.store(chunk_at, block, mask=cuts > cut)
            tl.store(chunk_at + 1, begin, mask=cuts > cut)
            tl.store(chunk_at + 2, tl.minimum(begin + most_pairs, first + total), mask=cuts > cut)
            chunk_at += 3
        pairs += tl.sum(total)
        chunks += tl.sum(cuts)
    tl.store(chunk_count_ptr + segment, chunks)


@triton.jit(do_not_specialize=["first_segment"])
def _fill(
    lists_ptr, begin_ptr, end_ptr, table_ptr, first_ptr, pairs_ptr, places_ptr, first_segment, sets, tiles, run, width,
    blocks, SLOTS: tl.constexpr,
):  # fmt: skip
    in_run, tile, item, begin, end = _part_tiles(begin_ptr, end_ptr, first_segment, sets, tiles, run)
    program = tl.program_id(0).to(tl.int64)
    segment = program // tl.cdiv(run, PART)
    table_ptr += program * blocks
    first_ptr += segment * blocks
    pairs_ptr += segment * run * width
    place_at = places_ptr + ((segment * run + in_run) * width)[:, None]
    below = ((tl.full([PART], 1, tl.int32) << tl.arange(0, PART)) - 1)[:, None]
    for start in range(0, width, SLOTS):
        slot = start + tl.arange(0, SLOTS)[None, :]
        # of shape [PART, SLOTS]
        counts = (slot >= begin[:, None]) & (slot < end[:, None])
        block = tl.load(lists_ptr + item[:, None] * width + slot, mask=counts, other=0)
        entry = tl.load(table_ptr + block, mask=counts, other=0)
        first = tl.load(first_ptr + block, mask=counts, other=0)
        place = first + (entry >> 32).to(tl.int32) + _ones(entry.to(tl.int32) & below)
        tl.store(pairs_ptr + place, tile[:, None].broadcast_to(PART, SLOTS), mask=counts)
        tl.store(place_at + slot, place, mask=counts)


def transposed_room(
    cut: Cut, segments: int, width: int, blocks: int, most_pairs: int, device: torch.device
) -> Transposed:
    """Room for `segments` segments of lists of `width` slots, `most_pairs` pairs a chunk; every call can use it again."""
    most = cut.run * width
    assert most < 2**31, f"{most} places of a segment do not fit int32; cut shorter runs"

    def room(*shape: int) -> Tensor:
        return torch.empty(segments, *shape, dtype=torch.int32, device=device)

    table = torch.empty(segments, cut.parts(), blocks, dtype=torch.int64, device=device)
    chunks = room(most // most_pairs + blocks, 3)
    return Transposed(room(most), room(cut.run, width), chunks, room(), room(blocks), table)


def transpose(
    lists: Tensor, begins: Tensor, ends: Tensor, cut: Cut, first_segment: int, most_pairs: int, into: Transposed
) -> None:
    """Transpose segments of lists [sets, tiles, S] from `first_segment` on, as many as `into` holds (or are left).

    lists, begins, ends: int32, contiguous; the slots [begin, end) of a list count, what stands in others is not read.
    most_pairs: as given to `transposed_room`.
    """
    width, (segments, blocks) = lists.shape[-1], into.first.shape
    slots = min(64, triton.next_power_of_2(max(1, width)))
    where = (first_segment, cut.sets, cut.tiles, cut.run, width, blocks)
    into.table.zero_()
    parts = cut.parts()
    _mark[(segments * parts,)](lists, begins, ends, into.table.view(torch.int32), *where, SLOTS=slots)
    grid = (segments * triton.cdiv(blocks, COUNT_BLOCKS),)
    _count[grid](into.table, into.first, blocks, parts, PARTS=COUNT_PARTS, BLOCKS=COUNT_BLOCKS)
    most_chunks = into.chunks.shape[1]
    _chunks[(segments,)](
        into.first, into.chunks, into.chunk_counts, blocks, most_pairs, most_chunks, BLOCKS=SCAN_BLOCKS, num_warps=8
    )
    _fill[(segments * parts,)](
        lists, begins, ends, into.table, into.first, into.pairs, into.places, *where, SLOTS=slots
    )  # fmt: skip


def transpose_reference(lists: Tensor, begins: Tensor, ends: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """The (tile, slot) of each real pair of one segment [tiles, S], int64 [pairs, 2], and the pairs of each block, by a
    stable sort."""
    width = lists.shape[1]
    slot = torch.arange(width, device=lists.device)
    counts = (slot >= begins[:, None]) & (slot < ends[:, None])
    block = torch.where(counts, lists, blocks).flatten()
    order = block.argsort(stable=True)[: int(counts.sum())]
    return torch.stack([order // width, order % width], -1), block.bincount(minlength=blocks + 1)[:-1]
