"""The Triton kernels of decoding against their twins: what an append leaves, and sets and outputs of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from pyramidbench.decoder import CacheLayout
from pyramidbench.errors import UserError
from pyramidbench.kernels.cache import CacheSizes, CacheStore
from pyramidbench.kernels.cache_append import append_reference
from pyramidbench.kernels.decode import attend_reference, choose_reference
from pyramidbench.kernels.decoder import BlockDecoder
from pyramidbench.kernels.walk_rules import WalkRules

BASE = {"sink_blocks": 1, "local_blocks": 2}
NARROW: dict[str, Any] = {**BASE, "start_width": 4, "beam": 1}
PAPER: dict[str, Any] = {**BASE, "beam": 1, "levels": "full", "bound_weight": 0.0, "node_score": "children",
                         "leaf_candidates": None, "head_reduce": "sum_lse"}  # fmt: skip
WIDE: dict[str, Any] = {**BASE, "top_k": 8}


@dataclass(frozen=True)
class Case:
    """Lengths of the sequences, rules and sizes of the cache. `scan_bytes`: what may be scored whole."""

    name: str
    rules: dict[str, Any]
    lengths: tuple[int, ...] = (1, 3, 200)
    queries: int = 1
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    head_dim_v: int = 24
    block_size: int = 16
    room: int = 20
    paged: bool = False
    scan_bytes: int | None = None


EDGES = tuple((16 << level) + past for level in range(7) for past in (-1, 0, 1))
TO_300 = tuple(length for length in range(1, 301) if length % 16 in (0, 1))
SMALL = [
    Case("default", {**NARROW, "top_k": 3}),
    Case("upper-levels-scored-whole-paged", {**NARROW, "top_k": 3}, (300, 17, 64), queries=2, paged=True, scan_bytes=16384),
    Case("branching-3-summary-leaf", {**NARROW, "start_width": 3, "top_k": 2, "branching": 3, "leaf_score": "summary"}),
    Case("flat-scored-whole", {**BASE, "top_k": 3, "levels": 1, "leaf_score": "summary"}, (130, 300), scan_bytes=16384),
    Case("flat-filtered-lse", {**BASE, "top_k": 3, "levels": 1, "leaf_candidates": 2, "head_reduce": "lse"}),
    Case("set-per-query-head", {**NARROW, "top_k": 2, "head_reduce": "none"}, (200, 33), queries=3),
    Case("forced-in-budget-means-sum-lse", {**NARROW, "top_k": 5, "forced_in_budget": True, "bound_weight": 0.0,
         "head_reduce": "sum_lse"}),
    Case("quest", {**BASE, "top_k": 3, "levels": 1, "bound_weight": 1.0, "leaf_candidates": None, "leaf_score": "summary",
         "head_reduce": "none"}, (300, 33), queries=2),
    Case("flat-more-nodes-than-a-start-has", {**BASE, "top_k": 1, "levels": 1, "leaf_score": "summary"}, (1200, 33)),
    Case("moba", {"top_k": 3, "sink_blocks": 0, "local_blocks": 1, "forced_in_budget": True, "levels": 1, "bound_weight": 0.0,
         "leaf_candidates": None, "leaf_score": "summary", "head_reduce": "none"}, (300, 15)),
    Case("hisa", {**BASE, "top_k": 2, "branching": 4, "levels": 2, "beam": 1.0, "bound_weight": 0.0, "leaf_candidates": None,
         "head_reduce": "sum_lse"}, (500, 70)),
    Case("paper", {**PAPER, "top_k": 2}, (300, 64, 33), queries=2),
    Case("paper-scored-whole-set-per-query-head", {**PAPER, "top_k": 2, "head_reduce": "none"}, (330, 64), scan_bytes=32768),
    Case("children-with-bounds-branching-3-filtered", {**NARROW, "top_k": 2, "start_width": 3, "branching": 3,
         "node_score": "children", "leaf_candidates": 2}, (500, 70), heads=6, scan_bytes=8192),
    Case("ragged-blocks-in-two-parts", {**NARROW, "top_k": 2}, (200, 25, 40), block_size=24),
    Case("sub", {**NARROW, "top_k": 2, "leaf_score": "sub"}, (200, 64, 7), queries=3, paged=True),
    Case("sub-of-ragged-parts-lse", {**NARROW, "top_k": 2, "leaf_score": "sub", "sub_blocks": 5, "head_reduce": "lse"},
         (250, 90), block_size=12, head_dim=24),
    Case("flat-sub-all-candidates", {**BASE, "top_k": 3, "levels": 1, "leaf_score": "sub", "leaf_candidates": None,
         "sub_blocks": 3, "head_reduce": "none", "forced_in_budget": True}, (300, 41), queries=5),
    Case("sixteen-queries", {**NARROW, "top_k": 1, "leaf_candidates": 2}, (90, 20), queries=16, heads=2, kv_heads=1),
    Case("every-level-gains-a-node", {**NARROW, "top_k": 1, "leaf_score": "summary"}, EDGES, heads=2, kv_heads=1),
    Case("around-every-block-to-300", {**NARROW, "top_k": 1, "leaf_candidates": 2, "head_reduce": "lse"}, TO_300, heads=1,
         kv_heads=1),
    Case("nothing-by-rank", {**NARROW, "top_k": 0}, (2, 90), queries=3),
    Case("all-candidates-group-3-odd-dims", {"top_k": 2, "sink_blocks": 0, "local_blocks": 1, "levels": 3, "beam": 1,
         "leaf_candidates": None}, (150, 40), heads=3, kv_heads=1, head_dim=24, head_dim_v=8, block_size=12),
]  # fmt: skip
LARGE = [
    Case("256k", {**WIDE, "top_k": 32}, (262_144,), heads=32, kv_heads=8, head_dim=128, head_dim_v=128, block_size=64),
    Case("mixed", {**WIDE, "top_k": 16}, (1, 63, 4096, 100_000), queries=4, heads=8, kv_heads=2, head_dim=128, head_dim_v=128,
         block_size=64, paged=True),
    Case("wide-start", {**WIDE, "top_k": 32, "start_width": 2048}, (131_072, 70_001), heads=16, kv_heads=4, head_dim=128,
         head_dim_v=128, block_size=64),
    Case("flat", {**WIDE, "levels": 1, "leaf_score": "summary"}, (200_000,), heads=8, kv_heads=2, head_dim=64, head_dim_v=64,
         block_size=32),
    Case("quest", {**WIDE, "top_k": 32, "levels": 1, "bound_weight": 1.0, "leaf_candidates": None, "leaf_score": "summary",
         "head_reduce": "none"}, (262_144, 5), heads=32, kv_heads=8, head_dim=128, head_dim_v=128, block_size=64),
    Case("paper", {**PAPER, "top_k": 32}, (262_144, 63), heads=32, kv_heads=8, head_dim=128, head_dim_v=128, block_size=64),
    Case("children-with-bounds", {**WIDE, "top_k": 16, "node_score": "children", "start_width": 512}, (100_000, 4097),
         queries=3, heads=16, kv_heads=2, head_dim=128, head_dim_v=128, block_size=64, paged=True),
    Case("sub", {**WIDE, "top_k": 32, "leaf_score": "sub"}, (131_071, 70_001, 5), queries=2, heads=16, kv_heads=4, head_dim=128,
         head_dim_v=128, block_size=64, paged=True),
    Case("flat-sub", {**WIDE, "levels": 1, "leaf_score": "sub", "leaf_candidates": None, "head_reduce": "lse"}, (50_000,),
         heads=8, kv_heads=2, head_dim=64, head_dim_v=64, block_size=32),
    Case("every-length-to-300", {**NARROW, "top_k": 2}, tuple(range(1, 301)), queries=2, block_size=16),
    Case("every-length-to-300-paper", {**PAPER, "top_k": 2}, tuple(range(1, 301)), block_size=16, paged=True),
    Case("every-length-to-300-sub", {**NARROW, "top_k": 2, "leaf_score": "sub"}, tuple(range(1, 301)), block_size=16),
    # Scores of two heads, which the compiler would add anew for the second index of a comparison: too few were chosen.
    Case("few-candidates", {**NARROW, "top_k": 2}, (90, 20), queries=2, head_dim=64, head_dim_v=64, paged=True),
    Case("few-candidates-sub", {**NARROW, "top_k": 2, "node_score": "children", "leaf_score": "sub"}, (90, 20), queries=2,
         head_dim=64, head_dim_v=64, paged=True),
    Case("head-dim-256", {**WIDE, "beam": 2}, (50_000, 9), queries=16, heads=4, kv_heads=1, head_dim=256, head_dim_v=256,
         block_size=64),
]  # fmt: skip


def named(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def drawn(case: Case, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, none of them contiguous in all dimensions."""
    torch.manual_seed(0)
    batch, keys = len(case.lengths), max(case.lengths)
    q = torch.randn(batch, case.queries, case.heads, case.head_dim, device=device).to(dtype).transpose(1, 2)
    k = torch.randn(batch, keys, case.kv_heads, case.head_dim, device=device).to(dtype).transpose(1, 2)
    return q, k, torch.randn(batch, case.kv_heads, keys, case.head_dim_v, device=device).to(dtype)


