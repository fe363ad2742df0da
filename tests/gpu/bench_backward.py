"""Times the backward of block-sparse attention on one GPU: its steps, tile variants, and dense backwards beside it.

    python tests/gpu/bench_backward.py [--calls CALL ...]

First every variant meets autograd of the torch twin, and itself bit for bit, in a process of its own (so kernels compile in
parallel); one that fails is left out. Then calls follow each other, bf16, causal, D 128, blocks of 64; a list holds the
first block, its own two and K random ones. TFLOP/s count the products that a step does (dense: five); MiB is what a call
needs beside its inputs. dkdv includes the transposition. `pytest -m gpu tests/triton/test_attention_bwd.py` has the tests.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from unittest import mock

import torch
from every_kernel import load
from torch.nn.attention import SDPBackend, sdpa_kernel

from pyramidbench.kernels import attention_bwd as bwd
from pyramidbench.kernels.attention_fwd import attend
from pyramidbench.selection import BlockSelection
from pyramidbench.tiling import Tiling

Tile = bwd.AttendTile | bwd.GradientTile
DIM, SCALE, TIME_MS = 128, 128**-0.5, 200
BY_KEY = bwd.gradient_tile(4, 19, 1024, DIM, DIM, 2)
CHUNKS = (bwd.CHUNK_ROWS, 4096, 8192, 32768, 65536)
DENSE = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FA2": SDPBackend.FLASH_ATTENTION}
# Tiles of dQ and of dK, dV: rows, keys, warps, stages, copy engine; None: the chosen one; by name: what differs from the one by
# key that token level has. Tile level, then token level.
VARIANTS: dict[str, tuple[tuple[int, ...] | dict[str, int] | None, tuple[int, ...] | None]] = {
    "tile-0": (None, None),
    "tile-1": ((128, 64, 8, 3, True), (32, 64, 4, 2, True)),
    "tile-2": ((64, 64, 4, 2, True), (32, 64, 4, 3, True)),
    "tile-3": ((64, 64, 4, 3, True), (64, 64, 8, 2, True)),
    "tile-4": ((128, 64, 8, 2, False), (64, 64, 4, 2, False)),
    "tile-5": ((128, 64, 4, 2, True), (128, 64, 8, 2, True)),
    "tile-6": ((128, 32, 8, 3, True), (64, 64, 4, 3, True)),
    "tile-7": ((128, 64, 8, 1, True), (64, 64, 4, 1, True)),
    "token-0": (None, None),
    "token-1": ((16, 64, 2, 2, True), (32, 64, 4, 2, False)),
    "token-2": ((16, 64, 4, 3, True), (32, 64, 4, 3, False)),
    "token-3": ({"num_warps": 8, "registers": 128}, (64, 64, 8, 2, False)),
    "token-4": ({"registers": 168, "per_sm": 3}, (64, 64, 4, 2, False)),
    "token-5": ({"BLOCK_M": 128, "num_warps": 8, "per_sm": 1}, None),
    "token-6": ({"BLOCK_M": 32, "registers": 168, "per_sm": 3}, None),
    "token-7": ({"chunk_rows": 512}, None),
    "token-8": ({"chunk_rows": 2048}, None),
    "token-9": ({"sum_slots": 19}, None),
    "token-10": ({"sum_rows": 8, "sum_warps": 2}, None),
    "token-11": ({"window": 8192}, None),
}
# Keys, query heads, key/value heads, query tile, K.
CALLS = {
    "tile-64k": (2**16, 16, 16, 128, 64),
    "tile-256k": (2**18, 16, 16, 128, 64),
    "token-64k": (2**16, 32, 8, 1, 16),
    "token-256k": (2**18, 32, 8, 1, 16),
    "token-64k-group-16": (2**16, 16, 1, 1, 16),
}


def drawn(keys: int, kv_heads: int, query_tile: int, top_k: int) -> BlockSelection:
    tiling = Tiling(keys, keys, 64, query_tile, True)
    block = torch.arange(tiling.blocks, device="cuda")
    last = tiling.last_position(torch.arange(tiling.tiles, device="cuda"))[:, None] // 64
    lists = []
    for _ in range(kv_heads):
        scores = torch.rand(tiling.tiles, tiling.blocks, device="cuda")
        scores[:, 0] = 2
        scores.masked_fill_((block > last - 2) & (block <= last), 2).masked_fill_(block > last, -1)
        values, best = scores.topk(top_k + 3, dim=-1)
        best = best.masked_fill(values < 0, tiling.blocks).sort(-1).values.to(torch.int32)
        lists.append(best.masked_fill(best == tiling.blocks, -1))
    return BlockSelection.from_indices(torch.stack(lists)[None], tiling)


def tiles_of(variant: str, chosen: tuple[Tile, bwd.AttendTile]) -> tuple[Tile, bwd.AttendTile]:
    of_queries, by_blocks = VARIANTS[variant]
    queries, keys = chosen
    if isinstance(of_queries, dict):
        queries = replace(BY_KEY if isinstance(queries, bwd.AttendTile) else queries, **of_queries)
    elif of_queries:
        queries = bwd.AttendTile(*of_queries)
    return queries, bwd.AttendTile(*by_blocks) if by_blocks else keys


def check(variant: str) -> None:
    """Raises when gradients differ from the twin's by more than rounding, or between two runs."""
    tests, choose, by_key = load("test_attention_bwd"), bwd.chosen_tiles, variant[:5] == "token"
    case = tests.Case("", 4, 2, 1500, 1601, DIM, DIM, 64, 1 if by_key else 128, 2, keep=11)

    def tiles(*call: torch.Tensor) -> tuple[Tile, bwd.AttendTile]:
        of_queries, by_blocks = choose(*call)
        return tiles_of(variant, (BY_KEY if by_key else of_queries, by_blocks))

    with mock.patch.object(bwd, "chosen_tiles", tiles):
        tests.check(case, torch.bfloat16, "cuda", runs=2)


