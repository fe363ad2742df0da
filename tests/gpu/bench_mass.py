"""Checks the Triton block mass against the torch oracle, then times it with several tile sizes.

    python tests/gpu/bench_mass.py [--keys 16384 65536 131072] [--samples 3]

One process, one CUDA device, 16 heads, D 128, blocks of 64, causal, random tensors. Medians of CUDA events after a warm-up;
TFLOP/s count the two products of every visible pair. The last part is token level at 65 536 keys, in chunks of tiles.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from pyramidbench.kernels.mass import MassTile, block_mass, mass_tile
from pyramidbench.oracle import block_mass as twin_mass
from pyramidbench.tiling import Tiling

HEADS, HEAD_DIM, BLOCK, TILE = 16, 128, 64, 128
TOKEN_KEYS, CHUNK_ELEMENTS = 65536, 1 << 28
CHECKS = [(tile, torch.bfloat16) for tile in (TILE, 64, 16, 1)]
CHECKS += [(tile, dtype) for tile in (TILE, 1) for dtype in (torch.float16, torch.float32)]
VARIANTS = {
    "128×64, 8 warps, 3 stages": MassTile(128, 64, 128, 8, 3),
    "128×64, 4 warps, 3 stages": MassTile(128, 64, 128, 4, 3),
    "128×64, 4 warps, 2 stages": MassTile(128, 64, 128, 4, 2),
    "128×128, 8 warps, 3 stages": MassTile(128, 128, 128, 8, 3),
    "128×128, 8 warps, 2 stages": MassTile(128, 128, 128, 8, 2),
}
FP32_VARIANTS = {
    "fp32 128×64, parts of 32, 8 warps": MassTile(128, 64, 32, 8, 1),
    "fp32 128×64, parts of 16, 8 warps": MassTile(128, 64, 16, 8, 1),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--keys", type=int, nargs="+", default=[16384, 65536, 131072])
    parser.add_argument("--samples", type=int, default=3)
    chosen = parser.parse_args()
    started = time.perf_counter()
    for tile, dtype in CHECKS:
        check(tile, dtype)
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; chosen {mass_tile(1 << 20, TILE, BLOCK, HEAD_DIM, 2)}"
    )
    for keys in chosen.keys:
        q, k = drawn(keys, torch.bfloat16)
        for name, tile in VARIANTS.items():
            show(keys, name, q, k, Tiling(keys, keys, BLOCK, TILE, True), tile, chosen.samples)
    q, k = drawn(16384, torch.float32)
    for name, tile in FP32_VARIANTS.items():
        show(16384, name, q, k, Tiling(16384, 16384, BLOCK, TILE, True), tile, 1)
    for name in ("128×64, 8 warps, 3 stages", "128×64, 4 warps, 3 stages"):
        token_level(name, chosen.samples)
    print(f"{time.perf_counter() - started:.0f} s in all, compiling included")


def drawn(keys: int, dtype: torch.dtype, heads: int = HEADS, kv_heads: int = HEADS) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    # Twice the size of unit normals: some rows attend to few keys.
    q = 2 * torch.randn(1, heads, keys, HEAD_DIM, device="cuda")
    return q.to(dtype), torch.randn(1, kv_heads, keys, HEAD_DIM, device="cuda").to(dtype)


def check(query_tile: int, dtype: torch.dtype) -> None:
    """Every tile at 3 000 keys with grouped heads, and some tiles at 60 008, against the torch oracle in fp64."""
    worst = 0.0
    for keys, spread in ((3000, 1), (60_008, 7919)):
        q, k = drawn(keys, dtype, 4, 2)
        tiling = Tiling(keys, keys, BLOCK, query_tile, True)
        tiles = torch.arange(0, tiling.tiles, spread if query_tile == 1 else -(-spread // 128), device="cuda")
        mass = block_mass(q, k, tiling, HEAD_DIM**-0.5, tiles)
        twin = twin_mass(q.double(), k.double(), block_size=BLOCK, query_tile=query_tile, tiles=tiles)
        error = ((mass - twin).abs() - 1e-7) / twin.clamp(min=1e-30)
        worst = max(worst, float(error.clamp(min=0).max()))
        if not worst <= (3e-5 if dtype == torch.float32 else 2e-5):
            raise SystemExit(f"tile {query_tile}, {dtype}, {keys} keys: relative error {worst:.1e} beyond 1e-7")
    print(f"tile {query_tile}, {dtype}: largest relative error {worst:.1e} (beyond 1e-7 absolute)", flush=True)


def show(keys: int, name: str, q: Tensor, k: Tensor, tiling: Tiling, tile: MassTile, samples: int) -> None:
    try:
        took = milliseconds(lambda: block_mass(q, k, tiling, HEAD_DIM**-0.5, tile=tile), samples)
    except Exception as error:  # a variant that this device cannot launch must not end the table
        print(f"{keys:>7} {name:36} {type(error).__name__}: {str(error)[:80]}")
        return
    rate = 4 * HEAD_DIM * HEADS * tiling.visible_pairs() / took / 1e9
    print(f"{keys:>7} {name:36} {took:9.2f} ms  {rate:5.0f} TFLOP/s", flush=True)


def token_level(name: str, samples: int) -> None:
    """Mass of single tokens, a chunk of tiles at a time, each chunk reduced before the next."""
    q, k = drawn(TOKEN_KEYS, torch.bfloat16)
    tiling = Tiling(TOKEN_KEYS, TOKEN_KEYS, BLOCK, 1, True)
    step = CHUNK_ELEMENTS // (HEADS * tiling.blocks)

    def everything() -> Tensor:
        parts = torch.arange(tiling.tiles, device="cuda").split(step)
        return torch.stack([block_mass(q, k, tiling, HEAD_DIM**-0.5, part, VARIANTS[name]).amax() for part in parts])

    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    took = milliseconds(everything, samples)
    peak = (torch.cuda.max_memory_allocated() - held) / 2**20
    rate = 4 * HEAD_DIM * HEADS * tiling.visible_pairs() / took / 1e9
    label = f"token level, {step} tiles a chunk, {name}"
    print(f"{TOKEN_KEYS:>7} {label:56} {took:9.2f} ms  {rate:5.0f} TFLOP/s  peak {peak:.0f} MiB", flush=True)


def milliseconds(call: Callable[[], object], samples: int) -> float:
    call()
    times = []
    for _ in range(samples):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


if __name__ == "__main__":
    main()
