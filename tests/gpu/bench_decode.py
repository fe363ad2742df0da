"""Checks the decode kernels against their twins, then times a decoding step: append, attend, and each kernel alone.

    python tests/gpu/bench_decode.py [--no-check] [--short] [--samples 200]

bf16, 32 query and 8 key/value heads, head dim 128, blocks of 64, K 32, random tensors. A step is captured by a CUDA graph and
replayed; before each replay a buffer of twice the L2 is overwritten, outside the timed region; median of CUDA events.
"append", "attend": graphs of their own.
A context ends half a block short of its name, so that its last token completes no block, as 63 of 64 do; "ending": the append
of a token that ends a block and, but for the root, a node of every level. "bytes": what the step must move by formula;
"TB/s": that ÷ the step's time. Dense: FA3
with a KV cache (where fa3_fwd_interface or flash_attn_interface can be imported) and SDPA's flash kernel, on the same
tensors, without an append.
`--short` leaves out 1M tokens and the large batches.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from pyramidbench.decoder import CacheLayout
from pyramidbench.problem import Problem
from pyramidbench.registry import create

HEADS, KV_HEADS, HEAD_DIM, BLOCK, TOP_K = 32, 8, 128, 64, 32
VARIANTS: dict[str, dict[str, Any]] = {
    "pyramid": {},
    "pyramid, start 512": {"start_width": 512},
    "pyramid, start 2048": {"start_width": 2048},
    "pyramid, beam 2, P 2": {"beam": 2, "leaf_candidates": 2},
    "pyramid, summary leaf": {"leaf_score": "summary"},
    "pyramid, leaf by 4 parts": {"leaf_score": "sub"},
    "pyramid, paper": {
        "beam": 1,
        "levels": "full",
        "bound_weight": 0,
        "node_score": "children",
        "leaf_candidates": None,
        "head_reduce": "sum_lse",
    },
    "flat, bounds": {"levels": 1, "leaf_score": "summary"},
    "flat, filtered": {"levels": 1},
}
CELLS = [(1, 4), (1, 8), (1, 16), (1, 32), (1, 64), (1, 128), (1, 256), (1, 1024), (8, 32), (8, 128), (64, 4), (64, 32)]
"""Batch, and context in units of 1 024 tokens."""


@dataclass(frozen=True)
class Timer:
    """Times replays of a graph, or calls where there is none, on a cold L2."""

    samples: int
    flush: Tensor

    def median_us(self, call: Callable[[], object]) -> float:
        pairs = []
        for _ in range(self.samples + 20):
            self.flush.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize()
        times = sorted(start.elapsed_time(end) * 1e3 for start, end in pairs[20:])
        return times[len(times) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--no-check", action="store_true", help="time without checking first")
    parser.add_argument("--short", action="store_true", help="up to 256k tokens at batch 1, and one large batch")
    parser.add_argument("--samples", type=int, default=200, help="replays timed of each call")
    asked = parser.parse_args()
    if not asked.no_check:
        check()
        print("right: sets, outputs and appended pyramids agree with the twins", flush=True)
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    timer = Timer(asked.samples, torch.empty(2 * l2, dtype=torch.uint8, device="cuda"))
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; µs, median of {asked.samples} replays", flush=True
    )
    for batch, thousands in CELLS:
        if not asked.short or (thousands <= 256 and batch <= 8):
            time_cell(timer, batch, thousands * 1024 - BLOCK // 2)


def check() -> None:
    """The GPU cases of tests/triton in bf16: AssertionError where a kernel differs from its twin."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "triton"))
    tests = importlib.import_module("test_decode")
    for case in tests.LARGE:
        share = tests.check_step(case, torch.bfloat16, "cuda")
        assert share <= 0.1, f"{case.name}: {share:.1%} of the lists differ from the twin's"
    case = tests.Case("", tests.WIDE, (70_000,), head_dim=128, head_dim_v=128, block_size=64)
    tests.check_append(case, torch.bfloat16, "cuda", (65_000, 1, 1, 64, 1, 63, 1, 4869), 65_063)


