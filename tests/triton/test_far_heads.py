"""Heads of a group that lie more than int32 apart: each stride fits 32 bits, and the last head's offset does not.

So it is at 1M tokens, 16 heads a group and head dim 256, and for the newest queries as a view of a long prompt's. On a CPU the
tensor is a file with a hole, which takes no room.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from pyramidbench.decoder import CacheLayout
from pyramidbench.kernels import backends
from pyramidbench.kernels.cache import CacheSizes
from pyramidbench.kernels.decoder import BlockDecoder
from pyramidbench.kernels.walk_rules import WalkRules
from pyramidbench.tiling import Tiling

GROUP, DIM, BLOCK = 16, 16, 16
RULES = {"top_k": 2, "sink_blocks": 1, "local_blocks": 1, "start_width": 4, "beam": 1}
SUMMARY = {**RULES, "leaf_score": "summary"}
WALKS = {
    "mean query": (32, {**SUMMARY, "tile_reduce": "mean"}),
    "rows, scored": (8, {**SUMMARY, "levels": 1, "score_rows": 1}),
    "rows, gathered": (8, {**SUMMARY, "score_rows": 2}),
    "token level, exact": (1, {**RULES, "leaf_candidates": 2}),
}


def far_apart(q: Tensor, folder: Path) -> Tensor:
    """The same q [1, H, M, D] with so large a stride of its heads."""
    stride = -(-(2**31) // (q.shape[1] - 1)) // 16 * 16 + 16
    assert stride < 2**31 < stride * (q.shape[1] - 1)
    size = stride * q.shape[1]
    if q.device.type == "cpu":
        held = torch.from_file(str(folder / "q"), shared=True, size=size, dtype=q.dtype)
    else:
        held = torch.empty(size, dtype=q.dtype, device=q.device)
    return held.as_strided(q.shape, (size, stride, q.shape[3], 1)).copy_(q)


@pytest.mark.parametrize("name", WALKS)
def test_a_walk(name: str, device: str, tmp_path: Path) -> None:
    query_tile, given = WALKS[name]
    queries, keys = (12 if query_tile == 1 else 40), 300
    torch.manual_seed(0)
    q = torch.randn(1, GROUP, queries, DIM, device=device)
    k = torch.randn(1, 1, keys, DIM, device=device)
    tiling, rules = Tiling(queries, keys, BLOCK, query_tile, True), WalkRules(**given)
    pyramid = backends.build(k, tiling, rules, "triton")
    near, far = (backends.route(x, k, pyramid, tiling, rules, 0.25, "triton") for x in (q, far_apart(q, tmp_path)))
    assert torch.equal(far.indices, near.indices)


@pytest.mark.parametrize(
    ("given", "each_bytes"),
    [({}, 1 << 20), ({"node_score": "children"}, 0), ({"leaf_score": "sub"}, 0)],
    ids=["each candidate", "children, leaves first", "sub"],
)
def test_a_decoding_step(
    given: dict[str, object], each_bytes: int, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyramidbench.kernels import decode_each

    monkeypatch.setattr(decode_each, "EACH_BYTES", each_bytes)
    rules = WalkRules(**RULES, leaf_candidates=2, **given)
    sizes = CacheSizes.of(1, 1, (DIM, DIM), 320, BLOCK, rules)
    cache = BlockDecoder(sizes, rules, 0.25, torch.float32, CacheLayout(torch.device(device)), "triton")
    torch.manual_seed(0)
    q = torch.randn(1, GROUP, 1, DIM, device=device)
    k, v = torch.randn(2, 1, 1, 300, DIM, device=device)
    cache.append(k, v)
    far = cache.attend(far_apart(q, tmp_path))
    assert bool(far.isfinite().all())
    assert torch.equal(far, cache.attend(q))
