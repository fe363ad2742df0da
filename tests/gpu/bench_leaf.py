"""Checks the kernels around the scored leaf against their torch twins, then times them: pooling, build, leaf by stage.

    python tests/gpu/bench_leaf.py

Medians of CUDA events, warm L2, random bf16 tensors; the leaf's candidates are drawn. "host": the time until a call returns.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from pyramidbench.kernels import pooled_queries, pyramid_build, route_portions
from pyramidbench.kernels.pooled_queries import mean_queries, sub_block_means
from pyramidbench.kernels.route_call import Call, list_widths, score_rows
from pyramidbench.kernels.route_leaf import run_leaf
from pyramidbench.kernels.route_mass import MassTile, masses
from pyramidbench.kernels.route_pairs import pair_up
from pyramidbench.kernels.route_portions import Buffers, Job, Portion
from pyramidbench.kernels.walk_rules import WalkRules
from pyramidbench.tiling import Tiling

HEAD_DIM, BLOCK, SAMPLES = 128, 64, 5
ROWS, TOKEN = {"score_rows": 16, "top_k": 64}, {"top_k": 24}
MEAN, SUB = {"tile_reduce": "mean", "top_k": 64}, {"leaf_score": "sub"}
WIDE = (MassTile(64, 4, 3), MassTile(64, 4, 2), MassTile(64, 4, 4), MassTile(128, 4, 3), MassTile(128, 4, 2))
TERMS = (MassTile(64, 4, 1), MassTile(64, 4, 2), MassTile(64, 4, 3))
WORK = (("WORK_ROWS", 1024), ("WORK_ROWS", 4096))
WINDOWS = tuple(("WINDOW_BYTES", 1 << power) for power in (22, 23, 25))
# Name, keys, query heads, key heads, tile, rules; tile sizes of `_mass` and constants of route_portions to try.
CASES: list[tuple[Any, ...]] = [
    ("16 rows", 16384, 16, 16, 128, ROWS),
    ("16 rows", 65536, 16, 16, 128, ROWS),
    ("mean", 16384, 16, 16, 128, MEAN),
    ("16 rows", 262144, 16, 16, 128, ROWS, WIDE, (*WORK, WINDOWS[0])),
    ("mean", 262144, 16, 16, 128, MEAN, TERMS),
    ("16 rows, sub", 262144, 16, 16, 128, {**ROWS, **SUB}, WIDE[1:2]),
    ("mean, sub", 262144, 16, 16, 128, {**MEAN, **SUB}, TERMS[:1]),
    ("token level, group 16", 65536, 16, 1, 1, TOKEN, WIDE, (*WORK, *WINDOWS, ("WINDOW_BYTES", 1 << 28))),
    ("token level, group 4", 65536, 4, 1, 1, TOKEN, WIDE[3:4], WINDOWS),
]


def main() -> None:
    check()
    print(f"right. {torch.cuda.get_device_name()}, torch {torch.__version__}; ms, median of {SAMPLES}", flush=True)
    time_streams()
    for case in CASES:
        time_leaf(*case)


def check() -> None:
    """The GPU cases of tests/triton in bf16: AssertionError where a kernel differs from its twin."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "triton"))
    route, means = (importlib.import_module(name) for name in ("test_route", "test_pooled_queries"))
    for sizes in means.LARGE:
        means.check(*sizes.values, torch.bfloat16, "cuda")
    for sizes in means.LARGE_PARTS:
        means.check_parts(*sizes.values, torch.bfloat16, "cuda")
    for case in route.LARGE:
        if case.rules.get("leaf_score") != "summary":
            share = route.differing_rows(case, torch.bfloat16, "cuda")
            assert share <= 1e-2, f"{case.name}: {share:.2%} of the lists differ from the twin's"


def time_streams() -> None:
    k, tiling = torch.randn(1, 16, 262144, HEAD_DIM, device="cuda").bfloat16(), Tiling(262144, 262144, BLOCK, 128, True)
    size = k.numel() * k.element_size()
    for load in (8, 16, 32):
        with patch.object(pooled_queries, "POOL_BYTES", load << 10):
            report(f"mean queries, {load} KiB", lambda: mean_queries(k, tiling), size)
            report(f"sub-block means, {load} KiB", lambda: sub_block_means(k, block_size=BLOCK, parts=4), size)
    report("build", partial(pyramid_build.build, k, block_size=BLOCK, branching=2, levels=7, bound_weight=0.35), size)


