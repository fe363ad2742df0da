"""Checks the Triton forward path against its torch twins, then times it by stage beside dense attention.

    python tests/gpu/bench_prefill.py [--only REGEX] [--samples 5] [--no-check] [--no-dense]
    python tests/gpu/bench_prefill.py --only 'tile.*(64|256|1024)k' --no-check --no-dense    # growth from 64k to 1M

One process, one CUDA device. Times are medians of CUDA events after warm-up, with a warm L2 and random tensors: figures to
tune kernels by. The benchmark's own numbers come from `pyramidbench sweep`. A stage timed alone waits for the host at its
first kernel; `select` is build and route as one CUDA graph, so kernels alone, and the slopes at the end are its.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from rivals import milliseconds, time_dense
from torch import Tensor

from pyramidbench.graphs import record_graph
from pyramidbench.kernels import backends
from pyramidbench.kernels.attention import sparse_attention
from pyramidbench.kernels.walk_rules import WalkRules
from pyramidbench.problem import Problem
from pyramidbench.selection import BlockSelection
from pyramidbench.tiling import Tiling

BLOCK, HEAD_DIM = 64, 128
MEAN = {"tile_reduce": "mean", "leaf_score": "summary"}
TILE_LEVEL = {
    "fastest": {**MEAN, "beam": 2},
    "fastest, beam 1": {**MEAN, "beam": 1},
    "fastest, beam 4": MEAN,
    "fast": {"beam": 2, "leaf_candidates": 2, "score_rows": 16},
    "flat, mean query": {**MEAN, "levels": 1, "bound_weight": 0},
    "flat": {"leaf_score": "summary", "levels": 1, "bound_weight": 0},
}
TOKEN_LEVEL = {
    "default": {},
    "beam 2, P 2": {"beam": 2, "leaf_candidates": 2},
    "flat": {**MEAN, "levels": 1, "bound_weight": 0},
}


@dataclass(frozen=True)
class Workload:
    """A shape and the walks that are timed on it. dense: whether dense kernels run too."""

    name: str
    heads: int
    kv_heads: int
    keys: int
    top_k: int
    query_tile: int
    variants: dict[str, dict[str, object]] = field(default_factory=dict)
    dense: bool = True

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(0)
        heads = (self.heads, self.kv_heads, self.kv_heads)
        q, k, v = (torch.randn(1, n, self.keys, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for n in heads)
        return q, k, v

    @property
    def tiling(self) -> Tiling:
        return Tiling(self.keys, self.keys, BLOCK, self.query_tile, True)


WORKLOADS = [
    *(Workload(f"tile 16/16 {n // 1024}k", 16, 16, n, 64, 128, TILE_LEVEL) for n in (16384, 65536, 262144)),
    Workload("tile 16/16 1024k", 16, 16, 1 << 20, 64, 128, TILE_LEVEL, dense=False),
    Workload("token 16/1 64k", 16, 1, 65536, 16, 1, TOKEN_LEVEL),
    *(Workload(f"token 32/8 {n // 1024}k", 32, 8, n, 16, 1, TOKEN_LEVEL) for n in (65536, 262144)),
]


@dataclass(frozen=True)
class Row:
    """One line of the table; times in milliseconds."""

    workload: str
    name: str
    build: float
    route: float
    select: float
    attend: float
    whole: float
    rate: float
    peak_share: float


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default=".", help="workloads whose name matches this regular expression")
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--no-dense", action="store_true", help="time our own kernels alone")
    chosen = parser.parse_args()
    if not chosen.no_check:
        check_all()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; ms, warm L2, median of {chosen.samples}")
    selection_times: dict[str, dict[int, float]] = {}
    for workload in WORKLOADS:
        if not re.search(chosen.only, workload.name):
            continue
        q, k, v = workload.tensors()
        dense = time_dense(q, k, v, chosen.samples) if workload.dense and not chosen.no_dense else {}
        for name, overrides in workload.variants.items():
            row = time_variant(workload, name, rules(workload.top_k, overrides), (q, k, v), chosen.samples)
            show(row, dense)
            selection_times.setdefault(f"{workload.name.rsplit(' ', 1)[0]}: {name}", {})[workload.keys] = row.select
        del q, k, v
    for name, times in selection_times.items():
        show_slope(name, times)


def rules(top_k: int, overrides: dict[str, object]) -> WalkRules:
    return WalkRules(**{"top_k": top_k, "sink_blocks": 1, "local_blocks": 2, **overrides})


def check_all() -> None:
    """Sets against the twin's, and the output against fp64 within twice the twin's error."""
    for heads, kv_heads, tile, variants in ((2, 2, 128, TILE_LEVEL), (4, 1, 1, TOKEN_LEVEL)):
        for name, overrides in variants.items():
            torch.manual_seed(1)
            q, k, v = (
                torch.randn(1, n, 8000, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
                for n in (heads, kv_heads, kv_heads)
            )
            check(f"{name}, tile {tile}", Tiling(8000, 8000, BLOCK, tile, True), rules(16, overrides), q, k, v)


def check(name: str, tiling: Tiling, walk: WalkRules, q: Tensor, k: Tensor, v: Tensor) -> None:
    pyramid = backends.build(k, tiling, walk, "reference")
    selection, twin = (backends.route(q, k, pyramid, tiling, walk, HEAD_DIM**-0.5, b) for b in ("triton", "reference"))
    differing = float((selection.indices != twin.indices).any(-1).double().mean())
    out = backends.attend(q, k, v, selection, Problem.of(q, k, v, causal=True, scale=None), "triton")
    exact = sparse_attention(q.double(), k.double(), v.double(), selection)
    error, allowed = error_of(out, exact), 2 * error_of(sparse_attention(q, k, v, selection), exact)
    print(
        f"{name}: {differing:.2%} of the lists differ from the twin's; error {error:.2e}, allowed {allowed:.2e}",
        flush=True,
    )
    if differing > 2e-2 or not error <= allowed:
        raise SystemExit(f"{name} is wrong")


def error_of(out: Tensor, exact: Tensor) -> float:
    return float((out - exact).norm() / exact.norm())


def time_variant(
    workload: Workload, name: str, walk: WalkRules, tensors: tuple[Tensor, Tensor, Tensor], samples: int
) -> Row:
    (q, k, v), tiling, scale = tensors, workload.tiling, HEAD_DIM**-0.5
    problem = Problem.of(q, k, v, causal=True, scale=None)
    pyramid = backends.build(k, tiling, walk, "triton")
    selection = backends.route(q, k, pyramid, tiling, walk, scale, "triton")
    flops = 4 * HEAD_DIM * float(selection.pairs().double().sum()) * workload.heads / workload.kv_heads

    def select() -> BlockSelection:
        return backends.route(q, k, backends.build(k, tiling, walk, "triton"), tiling, walk, scale, "triton")

    def whole() -> Tensor:
        return backends.attend(q, k, v, select(), problem, "triton")

    build = milliseconds(lambda: backends.build(k, tiling, walk, "triton"), samples)
    route = milliseconds(lambda: backends.route(q, k, pyramid, tiling, walk, scale, "triton"), samples)
    selected = replayed(select, q.device, samples)
    attend = milliseconds(lambda: backends.attend(q, k, v, selection, problem, "triton"), samples)
    total = milliseconds(whole, samples)
    share = (peak_bytes(whole) - q.numel() * 2) / (2 * (q.numel() + k.numel() + v.numel()))
    return Row(workload.name, name, build, route, selected, attend, total, flops / attend / 1e9, share)


def replayed(call: Callable[[], object], device: torch.device, samples: int) -> float:
    """Milliseconds of a call as a CUDA graph; NaN, with the reason on a line, where it cannot be one."""
    graph = record_graph(call, device)
    if isinstance(graph, str):
        print(f"no CUDA graph: {graph}")
        return math.nan
    return milliseconds(graph, samples)


def peak_bytes(call: Callable[[], object]) -> int:
    """Memory above what was held before the call, the result included."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def show(row: Row, dense: dict[str, float]) -> None:
    line = (
        f"{row.workload:17} {row.name:17} build {row.build:6.3f}  route {row.route:7.3f}  select {row.select:7.3f}  "
        f"attend {row.attend:7.3f} "
        f"({row.rate:4.0f} TFLOP/s)  whole {row.whole:7.3f}  selection {row.select / (row.select + row.attend):5.1%}  "
        f"memory {row.peak_share:5.1%} of q + k + v"
    )
    if dense:
        name, best = min(dense.items(), key=lambda item: item[1])
        line += f"  {name} {best:8.3f}  {best / row.whole:5.2f}×"
    print(line, flush=True)


def show_slope(name: str, times: dict[int, float]) -> None:
    """Growth of the selection from 64k on: the log-log slope from each length to the next, and overall."""
    lengths = sorted(n for n in times if n >= 65536)
    spans = [*itertools.pairwise(lengths), *([(lengths[0], lengths[-1])] if len(lengths) > 2 else [])]
    for first, last in spans:
        grown = math.log(times[last] / times[first]) / math.log(last / first)
        print(f"selection of {name}: slope {grown:.2f} from {first // 1024}k to {last // 1024}k")


if __name__ == "__main__":
    main()
