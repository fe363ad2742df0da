"""Where the time of choosing goes: build and route of `pyramid:fastest` by kernel, and how it grows with the length.

    python tests/gpu/bench_selection.py [--lengths 16384,65536,262144,1048576] [--no-check]

As bench_prefill.py: one process, bf16, 16 query and 16 key/value heads, head dim 128, blocks of 64, tiles of 128, K 64, random
tensors. "select" is build and route as a CUDA graph, median of `--samples` with a warm L2; below it each kernel's time in one
call, with its launches, by the profiler. First the sets are checked against the torch twin's; the slopes come last.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable

import bench_prefill as bench
import torch
from torch import Tensor

from pyramidbench.kernels import backends
from pyramidbench.kernels.walk_rules import WalkRules
from pyramidbench.selection import BlockSelection
from pyramidbench.tiling import Tiling

HEADS, TOP_K, TILE = 16, 64, 128
CHECKED = 40_000
"""Tokens of the check: levels of 625 to 79 blocks are scored with K 16."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--lengths", default="16384,65536,262144,1048576")
    parser.add_argument("--samples", type=int, default=9)
    parser.add_argument("--no-check", action="store_true", help="time without checking first")
    asked = parser.parse_args()
    if not asked.no_check:
        check()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; ms, warm L2, median of {asked.samples}")
    times = {length: time_selection(length, asked.samples) for length in map(int, asked.lengths.split(","))}
    for first, last in itertools.combinations(sorted(length for length in times if length >= 65536), 2):
        slope = math.log(times[last] / times[first]) / math.log(last / first)
        print(f"slope {slope:.3f} from {first // 1024}k to {last // 1024}k")


def drawn(heads: int, length: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    q, k = (torch.randn(1, heads, length, bench.HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return q, k


def fastest(top_k: int) -> WalkRules:
    return bench.rules(top_k, bench.TILE_LEVEL["fastest"])


def check() -> None:
    """Sets against the twin's.

    Raises:
        SystemExit: more than 2 % of the lists differ.
    """
    q, k = drawn(2, CHECKED)
    tiling = Tiling(CHECKED, CHECKED, bench.BLOCK, TILE, True)
    pyramid = backends.build(k, tiling, fastest(16), "reference")
    twin = backends.route(q, k, pyramid, tiling, fastest(16), bench.HEAD_DIM**-0.5, "reference")
    share = float((select(q, k, tiling, 16).indices != twin.indices).any(-1).double().mean())
    print(f"{share:.2%} of the lists differ from the twin's", flush=True)
    if share > 2e-2:
        raise SystemExit("the kernels choose otherwise than the twin")


def select(q: Tensor, k: Tensor, tiling: Tiling, top_k: int) -> BlockSelection:
    rules = fastest(top_k)
    pyramid = backends.build(k, tiling, rules, "triton")
    return backends.route(q, k, pyramid, tiling, rules, bench.HEAD_DIM**-0.5, "triton")


def time_selection(length: int, samples: int) -> float:
    q, k = drawn(HEADS, length)
    tiling = Tiling(length, length, bench.BLOCK, TILE, True)

    def call() -> object:
        return select(q, k, tiling, TOP_K)

    taken = bench.replayed(call, q.device, samples)
    print(f"{length // 1024:5}k select {taken:7.3f}   {kernel_times(call)}", flush=True)
    return taken


def kernel_times(call: Callable[[], object]) -> str:
    """Milliseconds of each of our kernels in one call, all its launches added, the median of 5 calls."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorder:
        for _ in range(5):
            call()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = {}
    for event in recorder.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and event.name.startswith("_"):
            times.setdefault(event.name, []).append(event.device_time / 1e3)
    parts = []
    for kernel, each in times.items():
        launches = len(each) // 5
        calls = sorted(sum(each[i * launches : (i + 1) * launches]) for i in range(5))
        parts.append(f"{kernel} {calls[2]:.3f} ({launches})")
    return ", ".join(parts)


if __name__ == "__main__":
    main()
