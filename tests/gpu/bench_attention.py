"""Times the attention kernels on one Hopper GPU: the Triton kernel, and variants of the Gluon one.

    python tests/gpu/bench_attention.py [--only NAME ...]

Each variant runs in a process of its own, which is ended when it hangs, and first meets the Triton kernel's output. Then
calls follow each other for at least 0.4 s, with 16 heads, D 128, bf16, causal, tiles of 128 and blocks of 64; a tile's
list holds the first block, its own two and 64 more: random ones, or (nearby) those just before, which are in L2.
`pytest -m gpu tests/triton/test_attention_fwd.py` has the tests.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from pyramidbench.kernels.attention_fwd import attend
from pyramidbench.kernels.attention_portable import attend_tile
from pyramidbench.selection import BlockSelection
from pyramidbench.tiling import Tiling

HEADS, HEAD_DIM, BLOCK_SIZE, QUERY_TILE, KEEP = 16, 128, 64, 128, 64
LIMIT_S, TIME_S = 60, 0.4
# Changes of the chosen launch shape.
VARIANTS: dict[str, dict[str, object] | None] = {
    "triton": None,
    "chosen": {},
    "no zigzag": {"ZIGZAG": False},
}
CALLS = [("64k", 65536, False), ("256k", 262144, False), ("256k nearby", 262144, True)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        run_variant(chosen.child)
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    for name in chosen.only:
        try:
            subprocess.run([sys.executable, __file__, "--child", name], timeout=LIMIT_S, check=True)
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
            print(f"{name}: FAILED: {error}", flush=True)


def run_variant(name: str) -> None:
    check(name)
    for label, keys, nearby in CALLS:
        q, k, v = inputs(keys)
        selection = drawn(keys, nearby)
        flops = 4 * HEAD_DIM * float(selection.pairs().sum())
        times = sorted(timed(name, q, k, v, selection))
        middle = times[len(times) // 2]
        speeds = f"{flops / middle / 1e9:4.0f} TFLOP/s (best {flops / times[0] / 1e9:4.0f})"
        print(f"{name:12} {label:12} {middle:7.3f} ms  {speeds}, {len(times)} calls", flush=True)


def attend_variant(name: str, q: Tensor, k: Tensor, v: Tensor, selection: BlockSelection) -> tuple[Tensor, Tensor]:
    from pyramidbench.kernels.attention_hopper import hopper_tile

    changes = VARIANTS[name]
    if changes is None:
        tile = attend_tile(QUERY_TILE, BLOCK_SIZE, HEAD_DIM, HEAD_DIM, 2, tma=True)
        return attend(q, k, v, selection, HEAD_DIM**-0.5, tile)
    hopper = replace(hopper_tile(QUERY_TILE, BLOCK_SIZE, HEAD_DIM, HEAD_DIM), **changes)
    return attend(q, k, v, selection, HEAD_DIM**-0.5, hopper)


def check(name: str) -> None:
    """Raises when outputs differ from the Triton kernel's by more than the rounding of both, or between two calls."""
    q, k, v = inputs(16384)
    selection = drawn(16384, False)
    expected, expected_lse = attend_variant("triton", q, k, v, selection)
    out, lse = attend_variant(name, q, k, v, selection)
    again, again_lse = attend_variant(name, q, k, v, selection)
    assert torch.equal(again, out)
    assert torch.equal(again_lse, lse)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-4)
    torch.testing.assert_close(out, expected, rtol=2**-6, atol=2**-9)


def timed(name: str, q: Tensor, k: Tensor, v: Tensor, selection: BlockSelection) -> list[float]:
    """Milliseconds of calls that follow each other."""
    marks: list[torch.cuda.Event] = []
    began = time.perf_counter()
    while len(marks) < 12 or time.perf_counter() - began < TIME_S:
        attend_variant(name, q, k, v, selection)
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record()
        # Two calls are always queued, so that the device never waits.
        marks[max(0, len(marks) - 3)].synchronize()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in pairwise(marks[2:])]


def inputs(keys: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, keys, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    return q, k, v


def drawn(keys: int, nearby: bool) -> BlockSelection:
    """Lists of all heads, drawn one head at a time."""
    torch.manual_seed(1)
    tiling = Tiling(keys, keys, BLOCK_SIZE, QUERY_TILE, True)
    block = torch.arange(tiling.blocks, device="cuda")
    last = tiling.last_position(torch.arange(tiling.tiles, device="cuda"))[:, None] // BLOCK_SIZE
    lists = []
    for _ in range(HEADS):
        scores = torch.rand(tiling.tiles, tiling.blocks, device="cuda")
        if nearby:
            scores = (block / tiling.blocks).expand_as(scores).clone()
        scores[:, 0] = 2
        scores = torch.where((block > last - 2) & (block <= last), 2.0, scores).masked_fill(block > last, -1)
        values, best = scores.topk(KEEP + 3, dim=-1)
        best = best.masked_fill(values < 0, tiling.blocks).sort(-1).values
        lists.append(best.masked_fill(best == tiling.blocks, -1))
    return BlockSelection.from_indices(torch.stack(lists)[None], tiling)


if __name__ == "__main__":
    main()
