"""Appending to a cache: whatever comes in which order, it holds what a build over its keys holds, bit for bit."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from torch import Tensor

from pyramidbench.decoder import CacheLayout
from pyramidbench.errors import UserError
from pyramidbench.kernels.cache import CacheSizes
from pyramidbench.kernels.decoder import BlockDecoder
from pyramidbench.kernels.pyramid import build_pyramid, sub_block_means
from pyramidbench.kernels.walk_rules import WalkRules

BLOCK, HEAD_DIM, HEAD_DIM_V = 16, 16, 24
FULL = WalkRules(2, 1, 2, levels="full")
RULES = {
    "every-level": FULL,
    "means-only": WalkRules(2, 1, 2, levels="full", bound_weight=0),
    "branching-3": WalkRules(2, 1, 2, levels="full", branching=3),
    "from-4-nodes-on": WalkRules(2, 1, 2, start_width=4),
    "one-level": WalkRules(2, 1, 2, levels=1),
}
PARTS = WalkRules(2, 1, 2, levels="full", leaf_score="sub", sub_blocks=3)
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


def made(
    rules: WalkRules, max_len: int, dtype: torch.dtype = torch.float32, *, batch: int = 2, pages: int | None = None
) -> BlockDecoder:
    """An empty cache on the CPU whose memory holds NaN, so that reading what nobody wrote shows."""
    sizes = CacheSizes.of(batch, 2, (HEAD_DIM, HEAD_DIM_V), max_len, BLOCK, rules, pages)
    layout = CacheLayout(torch.device("cpu"), pages is not None, pages)
    cache = BlockDecoder(sizes, rules, HEAD_DIM**-0.5, dtype, layout, "reference")
    for tensor in (cache.store.k, cache.store.v, cache.store.nodes, cache.store.stats, cache.store.parts):
        if tensor is not None:
            tensor.fill_(torch.nan)
    return cache


def tokens(count: int, dtype: torch.dtype = torch.float32, batch: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    k, v = (torch.randn(batch, 2, count, dim, generator=generator).to(dtype) for dim in (HEAD_DIM, HEAD_DIM_V))
    return k, v


def check(cache: BlockDecoder, k: Tensor, v: Tensor, lengths: list[int]) -> None:
    """Tokens, and every level's nodes, against a build over the first lengths[b] tokens of each sequence.

    Complete nodes must be there before anybody reads; what open ones hold must not matter to what comes after.
    """
    store, sizes = cache.store, cache.sizes
    assert cache.lengths.tolist() == lengths
    for sequence, length in enumerate(lengths):
        assert torch.equal(store.rows_of(store.k, sequence, 0, length), k[sequence, :, :length])
        assert torch.equal(store.rows_of(store.v, sequence, 0, length), v[sequence, :, :length])
        built = build_pyramid(
            k[sequence : sequence + 1, :, :length], block_size=BLOCK, branching=sizes.branching, levels=sizes.levels,
            bound_weight=sizes.bound_weight,
        )  # fmt: skip
        for level, first in zip(range(sizes.levels), sizes.offsets):
            full = length // (BLOCK * sizes.branching**level)
            held = store.nodes[sequence, :, first : first + full]
            assert torch.equal(held, built.at(level)[0, :, :full]), f"level {level} at {length}, complete nodes"
        for level, held in enumerate(cache.summaries(sequence)):
            assert torch.equal(held, built.at(level)[0]), f"level {level} at {length}"
        for level, first in zip(range(sizes.levels), sizes.offsets):
            full = length // (BLOCK * sizes.branching**level)
            for tensor in (store.nodes, store.stats):
                tensor[sequence, :, first + full : first + sizes.nodes_at(level, sizes.max_len)] = torch.nan


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_token_by_token_equals_a_build_at_every_length(rules: WalkRules, dtype: torch.dtype) -> None:
    k, v = tokens(150, dtype)
    cache = made(rules, 150, dtype)
    for token in range(150):
        cache.append(k[:, :, token : token + 1], v[:, :, token : token + 1])
        if token % BLOCK in (0, 1, BLOCK - 2, BLOCK - 1):
            check(cache, k, v, [token + 1] * 2)


@pytest.mark.parametrize("pages", [None, 60], ids=["contiguous", "paged"])
@pytest.mark.parametrize("seed", range(4))
def test_prompts_tokens_cuts_and_different_lengths_in_any_order(seed: int, pages: int | None) -> None:
    draw = random.Random(seed)
    cache = made(FULL, 400, pages=pages)
    held = [torch.empty(2, 2, 0, dim) for dim in (HEAD_DIM, HEAD_DIM_V)]
    lengths = [0, 0]
    for step in range(25):
        if draw.random() < 0.3:
            lengths = [draw.randint(max(0, length - 40), length) for length in lengths]
            cache.truncate(lengths)
        else:
            new = tokens(draw.choice([1, 1, 2, 7, 16, 17, 60]) + 100 * step)
            counts = [min(draw.randint(0, new[0].shape[2]) % 70, 400 - length) for length in lengths]
            part = [x[:, :, : max(*counts, 1)] for x in new]
            cache.append(part[0], part[1], counts=counts)
            grown = [length + count for length, count in zip(lengths, counts)]
            for index, rows in enumerate(part):
                whole = torch.full((2, 2, max(grown), rows.shape[-1]), torch.nan)
                for b, (old, end) in enumerate(zip(lengths, grown)):
                    whole[b, :, :old] = held[index][b, :, :old]
                    whole[b, :, old:end] = rows[b, :, : end - old]
                held[index] = whole
            lengths = grown
        if min(lengths):
            check(cache, held[0], held[1], lengths)


@pytest.mark.parametrize("pages", [None, 100], ids=["contiguous", "paged"])
@pytest.mark.parametrize("seed", range(4))
def test_beams_that_branch_and_drop_in_any_order(seed: int, pages: int | None) -> None:
    draw = random.Random(seed)
    cache = made(PARTS, 400, batch=4, pages=pages)
    k, v = (x[:, :, :0] for x in tokens(1, batch=4))
    lengths = [0] * 4
    for step in range(40):
        act = draw.choice(["reorder", "reorder", "cut", "append", "append", "append"])
        if act == "reorder":
            sources = [draw.randrange(4) for _ in range(4)]
            cache.reorder(sources)
            k, v, lengths = k[sources], v[sources], [lengths[source] for source in sources]
        elif act == "cut":
            lengths = [draw.randint(max(0, length - 30), length) for length in lengths]
            cache.truncate(lengths)
        elif max(lengths) < 360:
            # Other tokens for each sequence, or what one writes into a page of another would not show.
            new = [x[:, :, step:] for x in tokens(step + draw.choice([1, 1, 2, 16, 17, 40]), batch=4)]
            cache.append(*new)
            k, v = (grown(x, y, lengths) for x, y in zip((k, v), new))
            lengths = [length + new[0].shape[2] for length in lengths]
        if min(lengths):
            check(cache, k, v, lengths)
            check_parts(cache, k, lengths)
        check_pages(cache, lengths)


def grown(held: Tensor, new: Tensor, lengths: list[int]) -> Tensor:
    """Tokens `new` behind the first lengths[b] of each sequence."""
    whole = torch.full((held.shape[0], 2, max(lengths) + new.shape[2], held.shape[3]), torch.nan)
    for b, length in enumerate(lengths):
        whole[b, :, :length] = held[b, :, :length]
        whole[b, :, length : length + new.shape[2]] = new[b]
    return whole


def check_parts(cache: BlockDecoder, k: Tensor, lengths: list[int]) -> None:
    """Means of all whole parts against those of a build."""
    assert cache.store.parts is not None
    for sequence, length in enumerate(lengths):
        parts, full = cache.sizes.parts, cache.sizes.full_parts(length)
        means, _ = sub_block_means(k[sequence, :, :length], block_size=BLOCK, parts=parts)
        assert torch.equal(cache.store.parts[sequence].flatten(1, 2)[:, :full], means.flatten(1, 2)[:, :full])


def check_pages(cache: BlockDecoder, lengths: list[int]) -> None:
    """Every page is free or has the users that are counted, and one where a token may still be written."""
    if cache.table is None:
        return
    table = cache.table
    users = Counter(page for pages in table.held for page in pages)
    assert table.users == [users[page] for page in range(len(table.users))]
    assert sorted([*table.free, *users]) == list(range(len(table.users)))
    for row, pages, length in zip(table.table.tolist(), table.held, lengths, strict=True):
        assert row == pages + [-1] * (len(row) - len(pages))
        assert len(pages) >= -(-length // BLOCK)
        assert all(users[page] == 1 for page in pages[length // BLOCK :])


def test_beams_share_full_pages_and_copy_the_open_one() -> None:
    k, v = tokens(40, batch=3)
    cache = made(FULL, 64, batch=3, pages=9)
    cache.append(k, v)
    cache.reorder([1, 1, 1])
    assert cache.table is not None
    assert [pages[:2] for pages in cache.table.held] == [cache.table.held[1][:2]] * 3
    assert len({pages[2] for pages in cache.table.held}) == 3
    assert len(cache.table.free) == 9 - 2 - 3
    cache.truncate([33, 20, 32])
    assert len(cache.table.free) == 9 - 2 - 2
    check_pages(cache, [33, 20, 32])
    check(cache, k[[1, 1, 1]], v[[1, 1, 1]], [33, 20, 32])


def test_a_reorder_keeps_the_room_that_was_reserved() -> None:
    """A graph that was captured before may be replayed after it without another `reserve`."""
    k, v = tokens(20, batch=2)
    cache = made(FULL, 64, pages=8)
    cache.append(k, v)
    cache.reserve(40)
    cache.reorder([1, 1])
    assert cache.table is not None
    assert [len(pages) for pages in cache.table.held] == [4, 4]
    check_pages(cache, [20, 20])


@pytest.mark.parametrize("act", ["reorder", "cut"])
def test_where_pages_run_out_nothing_changes(act: str) -> None:
    """One prompt for three beams, when no page is left for their open blocks; and a beam that is cut inside a shared page."""
    k, v = tokens(80, batch=3)
    cache = made(FULL, 128, batch=3, pages=5)
    lengths = [65, 0, 0]
    if act == "cut":
        cache.append(k, v, counts=[32, 0, 0])
        cache.reorder([0, 0, 1])
        lengths = [32, 80, 0]
        cache.append(k[:, :, 32:], v[:, :, 32:], counts=[0, 48, 0])
    else:
        cache.append(k, v, counts=lengths)
    assert cache.table is not None
    pages = [list(mine) for mine in cache.table.held]
    held = (cache.store.k, cache.store.v, cache.store.nodes, cache.store.stats, cache.store.lengths)
    before = [x.clone() for x in held]
    calls = {"reorder": lambda: cache.reorder([0, 0, 0]), "cut": lambda: cache.truncate([31, 80, 0])}
    with pytest.raises(
        UserError, match=r"the cache is full: \d more pages are needed and 0 are free; nothing was written"
    ):
        calls[act]()
    assert cache.table.held == pages
    check_pages(cache, lengths)
    assert all(torch.equal(x.nan_to_num(7), y.nan_to_num(7)) for x, y in zip(before, held, strict=True))


def test_a_rewrite_parts_from_the_beams_that_share_its_page() -> None:
    k, v = tokens(48, batch=2)
    other = tokens(10, batch=2)
    cache = made(FULL, 64, pages=8)
    cache.append(k, v)
    cache.reorder([0, 0])
    cache.append(*other, at=20)
    check(cache, *(torch.cat([x[[0, 0], :, :20], y], 2) for x, y in zip((k, v), other)), [30, 30])
    check_pages(cache, [30, 30])


@pytest.mark.parametrize("kept", [1, 15, 16, 17, 32, 33, 64, 128, 129, 200])
def test_cutting_off_leaves_what_a_build_of_the_rest_makes(kept: int) -> None:
    k, v = tokens(200)
    cache = made(FULL, 256)
    cache.append(k, v)
    cache.truncate(kept)
    check(cache, k, v, [kept] * 2)


def test_writing_again_at_an_earlier_position_forgets_what_stood_there() -> None:
    k, v = tokens(100)
    other = tokens(30)
    cache = made(FULL, 128)
    cache.append(k, v)
    cache.append(*other, at=60)
    check(cache, *(torch.cat([x[:, :, :60], y], 2) for x, y in zip((k, v), other)), [90, 90])


@pytest.mark.parametrize("pages", [None, 8], ids=["contiguous", "paged"])
def test_a_full_cache_refuses_and_stays_intact(pages: int | None) -> None:
    k, v = tokens(65)
    cache = made(FULL, 64, pages=pages)
    cache.append(k[:, :, :63], v[:, :, :63])
    with pytest.raises(UserError, match="the cache is full: sequence 0 would hold 65 tokens, and there is room for 64"):
        cache.append(k[:, :, 63:], v[:, :, 63:])
    check(cache, k, v, [63, 63])
    cache.append(k[:, :, 63:64], v[:, :, 63:64])
    check(cache, k, v, [64, 64])


def test_pages_run_out_and_come_back() -> None:
    k, v = tokens(64)
    cache = made(FULL, 64, pages=6)
    cache.append(k, v, counts=[64, 20])
    with pytest.raises(UserError, match="1 more pages are needed and 0 are free"):
        cache.append(k, v, counts=[0, 13])
    check(cache, k, v, [64, 20])
    cache.truncate([33, 20])
    cache.append(k[:, :, 20:40], v[:, :, 20:40], counts=[0, 20])
    assert cache.lengths.tolist() == [33, 40]
    assert cache.table is not None
    assert not cache.table.free


def test_a_token_touches_the_nodes_that_end_with_it() -> None:
    """O(log N): of the nodes of a long cache, one block's and those of its ancestors change, or none."""
    k, v = tokens(1025)
    cache = made(WalkRules(2, 1, 2, levels="full", bound_weight=0.5), 2048)
    cache.append(k[:, :, :1007], v[:, :, :1007])
    for start, end, touched in [(1007, 1008, 1), (1008, 1009, 0), (1009, 1023, 0), (1023, 1024, 7), (1024, 1025, 0)]:
        before = cache.store.nodes.clone()
        cache.append(k[:, :, start:end], v[:, :, start:end])
        changed = ~((cache.store.nodes == before) | (cache.store.nodes.isnan() & before.isnan())).all(-1)
        assert changed.sum(-1).tolist() == [[touched] * 2] * 2, end


def test_there_is_no_pyramid_of_an_empty_sequence_or_of_none() -> None:
    cache = made(FULL, 64)
    assert [level.shape for level in cache.summaries(1)] == [(2, 0, 2 * HEAD_DIM)] * cache.sizes.levels
    with pytest.raises(UserError, match="sequence 2: accepted: 0 to 1"):
        cache.summaries(2)