def passes(variant: str) -> bool:
    done = subprocess.run([sys.executable, __file__, "--check", variant], capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{variant} FAILED:", *done.stderr.splitlines()[-4:], sep="\n")
    return done.returncode == 0


def show(name: str, products: float, step: Callable[[], object]) -> None:
    """Median of calls after one that compiles. products: of 2·D operations a pair, times pairs."""
    step()
    torch.cuda.reset_peak_memory_stats()
    before, times = torch.cuda.memory_allocated(), [0.0]
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    while sum(times) < TIME_MS and len(times) < 30:
        began.record()
        step()
        ended.record()
        torch.cuda.synchronize()
        times.append(began.elapsed_time(ended))
    spent, extra = sorted(times)[len(times) // 2], (torch.cuda.max_memory_allocated() - before) / 2**20
    print(f"{name:84} {spent:9.3f} ms {2 * DIM * products / spent / 1e9:4.0f} TFLOP/s {extra:6.0f} MiB", flush=True)


def measure(name: str, passed: list[str]) -> None:
    n, heads, kv_heads, query_tile, top_k = CALLS[name]
    shapes = [(1, each, n, DIM) for each in (heads, heads, kv_heads, kv_heads)]
    q, d_out, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    selection, group = drawn(n, kv_heads, query_tile, top_k), heads // kv_heads
    lists, pairs = (selection.indices, selection.counts), float(selection.pairs().sum()) * group
    show(f"{name} forward", 2 * pairs, lambda: attend(q, k, v, selection, SCALE))
    outputs = attend(q, k, v, selection, SCALE)
    chosen = bwd.chosen_tiles(q, k, v, d_out, selection)
    plan, *plans = (bwd.plan(selection, kv_heads, group * query_tile, 2 * DIM, rows) for rows in CHUNKS)
    queries = ((q, k, v), (outputs[0], d_out, outputs[1]), lists, selection, SCALE)
    keys = ((q, k, v, d_out), bwd.gradient_of_queries(*queries, chosen[0])[1], lists, selection, SCALE)
    for variant in (x for x in passed if x[:4] == name[:4]):
        of_queries, by_blocks = tiles_of(variant, chosen)
        show(f"{name} dq {of_queries}", 3 * pairs, partial(bwd.gradient_of_queries, *queries, of_queries))
        if VARIANTS[variant][1] or variant[-2:] == "-0":
            show(f"{name} dkdv {by_blocks}", 4 * pairs, partial(bwd.gradients_of_keys, *keys, by_blocks, plan))
    for rows, other in zip(CHUNKS[1:], plans):
        show(f"{name} dkdv, {rows} rows a chunk", 4 * pairs, partial(bwd.gradients_of_keys, *keys, chosen[1], other))
    room = bwd.transposed_room(plan.cut, plan.tabled, lists[0].shape[3], n // 64, plan.most_pairs, q.device)
    cut = (torch.zeros_like(lists[1]), lists[1], plan.cut, 0, plan.most_pairs, room)
    show(f"{name} transposition, {plan.tabled} heads", 0, partial(bwd.transpose, lists[0], *cut))
    show(f"{name} backward", 7 * pairs, lambda: bwd.attend_backward(q, k, v, *outputs, d_out, selection, SCALE))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    for label, backend in DENSE.items() if group == 1 else ():
        with sdpa_kernel([backend]):
            out = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)
            dense = partial(torch.autograd.grad, out, inputs, d_out, retain_graph=True)
            show(f"{name} dense backward, {label}", 5 * heads * n**2 / 2, dense)


def main() -> None:
    parser = argparse.ArgumentParser(description="See the head of this file.")
    parser.add_argument("--calls", nargs="+", default=list(CALLS), choices=CALLS)
    parser.add_argument("--check", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.check:
        check(asked.check)
        return
    variants = [x for x in VARIANTS if any(x[:4] == name[:4] for name in asked.calls)]
    with ThreadPoolExecutor(len(variants)) as pool:
        passed = [variant for variant, good in zip(variants, pool.map(passes, variants)) if good]
    print(f"{torch.cuda.get_device_name()}: {len(passed)} of {len(variants)} variants agree with the twin", flush=True)
    for name in asked.calls:
        measure(name, passed)


if __name__ == "__main__":
    main()