def empty(case: Case, dtype: torch.dtype, device: str) -> CacheStore:
    """A cache that holds NaN where nothing is written, with its pages in no order."""
    rules, batch, max_len = WalkRules(**case.rules), len(case.lengths), max(case.lengths) + case.room
    blocks = -(-max_len // case.block_size)
    pages = batch * blocks if case.paged else None
    dims = (case.head_dim, case.head_dim_v)
    sizes = CacheSizes.of(batch, case.kv_heads, dims, max_len, case.block_size, rules, pages)
    store = CacheStore.empty(sizes, dtype, torch.device(device))
    for tensor in (store.k, store.v, store.nodes, store.stats, store.parts):
        if tensor is not None:
            tensor.fill_(torch.nan)
    if store.pages is not None:
        store.pages.copy_(torch.randperm(batch * blocks).view(batch, -1))
    return store


def check_step(case: Case, dtype: torch.dtype, device: str) -> float:
    """Share of lists that differ from the twin's on one cache; outputs must agree under the kernel's own lists."""
    from pyramidbench.kernels.decode_call import decode_gap
    from pyramidbench.kernels.decode_step import step

    q, k, v = drawn(case, dtype, device)
    store, rules, scale = empty(case, dtype, device), WalkRules(**case.rules), case.head_dim**-0.5
    assert decode_gap(store.sizes, rules, str(dtype).removeprefix("torch.")) is None
    append_reference(store, k, v, [0] * len(case.lengths), list(case.lengths))
    twin = choose_reference(q, store, rules, scale)
    output, lists = step(q, store, rules, scale)
    assert (lists.shape, lists.dtype) == (twin.shape, twin.dtype)
    # A near-tie swaps a block; it neither adds nor drops one.
    assert torch.equal((lists >= 0).sum(-1), (twin >= 0).sum(-1))
    expected = attend_reference(q, store, lists, scale).double()
    allowed = 4 * torch.finfo(dtype).eps * float(expected.abs().max()) + 1e-6
    assert bool(((output.double() - expected).abs() <= allowed).all())
    return float((lists != twin).any(-1).double().mean())


def check_append(case: Case, dtype: torch.dtype, device: str, parts: tuple[int, ...], cut: int | None = None) -> None:
    """A cache that grew by `parts` tokens at a time, and was cut, against the kernels that build a pyramid: bit for bit."""
    from pyramidbench.kernels.decode_append import append, finish_ends
    from pyramidbench.kernels.pooled_queries import sub_block_means
    from pyramidbench.kernels.pyramid_build import build

    _, k, v = drawn(case, dtype, device)
    store, length = empty(case, dtype, device), 0
    for count in parts:
        append(store, k[:, :, length : length + count], v[:, :, length : length + count], None, None)
        length += count
    if cut is not None:
        store.lengths.fill_(cut)
        length = cut
    assert int(store.full) == 0
    assert store.lengths.unique().tolist() == [length]
    sizes = store.sizes
    built = build(
        k[:, :, :length], block_size=case.block_size, branching=sizes.branching, levels=sizes.levels,
        bound_weight=sizes.bound_weight,
    )  # fmt: skip
    for level in range(sizes.levels):
        first, full = sizes.offsets[level], length // (case.block_size * sizes.branching**level)
        held = store.nodes[:, :, first : first + full]
        assert torch.equal(held, built.at(level)[:, :, :full]), f"level {level}, complete nodes"
        for tensor in (store.nodes, store.stats):
            tensor[:, :, first + full : first + sizes.nodes_at(level, sizes.max_len)] = torch.nan
    if store.parts is not None:
        means = sub_block_means(k[:, :, :length], block_size=case.block_size, parts=sizes.parts)
        full = sizes.full_parts(length)
        has_key = torch.arange(full, device=device) % sizes.parts * sizes.part_size < case.block_size
        assert torch.equal(store.parts.flatten(2, 3)[:, :, :full][:, :, has_key], means[:, :, :full][:, :, has_key])
    finish_ends(store)
    assert store.lengths.unique().tolist() == [length]
    for level in range(sizes.levels):
        place = slice(sizes.offsets[level], sizes.offsets[level] + built.size(level))
        assert torch.equal(store.nodes[:, :, place], built.at(level)), f"level {level}"
    for sequence in range(len(case.lengths)):
        assert torch.equal(store.rows_of(store.k, sequence, 0, length), k[sequence, :, :length])
        assert torch.equal(store.rows_of(store.v, sequence, 0, length), v[sequence, :, :length])


@named(SMALL)
def test_step(case: Case, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyramidbench.kernels import decode_call

    if case.scan_bytes is not None:
        monkeypatch.setattr(decode_call, "SCAN_BYTES", case.scan_bytes)
    assert check_step(case, torch.float32, device) == 0


@named([case for case in SMALL if case.rules.get("leaf_score") != "summary"])
def test_step_with_leaves_before_attention(case: Case, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with many queries, where attending to every candidate would cost too much."""
    from pyramidbench.kernels import decode_step

    monkeypatch.setattr(decode_step, "pays_each", lambda _: False)
    assert check_step(case, torch.float32, device) == 0


def test_constant_keys_leave_the_first_blocks(device: str) -> None:
    """Equal scores on every level and in the last choice: ties go to the lower block, also past what bisection can part."""
    from pyramidbench.kernels.decode_step import step

    case = Case("", {**NARROW, "top_k": 3}, (240, 100), heads=2, kv_heads=1)
    q, k, v = drawn(case, torch.float32, device)
    store, rules = empty(case, torch.float32, device), WalkRules(**case.rules)
    append_reference(store, torch.ones_like(k), v, [0, 0], list(case.lengths))
    for _ in range(2):
        lists = step(q, store, rules, 0.25)[1]
        assert lists[:, 0, 0].tolist() == [[0, 1, 2, 3, 13, 14], [0, 1, 2, 3, 5, 6]]
        # The counters by which programs found out who is last serve the next step.
        assert [counter.count_nonzero().item() for counter in store.counters.values()] == [0]


@named(SMALL[:2])
def test_step_in_half(case: Case, device: str) -> None:
    assert check_step(case, torch.float16, device) == 0


@pytest.mark.parametrize("node_score", ["summary", "children"])
@pytest.mark.parametrize("scan_bytes", [0, 700, 2000, 9000])
def test_step_with_levels_gathered_and_scored_whole(
    scan_bytes: int, node_score: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every level gathered, the upper ones scored whole, and sequences that start below the level that is."""
    from pyramidbench.kernels import decode_call

    monkeypatch.setattr(decode_call, "SCAN_BYTES", scan_bytes)
    case = Case("", {**NARROW, "top_k": 2, "node_score": node_score}, (250, 40, 70), heads=2, kv_heads=1)
    assert check_step(case, torch.float32, device) == 0


def test_a_finished_pyramid_grows_on_as_any_other(device: str) -> None:
    """Reading the pyramid makes the open nodes; tokens that come later, also after a cut, must not take them for complete."""
    from pyramidbench.kernels.decode_append import append, finish_ends

    case = Case("", FULL, (130,))
    _, k, v = drawn(case, torch.float32, device)
    read, other = empty(case, torch.float32, device), empty(case, torch.float32, device)
    for store in (read, other):
        append(store, k[:, :, :100], v[:, :, :100], None, None)
    finish_ends(read)
    for store in (read, other):
        store.lengths.fill_(90)
        for start in (90, 96, 111):
            append(store, k[:, :, start : start + 15], v[:, :, start : start + 15], start, None)
        finish_ends(store)
    sizes = read.sizes
    for level, first in zip(range(sizes.levels), sizes.offsets):
        place = slice(first, first + sizes.nodes_at(level, 126))
        assert torch.equal(read.nodes[:, :, place], other.nodes[:, :, place]), f"level {level}"
        assert not bool(read.nodes[:, :, place].isnan().any())


@pytest.mark.parametrize("programs", [1, 1000])
def test_step_split_and_whole(programs: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyramidbench.kernels import decode_attend

    monkeypatch.setattr(decode_attend, "PROGRAMS_PER_SM", programs)
    assert check_step(Case("", {**NARROW, "top_k": 3}, (100, 5)), torch.float32, device) == 0


FULL = {**BASE, "top_k": 2, "levels": "full"}


@pytest.mark.parametrize(
    ("rules", "parts", "cut"),
    [
        pytest.param(FULL, (1,) * 18, None, id="token-by-token"),
        pytest.param(FULL, (61, 1, 1, 1, 1), None, id="a-token-that-ends-a-block-and-its-ancestors"),
        pytest.param(FULL, (100, 1, 28, 1, 16, 3), 96, id="prompts-chunks-and-a-cut"),
        pytest.param({**FULL, "leaf_score": "sub"}, (61, 1, 1, 1, 7, 14), 80, id="parts"),
        pytest.param({**FULL, "leaf_score": "sub", "sub_blocks": 5}, (50, 16, 1), 67, id="parts-without-keys"),
        pytest.param({**FULL, "branching": 4}, (70, 1, 9, 1, 47, 130), 250, id="branching-4"),
        pytest.param({**FULL, "branching": 8}, (128, 16, 1, 111), None, id="branching-8"),
        pytest.param({**FULL, "branching": 3, "bound_weight": 0.0}, (50, 14, 16), 65, id="branching-3-means"),
    ],
)
@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_append(rules: dict[str, Any], parts: tuple[int, ...], cut: int | None, paged: bool, device: str) -> None:
    check_append(Case("", rules, (sum(parts),), paged=paged), torch.float16, device, parts, cut)


def check_counts(counts: tuple[int, ...], device: str) -> None:
    """So many tokens for each sequence, a few and then a prompt, against the twin: tokens, lengths and complete nodes."""
    from pyramidbench.kernels.decode_append import append

    case = Case("", FULL, (60,) * len(counts), paged=True)
    _, k, v = drawn(case, torch.float32, device)
    store, twin = empty(case, torch.float32, device), empty(case, torch.float32, device)
    first, most = tuple(min(count, case.block_size) for count in counts), max(counts)
    append(store, k[:, :, : case.block_size], v[:, :, : case.block_size], None, first)
    append(store, k[:, :, :most], v[:, :, :most], 0, counts)
    append_reference(twin, k, v, [0] * len(counts), list(counts))
    assert int(store.full) == 0
    assert torch.equal(store.lengths, twin.lengths)
    for sequence, count in enumerate(counts):
        for own, other in ((store.k, twin.k), (store.v, twin.v)):
            assert torch.equal(*(x.rows_of(y, sequence, 0, count) for x, y in ((store, own), (twin, other))))
        for level, place in enumerate(store.sizes.offsets[:-1]):
            full = slice(place, place + count // (case.block_size * store.sizes.branching**level))
            torch.testing.assert_close(store.nodes[sequence, :, full], twin.nodes[sequence, :, full])


@pytest.mark.parametrize("counts", [(3, 0, 16), (50, 16, 1)], ids=str)
def test_append_of_several_counts(counts: tuple[int, ...], device: str) -> None:
    check_counts(counts, device)


def test_a_full_cache_stays_as_it_is(device: str) -> None:
    from pyramidbench.kernels.decode_append import append

    case = Case("", FULL, (40,), room=0)
    _, k, v = drawn(case, torch.float32, device)
    store = empty(case, torch.float32, device)
    append(store, k, v, None, None)
    before = [tensor.clone() for tensor in (store.k, store.v, store.nodes, store.stats, store.lengths)]
    append(store, k[:, :, :1], v[:, :, :1], None, None)
    assert int(store.full) == 1
    after = (store.k, store.v, store.nodes, store.stats, store.lengths)
    assert all(torch.equal(x.nan_to_num(7), y.nan_to_num(7)) for x, y in zip(before, after))


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_beams_go_on_as_caches_of_their_own(paged: bool, device: str) -> None:
    """A beam that branches, one that is dropped: what comes after is what a cache makes that held these tokens all along."""
    case = Case("", {**NARROW, "top_k": 2, "leaf_score": "sub"}, (70, 45, 12), heads=2, kv_heads=1, paged=paged)
    q, k, v = drawn(case, torch.float32, device)
    beams, other = (decoder(case, torch.float32, device) for _ in range(2))
    beams.append(k, v, counts=case.lengths)
    order = [1, 0, 1]
    beams.reorder(order)
    lengths = [case.lengths[source] for source in order]
    other.append(k[order], v[order], counts=lengths)
    for cache in (beams, other):
        cache.append(-k[:, :, :4], v[:, :, 4:8])
    assert beams.lengths.tolist() == [length + 4 for length in lengths]
    assert torch.equal(beams.lists(q), other.lists(q))
    assert torch.equal(beams.attend(q), other.attend(q))
    for sequence in range(3):
        assert all(torch.equal(x, y) for x, y in zip(beams.summaries(sequence), other.summaries(sequence), strict=True))


def decoder(case: Case, dtype: torch.dtype, device: str) -> BlockDecoder:
    """A cache whose steps the kernels make."""
    sizes, layout = empty(case, dtype, device).sizes, CacheLayout(torch.device(device), case.paged)
    return BlockDecoder(sizes, WalkRules(**case.rules), case.head_dim**-0.5, dtype, layout, "triton")


@pytest.mark.gpu
@named(LARGE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_step_large(case: Case, dtype: torch.dtype, device: str) -> None:
    # A near-tie that the order of a sum decides may swap a block.
    assert check_step(case, dtype, device) <= 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("in_graph", [False, True], ids=["launched", "replayed"])
def test_overlapping_launches_change_nothing(in_graph: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps whose launches overlap, with no fill between them, against one launch after the other: bit for bit."""
    from pyramidbench.kernels import decode_launch
    from pyramidbench.kernels.decode_append import append
    from pyramidbench.kernels.decode_step import step

    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    case = LARGE[0]
    q, k, v = drawn(case, torch.bfloat16, device)
    first, rules = case.lengths[0] - 66, WalkRules(**case.rules)
    results = []
    for overlaps in (False, True):
        monkeypatch.setattr(decode_launch, "OVERLAP_ITEMS", 1 << 30 if overlaps else 0)
        store = empty(case, torch.bfloat16, device)
        append(store, k[:, :, :first], v[:, :, :first], None, None)
        new = [x[:, :, first : first + 1].clone() for x in (k, v)]

        def one(store: CacheStore = store, new: list[Tensor] = new) -> tuple[Tensor, Tensor]:
            append(store, new[0], new[1], None, None)
            return step(q, store, rules, 0.25)

        found = [one()]
        graph = torch.cuda.CUDAGraph()
        if overlaps and in_graph:
            with torch.cuda.graph(graph):
                replayed = one()
        for token in range(first + 1, case.lengths[0]):
            for buffer, value in zip(new, (k, v)):
                buffer.copy_(value[:, :, token : token + 1])
            if overlaps and in_graph:
                graph.replay()
                found.append((replayed[0].clone(), replayed[1].clone()))
            else:
                found.append(one())
        results.append(found)
    for (out, lists), (expected, twin) in zip(*results, strict=True):
        assert torch.equal(lists, twin)
        assert torch.equal(out, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "rules", [{}, {"leaf_score": "sub"}, {"branching": 4}], ids=["default", "parts", "branching-4"]
)
def test_append_large(rules: dict[str, Any], dtype: torch.dtype, device: str) -> None:
    case = Case("", {**WIDE, **rules}, (70_000,), head_dim=128, head_dim_v=128, block_size=64)
    check_append(case, dtype, device, (65_000, 1, 1, 64, 1, 63, 1, 4869), 65_063)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("preset", "rules"),
    [("default", {}), ("default", {"leaf_score": "sub"}), ("paper", {}), ("fastest", {"start_width": 512})],
    ids=["default", "parts", "paper", "fastest"],
)
def test_equal_to_a_prefill_at_random_lengths(preset: str, rules: dict[str, Any], device: str) -> None:
    """Kernels of a step against those of a prefill: sets, near-ties apart, and outputs where the sets are the same."""
    import pyramidbench as pb

    torch.manual_seed(0)
    lengths = sorted([2, 3, 64, 65, *torch.randint(4, 100_000, (8,)).tolist()])
    q, k, v = (torch.randn(1, heads, lengths[-1], 128, device=device).bfloat16() for heads in (8, 2, 2))
    parameters: dict[str, Any] = {"top_k": 16, **rules}
    cache = pb.PyramidCache(1, 2, 128, lengths[-1], device=device, preset=preset, **parameters)
    differing, start = 0, 0
    for length in lengths:
        cache.append(k[:, :, start:length], v[:, :, start:length])
        new, keys, values, start = q[:, :, length - 2 : length], k[:, :, :length], v[:, :, :length], length
        chosen = pb.select_blocks(new, keys, method=f"pyramid:{preset}", query_tile=1, **parameters).indices
        lists = cache.select(new)
        same = (lists == torch.nn.functional.pad(chosen, (0, lists.shape[-1] - chosen.shape[-1]), value=-1)).all(-1)
        differing += int((~same).sum())
        expected = pb.pyramid_attention(new, keys, values, preset=preset, query_tile=1, **parameters).float()
        error = (cache.attend(new).float() - expected).abs().amax(-1) * same.repeat_interleave(4, 1)
        assert float(error.max()) <= 4 * torch.finfo(torch.bfloat16).eps * float(expected.abs().max()), length
    assert differing <= 0.1 * 4 * len(lengths)


@pytest.mark.gpu
@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_beams_between_replays(paged: bool, device: str) -> None:
    """A captured step is replayed after beams were reordered and cut, as an eager cache does it; neither can be captured."""
    import pyramidbench as pb

    sizes: dict[str, Any] = {"device": device, "top_k": 4, "start_width": 4, "preset": "paper", "paged": paged}
    torch.manual_seed(0)
    k, v, q = (torch.randn(4, heads, 700, 64, device=device).bfloat16() for heads in (2, 2, 8))
    replayed, eager = (pb.PyramidCache(4, 2, 64, 700, block_size=16, **sizes) for _ in range(2))
    assert replayed.implementation == "triton"
    for cache in (replayed, eager):
        cache.append(k[:, :, :300], v[:, :, :300])
    new = [x[:, :, :1].clone() for x in (k, v, q)]
    replayed.append(new[0], new[1])
    replayed.attend(new[2])
    replayed.truncate(300)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed.append(new[0], new[1])
        output = replayed.attend(new[2])
        with pytest.raises(UserError, match="a CUDA graph leaves out"):
            replayed.reorder([0, 0, 1, 2])
    replayed.reserve(200)
    for step, start in enumerate(range(300, 400)):
        part = [x[:, :, start : start + 1] for x in (k, v, q)]
        for buffer, value in zip(new, part):
            buffer.copy_(value)
        graph.replay()
        eager.append(part[0], part[1])
        assert torch.equal(output, eager.attend(part[2])), start
        if step % 7 == 0:
            order = torch.randint(4, (4,), generator=torch.Generator().manual_seed(step))
            for cache in (replayed, eager):
                cache.reorder(order)
        if step % 30 == 29:
            for cache in (replayed, eager):
                cache.truncate(cache.lengths - 20)
            replayed.reserve(100)
    assert replayed.lengths.tolist() == eager.lengths.tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [1, 4])
def test_one_graph_serves_a_growing_cache(queries: int, device: str) -> None:
    """Captured once at 300 tokens and replayed past several level boundaries, as an eager cache does; then it is full."""
    import pyramidbench as pb

    sizes: dict[str, Any] = {"dtype": torch.bfloat16, "device": device, "block_size": 16, "top_k": 4, "start_width": 4}
    torch.manual_seed(0)
    k, v, q = (torch.randn(2, heads, 1400, 64, device=device).bfloat16() for heads in (2, 2, 8))
    replayed, eager = (pb.PyramidCache(2, 2, 64, 1200, paged=True, **sizes) for _ in range(2))
    for cache in (replayed, eager):
        cache.append(k[:, :, :300], v[:, :, :300])
    new = [x[:, :, :queries].clone() for x in (k, v, q)]
    replayed.append(new[0], new[1])
    replayed.attend(new[2])
    replayed.truncate(300)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed.append(new[0], new[1])
        output, lists = replayed.attend(new[2]), replayed.select(new[2])
    replayed.reserve(900)
    for start in range(300, 1200, queries):
        part = [x[:, :, start : start + queries] for x in (k, v, q)]
        for buffer, value in zip(new, part):
            buffer.copy_(value)
        graph.replay()
        eager.append(part[0], part[1])
        assert torch.equal(lists, eager.select(part[2])), start
        assert torch.equal(output, eager.attend(part[2])), start
    assert replayed.lengths.tolist() == [1200, 1200]
    graph.replay()
    with pytest.raises(UserError, match="a replayed append found no room"):
        _ = replayed.lengths
    assert replayed.lengths.tolist() == [1200, 1200]
    for sequence in range(2):
        for after, expected in zip(replayed.summaries(sequence), eager.summaries(sequence), strict=True):
            assert torch.equal(after, expected)