def drawn(tiling: Tiling, width: int, sets: int) -> tuple[Tensor, Tensor]:
    """Random candidates of every tile and set: int32 [items, width] ascending, and their counts."""
    tile = torch.arange(tiling.tiles, device="cuda")
    end = (tile * tiling.query_tile // BLOCK - 1).clamp(min=1)
    block = torch.arange(tiling.blocks, device="cuda")
    outside = (block < 1) | (block >= end[:, None])
    scored = (torch.rand(outside.shape, device="cuda").masked_fill(outside, -1).topk(width) for _ in range(sets))
    lists = [chosen.masked_fill(score < 0, tiling.blocks).sort(-1).values for score, chosen in scored]
    counts = (end - 1).clamp(max=width).to(torch.int32).repeat(sets)
    return torch.cat(lists).to(torch.int32), counts


def time_leaf(
    name: str, keys: int, heads: int, kv_heads: int, query_tile: int, rules: dict[str, Any],
    tiles: tuple[MassTile, ...] = (), constants: tuple[tuple[str, int], ...] = (),
) -> None:  # fmt: skip
    q, k = (torch.randn(1, count, keys, HEAD_DIM, device="cuda").bfloat16() for count in (heads, kv_heads))
    tiling = Tiling(keys, keys, BLOCK, query_tile, True)
    walk = WalkRules(sink_blocks=1, local_blocks=2, beam=2, leaf_candidates=2, **rules)
    length, width = list_widths(walk, tiling)
    candidates, counts = drawn(tiling, width, kv_heads)
    shape = {"GROUP": heads // kv_heads, "QUERY_TILE": query_tile, "BLOCK_SIZE": BLOCK, "HEAD_DIM": HEAD_DIM}
    shape |= {"BLOCK_D": HEAD_DIM, "SCORE_ROWS": score_rows(walk, tiling), "IS_CAUSAL": True}
    sizes = (len(counts), kv_heads, kv_heads, tiling.tiles, keys, keys)
    call = Call(q, None, tiling, walk, HEAD_DIM**-0.5, sizes, shape)  # type: ignore[arg-type]
    lists, lengths = counts.new_empty(len(counts), length), torch.empty_like(counts)
    title, size = f"{keys:>6} {name}", int(counts.sum()) * Job(call, candidates, counts).row_bytes
    report(f"{title}: leaf", lambda: run_leaf(call, k, candidates, counts, lists, lengths), size)
    rows = mean_queries(q, tiling) if walk.tile_reduce == "mean" else q
    k = sub_block_means(k, block_size=BLOCK, parts=walk.sub_blocks) if walk.leaf_score == "sub" else k
    for name, value in (("PORTION_BYTES", route_portions.PORTION_BYTES), *constants):
        with patch.object(route_portions, name, value):
            job = Job(call, candidates, counts)
            portions = [(portion, Buffers.of(job, [portion])) for portion in job.portions()]
            what = f"{title}, {name} {value}, {len(portions)} portions of {job.windows} windows"
            report(f"{what}: pairs", partial(each, pair_up, portions, rows))
            for tile in (None, *(tiles if name == "PORTION_BYTES" else ())):
                report(f"{what}: masses, {tile}", partial(each, masses, portions, k, tile=tile), size)


def each(stage: Callable[..., None], portions: list[tuple[Portion, Buffers]], tensor: Tensor, **tile: object) -> None:
    for portion, buffers in portions:
        stage(portion, tensor, buffers, **tile)


def report(what: str, call: Callable[[], object], size: int = 0) -> None:
    """Print the device's median time, the rate at which it covers `size` bytes, and the host's shortest time."""
    for _ in range(2):
        call()
    times, host = [], []
    for _ in range(SAMPLES):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begun = time.perf_counter()
        start.record()
        call()
        end.record()
        host.append(time.perf_counter() - begun)
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    middle = sorted(times)[len(times) // 2]
    print(f"{what:125} {middle:8.3f}  host {min(host) * 1e3:6.3f}  {size / middle / 1e9:6.2f} TB/s", flush=True)


if __name__ == "__main__":
    main()
