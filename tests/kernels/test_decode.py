"""The decode step against the prefill path: for the newest queries the same sets, and the same outputs up to rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pyramidbench.decoder import CacheLayout
from pyramidbench.kernels.attention import sparse_attention
from pyramidbench.kernels.cache import CacheSizes
from pyramidbench.kernels.decoder import BlockDecoder
from pyramidbench.kernels.walk import build, route_reference
from pyramidbench.kernels.walk_rules import WalkRules
from pyramidbench.selection import BlockSelection
from pyramidbench.tiling import Tiling

BASE = {"sink_blocks": 1, "local_blocks": 2}
NARROW = {**BASE, "start_width": 4, "beam": 1}
RULES = {
    "default": WalkRules(3, **NARROW),
    "beam-2-filter-2": WalkRules(2, **{**NARROW, "beam": 2}, leaf_candidates=2),
    "paper": WalkRules(
        2, **BASE, beam=1, levels="full", bound_weight=0, node_score="children", leaf_candidates=None, head_reduce="sum_lse"
    ),
    "children-with-bounds": WalkRules(2, **BASE, beam=1, levels="full", node_score="children", head_reduce="lse"),
    "branching-3-summary-leaf": WalkRules(2, **{**NARROW, "start_width": 3}, branching=3, leaf_score="summary"),
    "flat": WalkRules(3, **BASE, levels=1, leaf_score="summary"),
    "flat-filtered": WalkRules(3, **BASE, levels=1, leaf_candidates=2),
    "sub": WalkRules(2, **NARROW, leaf_score="sub", sub_blocks=5, leaf_candidates=2),
    "set-per-query-head": WalkRules(2, **NARROW, head_reduce="none"),
    "forced-in-budget": WalkRules(5, **NARROW, forced_in_budget=True),
    "nothing-by-rank": WalkRules(0, **NARROW),
    "no-sinks-3-levels": WalkRules(2, sink_blocks=0, local_blocks=1, levels=3, beam=1),
    "wide-sinks-and-window": WalkRules(2, **{**NARROW, "sink_blocks": 3, "local_blocks": 5}),
}  # fmt: skip
HEADS, KV_HEADS = 4, 2


def drawn(
    batch: int, queries: int, keys: int, dim: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(keys)
    shapes = ((HEADS, queries, dim), (KV_HEADS, keys, dim), (KV_HEADS, keys, dim + 8))
    q, k, v = (torch.randn(batch, *shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return q, k, v


def cache_of(
    rules: WalkRules, k: Tensor, v: Tensor, lengths: list[int], block: int, *, room: int, paged: bool
) -> BlockDecoder:
    """A cache with room for more tokens, all of which is NaN where it is not used."""
    max_len = max(lengths) + room
    pages = len(lengths) * -(-max_len // block) if paged else None
    sizes = CacheSizes.of(len(lengths), k.shape[1], (k.shape[3], v.shape[3]), max_len, block, rules, pages)
    layout = CacheLayout(torch.device("cpu"), paged, pages)
    cache = BlockDecoder(sizes, rules, k.shape[3] ** -0.5, k.dtype, layout, "reference")
    for tensor in (cache.store.k, cache.store.v, cache.store.nodes, cache.store.stats, cache.store.parts):
        if tensor is not None:
            tensor.fill_(torch.nan)
    cache.append(k, v, counts=lengths)
    return cache


def check(cache: BlockDecoder, q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> None:
    """Sets and outputs of every sequence's newest queries against walk and attention over its keys alone."""
    lists, output, scale = cache.lists(q), cache.attend(q), q.shape[3] ** -0.5
    for b, length in enumerate(lengths):
        mine = (q[b : b + 1], k[b : b + 1, :, :length], v[b : b + 1, :, :length])
        tiling = Tiling(q.shape[2], length, cache.sizes.block_size, 1, True)
        pyramid = build(mine[1], tiling, cache.rules)
        expected = route_reference(mine[0], mine[1], pyramid, tiling, cache.rules, scale)
        padded = torch.nn.functional.pad(expected, (0, lists.shape[-1] - expected.shape[-1]), value=-1)
        assert torch.equal(lists[b : b + 1], padded), f"sets at {length}"
        attended = sparse_attention(*mine, BlockSelection.from_indices(expected, tiling))
        torch.testing.assert_close(output[b : b + 1], attended, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_equal_to_prefill_at_every_length_to_300(rules: WalkRules) -> None:
    q, k, v = drawn(1, 300, 300, 8)
    cache = cache_of(rules, k[:, :, :1], v[:, :, :1], [1], 8, room=330, paged=False)
    for length in range(1, 301):
        if length > 1:
            cache.append(k[:, :, length - 1 : length], v[:, :, length - 1 : length])
        # All lengths for the default; for the others those around a block's edge.
        if rules is RULES["default"] or length % 8 in (0, 1, 7):
            check(cache, q[:, :, length - 1 : length], k, v, [length])


@pytest.mark.parametrize("queries", [2, 5, 16])
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_several_new_queries_are_causal_among_themselves(rules: WalkRules, queries: int) -> None:
    lengths = [queries, 63, 64, 65, 257]
    q, k, v = drawn(len(lengths), queries, 257, 8)
    check(cache_of(rules, k, v, lengths, 16, room=20, paged=True), q, k, v, lengths)


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_mixed_lengths_up_to_100k(paged: bool) -> None:
    lengths = torch.randint(1, 100_000, (4,), generator=torch.Generator().manual_seed(1)).tolist()
    lengths.append(100_000)
    rules = WalkRules(4, **BASE, beam=2)
    q, k, v = drawn(len(lengths), 2, max(lengths), 8)
    check(cache_of(rules, k, v, lengths, 64, room=64, paged=paged), q, k, v, lengths)


@pytest.mark.parametrize("levels", ["auto", "full"])
def test_lengths_that_cross_the_boundary_of_every_level(levels: str) -> None:
    """Around every 16·2ˡ tokens a level gains its second node, and with "auto" the walk starts one level higher."""
    rules = WalkRules(2, **BASE, beam=1, start_width=4, levels=levels)  # type: ignore[arg-type]
    for level in range(8):
        edge = 16 << level
        q, k, v = drawn(4, 1, edge + 2, 8)
        lengths = [edge - 1, edge, edge + 1, edge + 2]
        check(cache_of(rules, k, v, lengths, 16, room=4200 - edge, paged=False), q, k, v, lengths)


def test_a_query_before_the_first_token_gets_nothing() -> None:
    q, k, v = drawn(1, 3, 2, 8)
    cache = cache_of(RULES["default"], k, v, [2], 16, room=4, paged=False)
    assert cache.lists(q)[0, 0, :, 0].tolist() == [-1, 0, 0]
    assert bool((cache.attend(q)[:, :, 0] == 0).all())
    assert bool((cache.attend(q)[:, :, 1:] != 0).all())
