"""Checks token level's attention by key block against its twins, then times it beside attention list by list.

    python tests/gpu/bench_token_level.py

One process, one CUDA device, warm L2, random tensors, bf16, D 128, blocks of 64, lists of 19: a sink, 16 random blocks of the
past, two local blocks. Milliseconds are medians of CUDA events; "by kernel" adds up one call's device time from the profiler.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from pyramidbench.kernels import attention_fwd
from pyramidbench.kernels.attention_by_key import attend_by_key, key_tile
from pyramidbench.selection import BlockSelection
from pyramidbench.tiling import Tiling

HEAD_DIM, BLOCK, TOP_K = 128, 64, 16


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    keys: int


LONG = [Shape(32, 8, 2**16), Shape(32, 8, 2**18), Shape(16, 1, 2**16)]
SHORT = [Shape(32, 8, 2**12), Shape(32, 8, 2**13), Shape(32, 8, 2**14), Shape(8, 8, 2**13), Shape(64, 8, 2**14)]
SWEEP: dict[str, dict[str, int]] = {
    "chosen": {},
    "4 programs of 128 registers": {"registers": 128, "per_sm": 4},
    "128 rows, 8 warps": {"BLOCK_M": 128, "band_rows": 128, "num_warps": 8, "registers": 128, "per_sm": 2},
    "band in 1 stage": {"num_stages": 1},
    "chunks of 512 rows": {"chunk_rows": 512},
    "windows of 8k": {"window": 8192},
    "windows of 32k": {"window": 32768},
    "combine 16 slots at once": {"combine_slots": 16},
    "combine 8 rows, 2 warps": {"combine_rows": 8, "combine_warps": 2},
    "combine 16 rows, 2 warps, 4 slots": {"combine_rows": 16, "combine_warps": 2, "combine_slots": 4},
}


def main() -> None:
    check()
    for shape in LONG:
        time_shape(shape, SWEEP)
    for shape in SHORT:
        time_shape(shape, {"chosen": {}})


def check() -> None:
    """The GPU cases of tests/triton in bf16."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "triton"))
    for name in ("transpose", "attention_by_key"):
        module = importlib.import_module(f"test_{name}")
        for case in module.LARGE:
            module.check(*((case,) if name == "transpose" else (case, torch.bfloat16)), "cuda")
        print(f"{name}: {len(module.LARGE)} cases within their bounds", flush=True)


def listed(shape: Shape, *, forced: bool) -> BlockSelection:
    """One random block from each of 16 even parts of the past, with or without the sink and the two local blocks."""
    query = torch.arange(shape.keys, device="cuda")
    eligible = (query // BLOCK - 2).clamp(min=0)[:, None]
    place = torch.arange(TOP_K, device="cuda")
    low, high = place * eligible // TOP_K, (place + 1) * eligible // TOP_K
    own = (query // BLOCK)[:, None]
    end = torch.iinfo(torch.int64).max
    sets = []
    for _ in range(shape.kv_heads):
        block = 1 + low + (torch.rand(shape.keys, TOP_K, device="cuda") * (high - low)).long()
        block = torch.where(eligible >= TOP_K, block, torch.where(place < eligible, 1 + place, -1))
        around = [torch.zeros_like(own), block, torch.where(own > 1, own - 1, -1), torch.where(own > 0, own, -1)]
        lists = torch.cat(around, 1) if forced else block
        lists = lists.masked_fill(lists < 0, end).sort(-1).values
        sets.append(lists.masked_fill(lists == end, -1).to(torch.int32))
    return BlockSelection.from_indices(torch.stack(sets)[None], Tiling(shape.keys, shape.keys, BLOCK, 1, True))


def time_shape(shape: Shape, sweep: dict[str, dict[str, int]]) -> None:
    torch.manual_seed(0)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    q, k, v = (torch.randn(1, n, shape.keys, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for n in heads)
    selection = listed(shape, forced=True)
    group = shape.heads // shape.kv_heads
    chosen = key_tile(group, selection.indices.shape[-1], shape.keys // BLOCK, HEAD_DIM, HEAD_DIM, 2)
    tflop = 4e-12 * HEAD_DIM * BLOCK * group * float(selection.counts.sum())
    print(f"-- {shape}: {tflop:.2f} TFLOP, windows of {chosen.window}", flush=True)
    by_key = partial(attend_by_key, q, k, v, selection, HEAD_DIM**-0.5)
    for name, changes in sweep.items():
        show(name, partial(by_key, replace(chosen, **changes)))
    by_kernel(by_key)
    torch.cuda.synchronize()
    start = time.perf_counter()
    output = by_key()[0]
    print(f"   the host takes {1e3 * (time.perf_counter() - start):.2f} ms to launch it", flush=True)
    for forced in (False, True):
        lists = selection if forced else listed(shape, forced=False)
        tile = attention_fwd.list_tile(q, k, v, lists)
        other = partial(attention_fwd.attend, q, k, v, lists, HEAD_DIM**-0.5, tile)
        show("list by list" if forced else "list by list, without the band", other)
    expected = other()[0]
    print(
        f"   relative difference of the outputs: {float((output - expected).norm() / expected.norm()):.1e}", flush=True
    )


def show(name: str, call: Callable[[], object]) -> None:
    try:
        print(f"   {name:32} {median(call):8.3f} ms", flush=True)
    except Exception as error:  # a variant that does not fit must not end the sweep
        print(f"   {name:32} {type(error).__name__}: {str(error)[:90]}", flush=True)


def by_kernel(call: Callable[[], object]) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        call()
        torch.cuda.synchronize()
    took = {event.key: (event.self_device_time_total / 1e3, event.count) for event in recorded.key_averages()}
    took = {name: entry for name, entry in took.items() if entry[0] > 0 and "::" not in name}
    print(f"      all kernels {sum(entry[0] for entry in took.values()):.3f} ms", flush=True)
    for name, (milliseconds, launches) in sorted(took.items(), key=lambda item: -item[1][0])[:9]:
        print(f"      {name[:40]:40} {milliseconds:8.3f} ms, {launches} launches", flush=True)


def median(call: Callable[[], object]) -> float:
    call()
    times: list[float] = []
    for _ in range(3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[1]


if __name__ == "__main__":
    main()
