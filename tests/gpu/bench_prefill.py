"""Checks the Triton forward path against its torch twins, then times it by stage beside dense attention.

    python tests/gpu/bench_prefill.py [--keys 16384 65536 262144] [--top-k 64] [--samples 5]

One process, one CUDA device. Times are medians of CUDA events after warm-up, with a warm L2 and random tensors: figures to
tune kernels by. The benchmark's own numbers come from `pyramidbench sweep`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from pyramidbench.kernels import backends
from pyramidbench.kernels.attention import sparse_attention
from pyramidbench.kernels.walk import WalkRules
from pyramidbench.problem import Problem
from pyramidbench.selection import BlockSelection
from pyramidbench.tiling import Tiling

HEADS, HEAD_DIM, BLOCK, TILE = 16, 128, 64, 128
MEAN = {"tile_reduce": "mean", "leaf_score": "summary"}
VARIANTS = {
    "fastest": MEAN,
    "fastest, beam 2": {**MEAN, "beam": 2},
    "fastest, beam 1": {**MEAN, "beam": 1},
    "fast": {"beam": 2, "leaf_candidates": 2, "score_rows": 16},
}


@dataclass(frozen=True)
class Row:
    """One line of the table; times in milliseconds."""

    keys: int
    name: str
    build: float
    route: float
    attend: float
    rate: float
    peak_bytes: int

    @property
    def whole(self) -> float:
        return self.build + self.route + self.attend


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--keys", type=int, nargs="+", default=[16384, 65536, 262144])
    parser.add_argument("--top-k", type=int, default=64)
    parser.add_argument("--samples", type=int, default=5)
    chosen = parser.parse_args()
    for name, overrides in VARIANTS.items():
        check(name, overrides)
    rows, dense = [], {}
    for keys in chosen.keys:
        torch.manual_seed(0)
        q, k, v = (torch.randn(1, HEADS, keys, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        dense[keys] = time_dense(q, k, v, chosen.samples)
        for name, overrides in VARIANTS.items():
            rows.append(time_variant(name, rules(chosen.top_k, overrides), q, k, v, chosen.samples))
            show(rows[-1], dense[keys])
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}; ms, warm L2, median; K {chosen.top_k}")
    for row in rows:
        show(row, dense[row.keys])


def rules(top_k: int, overrides: dict[str, object]) -> WalkRules:
    return WalkRules(**{"top_k": top_k, "sink_blocks": 1, "local_blocks": 2, **overrides})


def problem_of(q: Tensor, k: Tensor, v: Tensor) -> Problem:
    return Problem.of(q, k, v, causal=True, scale=None)


def check(name: str, overrides: dict[str, object]) -> None:
    """Sets against the twin's, and the output against fp64 within twice the twin's error."""
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, 2, 8000, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    tiling, walk = Tiling(8000, 8000, BLOCK, TILE, True), rules(16, overrides)
    lists = [select(q, k, tiling, walk, backend) for backend in ("triton", "reference")]
    differing = float((lists[0] != lists[1]).any(-1).double().mean())
    selection = BlockSelection.from_indices(lists[0], tiling)
    out = backends.attend(q, k, v, selection, problem_of(q, k, v), "triton")
    exact = sparse_attention(q.double(), k.double(), v.double(), selection)
    error, allowed = error_of(out, exact), 2 * error_of(sparse_attention(q, k, v, selection), exact)
    print(f"{name}: {differing:.2%} of the lists differ from the twin's; error {error:.2e}, allowed {allowed:.2e}")
    if differing > 2e-2 or not error <= allowed:
        raise SystemExit(f"{name} is wrong")


def select(q: Tensor, k: Tensor, tiling: Tiling, walk: WalkRules, backend: backends.Backend) -> Tensor:
    pyramid = backends.build(k, tiling, walk, "reference")
    return backends.route(q, k, pyramid, tiling, walk, HEAD_DIM**-0.5, backend)


def error_of(out: Tensor, exact: Tensor) -> float:
    return float((out - exact).norm() / exact.norm())


def time_variant(name: str, walk: WalkRules, q: Tensor, k: Tensor, v: Tensor, samples: int) -> Row:
    keys, scale, problem = k.shape[2], HEAD_DIM**-0.5, problem_of(q, k, v)
    tiling = Tiling(keys, keys, BLOCK, TILE, True)
    pyramid = backends.build(k, tiling, walk, "triton")
    selection = BlockSelection.from_indices(backends.route(q, k, pyramid, tiling, walk, scale, "triton"), tiling)
    flops = 4 * HEAD_DIM * float(selection.pairs().sum())

    def whole() -> Tensor:
        own = backends.build(k, tiling, walk, "triton")
        lists = backends.route(q, k, own, tiling, walk, scale, "triton")
        return backends.attend(q, k, v, BlockSelection.from_indices(lists, tiling), problem, "triton")

    build = milliseconds(lambda: backends.build(k, tiling, walk, "triton"), samples)
    route = milliseconds(lambda: backends.route(q, k, pyramid, tiling, walk, scale, "triton"), samples)
    attend = milliseconds(lambda: backends.attend(q, k, v, selection, problem, "triton"), samples)
    return Row(keys, name, build, route, attend, flops / attend / 1e9, peak_bytes(whole))


def time_dense(q: Tensor, k: Tensor, v: Tensor, samples: int) -> dict[str, float]:
    """Milliseconds of each dense kernel that is here; a missing one says so."""
    times = {}
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        sdpa = torch.nn.functional.scaled_dot_product_attention
        times["cuDNN"] = milliseconds(lambda: sdpa(q, k, v, is_causal=True), samples)
    try:
        from fa3_fwd_interface import flash_attn_func
    except ImportError as error:
        print(f"no FA3 here ({error}); the wheel fa3-fwd brings it")
        return times
    by_token = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    times["FA3"] = milliseconds(lambda: flash_attn_func(*by_token, causal=True), samples)
    return times


def milliseconds(call: Callable[[], object], samples: int) -> float:
    for _ in range(2):
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


def peak_bytes(call: Callable[[], object]) -> int:
    """Memory above what was held before the call, the result included."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def show(row: Row, dense: dict[str, float]) -> None:
    name, best = min(dense.items(), key=lambda item: item[1])
    share = (row.build + row.route) / row.whole
    print(
        f"{row.keys:>7} {row.name:16} build {row.build:6.3f}  route {row.route:7.3f}  attend {row.attend:7.3f} "
        f"({row.rate:5.0f} TFLOP/s)  whole {row.whole:7.3f}  selection {share:5.1%}  peak {row.peak_bytes / 2**20:7.0f} MiB"
        f"  {name} {best:8.3f}  {best / row.whole:5.2f}×",
        flush=True,
    )


if __name__ == "__main__":
    main()