def time_cell(timer: Timer, batch: int, keys: int) -> None:
    """The table of one batch and context."""
    torch.manual_seed(0)
    shapes = ((HEADS, 1), (KV_HEADS, keys), (KV_HEADS, keys))
    q, k, v = (torch.randn(batch, *shape, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    print(f"-- batch {batch}, {-(-keys // 1024)}k tokens", flush=True)
    fastest = min(
        filter(None, (time_dense(timer, name, call) for name, call in dense_calls(q, k, v).items())), default=None
    )
    for name, changes in VARIANTS.items():
        try:
            time_variant(timer, name, changes, q, k, v, fastest)
        except torch.OutOfMemoryError as error:
            print(f"   {name:24} does not fit: {str(error)[:80]}", flush=True)


def dense_calls(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], object]]:
    """Dense decoding on all keys; the new token is in its place already, so this is attention alone."""
    calls: dict[str, Callable[[], object]] = {}
    for name in ("fa3_fwd_interface", "flash_attn_interface"):
        try:
            module = importlib.import_module(name)
        except (ImportError, OSError):
            continue
        by_token = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
        lengths = torch.full((q.shape[0],), k.shape[2], dtype=torch.int32, device="cuda")
        calls["FA3, KV cache"] = partial(module.flash_attn_with_kvcache, *by_token, cache_seqlens=lengths, causal=True)
        break

    def flash() -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return calls | {"SDPA flash": flash}


def time_dense(timer: Timer, name: str, call: Callable[[], object]) -> float | None:
    try:
        took = timer.median_us(recorded(call))
    except RuntimeError as error:
        print(f"   {name:24} {str(error)[:100]}", flush=True)
        return None
    print(f"   {name:24} {took:9.1f}", flush=True)
    return took


def time_variant(
    timer: Timer, name: str, changes: dict[str, Any], q: Tensor, k: Tensor, v: Tensor, fastest: float | None
) -> None:
    """Step, append and attend of one variant, as graphs, and its kernels by the profiler."""
    problem = replace(Problem.of(q, k, causal=True, scale=None), direction="decode")
    method = create(
        "pyramid", {"top_k": TOP_K, "block_size": BLOCK, "query_tile": 1, "implementation": "triton", **changes}
    )
    decoder, old = method.decoder(problem, CacheLayout(k.device)), problem.seq_len_kv - 1
    decoder.append(k, v)

    ending = (1 << old.bit_length() - 1) - 1

    def append(at: int = old) -> None:
        decoder.append(k[:, :, at : at + 1], v[:, :, at : at + 1], at=at)

    def step() -> object:
        append()
        return decoder.attend(q)

    calls = (step, append, lambda: decoder.attend(q))
    times = [timer.median_us(recorded(call)) for call in calls]
    ending_us = timer.median_us(recorded(partial(append, ending)))
    append()
    size = method.step_cost(problem).bytes
    against = "" if fastest is None else f"  {fastest / times[0]:6.2f} times the fastest dense"
    rate = size / times[0] / 1e6
    print(
        f"   {name:24} {times[0]:9.1f}  append {times[1]:6.1f} (ending {ending_us:6.1f})  attend {times[2]:7.1f}"
        f"  {size / 1e6:7.1f} MB  {rate:5.2f} TB/s"
        f"{against}",
        flush=True,
    )
    by_kernel(step)


def recorded(call: Callable[[], object]) -> Callable[[], object]:
    """The call as a CUDA graph's replay."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def by_kernel(call: Callable[[], object]) -> None:
    """Warm times of the kernels of one call."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorder:
        call()
        torch.cuda.synchronize()
    events = [(event.key, event.self_device_time_total) for event in recorder.key_averages()]
    parts = [f"{name.split('(')[0][:24]} {took:.1f}" for name, took in events if took > 0 and "::" not in name]
    print(f"      warm, by kernel: {', '.join(parts)}", flush=True)


if __name__ == "__main__":
    main()
