"""At equal quality, which method is faster? For each method the smallest budget that is good enough, and its time there.

    python tests/gpu/bench_equal_mass.py CAPTURE [--tokens 32768] [--layers 0,7] [--tile 128] [--only 'fastest|flat']

CAPTURE: made by `pyramidbench capture`, cut by reduce_capture.py. Its layers become a batch: a small model fills the device.

Good enough means: the attention mass that a method keeps (forced blocks included, mean over layers, heads and tiles) is at
least 0.99 of what exact Top-K keeps with K = 16. The reference budget is fixed on purpose. Against exact Top-K at the
method's own K the bar would fall with K, and a method with few blocks would meet a low bar; against all attention mass the
bar would ask for what no selection of this size can give where attention is diffuse, and K would measure the input. With a
fixed one every method must deliver the same mass, and may use as many blocks as it takes: a better selector takes fewer,
and its attention is cheaper; a cheaper selector takes more. The sum of both is what is timed.

K comes by bisection over KS, since mass grows with K, on the lists of the torch twins, which are the kernels' own: a K that
is not timed costs no compilation. Mass is judged on every tile where the mass kernel runs (checked against the torch
oracle), else by the oracle itself. Times are medians, cold L2, in rounds over all methods, every other round backwards;
"graph" replays the call from a CUDA graph, so that no launch gap counts. "÷ best flat" is the time of the fastest flat
method that was good enough ÷ this time: above 1, faster than it. `backend` says what ran; a torch stand-in's time says
nothing about a method.
"""

from __future__ import annotations

import argparse
import math
import re
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from pyramidbench.axes import parse_axis
from pyramidbench.capture_file import describe_capture, read_layer
from pyramidbench.clock import clock_for
from pyramidbench.device import pick_device
from pyramidbench.method import BlockMethod, Method
from pyramidbench.oracle import ExactRows, TileMass, exact_rows, sample_tiles, widened
from pyramidbench.problem import Problem
from pyramidbench.quality import Quality, measure_quality
from pyramidbench.registry import create, mass_source
from pyramidbench.tiling import Tiling

KS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
REFERENCE_K, SHARE = 16, 0.99
SAMPLES = 5
"""Of a method in a round."""
LONG_S = 0.05
"""A longer call is sampled once in a round and not as a graph: dense attention to 256k tokens would take most of the time."""
CHECK_ELEMENTS = 1 << 26
"""Logits of the torch oracle where a kernel gives the mass: it checks some tiles, and output errors are taken there."""
ROWS: dict[str, object] = {"score_rows": 16}
MEAN: dict[str, object] = {"tile_reduce": "mean"}
VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    "pyramid:fastest, β 1": ("pyramid:fastest", {"beam": 1}),
    "pyramid:fastest, β 2": ("pyramid:fastest", {"beam": 2}),
    "pyramid:fastest, β 4": ("pyramid:fastest", {"beam": 4}),
    "pyramid:fast, β 1": ("pyramid:fast", {"beam": 1}),
    "pyramid:fast, β 2": ("pyramid:fast", {"beam": 2}),
    "pyramid, 16 rows": ("pyramid", ROWS),
    "pyramid": ("pyramid", {}),
    "flat, mean query": ("flat", MEAN),
    "flat:bounds, mean query": ("flat:bounds", MEAN),
    "flat:bounds, 16 rows": ("flat:bounds", ROWS),
    "flat:filtered, 16 rows, P 2": ("flat:filtered", {**ROWS, "candidates": 2}),
}


@dataclass
class Timed:
    """One method at one budget, and its times in milliseconds."""

    name: str
    method: Method
    backend: str
    quality: Quality = field(default_factory=Quality)
    is_long: bool = False
    replay: Callable[[], object] | None = None
    events: list[float] = field(default_factory=list)
    graphs: list[float] = field(default_factory=list)

    @property
    def best(self) -> float:
        return median(self.graphs or self.events)


@dataclass(frozen=True)
class Judge:
    """Tensors, and what exact attention says about them."""

    q: Tensor
    k: Tensor
    v: Tensor
    problem: Problem
    tiling: Tiling
    tiles: Tensor
    exact: ExactRows
    wide: TileMass | None

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, block_size: int, query_tile: int) -> Judge:
        problem = Problem.of(q, k, v, causal=True, scale=None)
        tiling = Tiling(problem.seq_len_q, problem.seq_len_kv, block_size, query_tile, True)
        elements = CHECK_ELEMENTS if q.device.type == "cuda" else 1 << 40
        tiles = sample_tiles(tiling, problem.batch * problem.heads, elements, q.device)
        exact = exact_rows(q, k, v, tiling, problem.scale, tiles)
        wide = widened(q, k, problem, tiling, mass_source(tiling), TileMass(tiles, exact.mass))
        return cls(q, k, v, problem, tiling, tiles, exact, wide)

    def quality(self, method: Method) -> Quality:
        selection = method.select(self.q, self.k, self.problem)
        output = method.attend(self.q, self.k, self.v, selection, self.problem)
        return measure_quality(output, selection, method, self.problem, self.tiling, self.exact, self.tiles, self.wide)

    def kept(self, method: Method) -> float:
        """Mass that a method's lists hold: the `mass_kept` of `quality`, without any attention."""
        selection = method.select(self.q, self.k, self.problem)
        assert selection is not None
        known = self.wide or TileMass(self.tiles, self.exact.mass)
        mass = known.mass.unflatten(1, (selection.indices.shape[1], -1)).mean(2)
        listed = selection.indices[:, :, known.tiles].long()
        padded = torch.nn.functional.pad(mass, (0, 1))
        return float(padded.gather(-1, listed.masked_fill(listed < 0, mass.shape[-1])).sum(-1).double().mean())

    def make(self, spec: str, parameters: dict[str, object], top_k: int) -> BlockMethod:
        sizes = {"block_size": self.tiling.block_size, "query_tile": self.tiling.query_tile}
        method = create(spec, {**sizes, **parameters, "top_k": top_k})
        assert isinstance(method, BlockMethod)
        return method


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("capture", type=Path)
    parser.add_argument("--tokens", type=lambda text: parse_axis(text, "--tokens")[0], help="the first ones, as 64k")
    parser.add_argument("--layers", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--tile", type=int, default=128)
    parser.add_argument("--only", default="", help="regular expression: block methods by the name in the table")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--device", default="auto")
    asked = parser.parse_args()
    device = pick_device(asked.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.no_grad():
        judge = Judge.of(*load(asked, dtype, device), asked.block, asked.tile)
        oracle = judge.quality(judge.make("exact_topk", {}, REFERENCE_K)).mass_kept
        assert oracle is not None
        print(f"{describe_capture(asked.capture).label}: {judge.problem}, {judge.tiling}")
        print(f"exact Top-{REFERENCE_K} keeps {oracle:.4f}", flush=True)
        found = search(judge, SHARE * oracle, asked.only) + dense(judge.problem)
        measure(found, judge, asked.rounds)
    show(found)


def load(asked: argparse.Namespace, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v [layers, heads, tokens, D]; q such that 1/√D gives the model's own logits."""
    held = describe_capture(asked.capture)
    tokens = min(asked.tokens or held.seq_len, held.seq_len)
    if tokens < held.seq_len and not held.prefixes_stand:
        raise SystemExit(f"{asked.capture} stands only as a whole (docs/capture.md); leave --tokens out")
    layers = [read_layer(held.path, layer, tokens, tokens) for layer in asked.layers or held.layers]
    q, k, v = (torch.cat([layer[place] for layer in layers]).to(device) for place in range(3))
    scaled = q.float() * held.scale * math.sqrt(held.head_dim)
    return scaled.to(dtype), k.to(dtype), v.to(dtype)


def dense(problem: Problem) -> list[Timed]:
    """The dense kernels that can run here; the others are said."""
    found = []
    for name in ("dense:cudnn", "dense:fa3", "dense:flash"):
        method = create(name)
        if (reason := method.unavailable() or method.unsupported(problem)) is not None:
            print(f"{name}: {reason}")
        else:
            found.append(Timed(name, method, method.backend(problem)))
    return found


def search(judge: Judge, target: float, only: str) -> list[Timed]:
    """Each variant at the smallest K of KS that keeps `target`; what does not reach it is said and left out."""
    found = []
    for name, (spec, given) in VARIANTS.items():
        if not re.search(only, name):
            continue
        if (reason := judge.make(spec, given, KS[0]).unsupported(judge.problem)) is not None:
            print(f"{name}: {reason}")
        elif (top_k := smallest(judge, spec, given, target)) is None:
            print(f"{name}: keeps less than {target:.4f} with {KS[-1]} blocks")
        else:
            method = judge.make(spec, given, top_k)
            found.append(Timed(name, method, method.backend(judge.problem), judge.quality(method)))
    return found


def smallest(judge: Judge, spec: str, given: dict[str, object], target: float) -> int | None:
    twin = {**given, "implementation": "reference"}
    place = bisect_left(KS, True, key=lambda top_k: judge.kept(judge.make(spec, twin, top_k)) >= target)
    return KS[place] if place < len(KS) else None


def measure(found: list[Timed], judge: Judge, rounds: int) -> None:
    """Fill in the times: rounds over all methods, every other round backwards."""
    clock, pool = clock_for(judge.q.device), None
    for entry in found:
        run(entry.method, judge)()
        entry.is_long = clock.turns([run(entry.method, judge)])[0] > LONG_S
        # A torch stand-in waits for the device, which a graph cannot hold.
        if judge.q.device.type == "cuda" and "reference" not in entry.backend and not entry.is_long:
            pool = pool or torch.cuda.graph_pool_handle()
            entry.replay = captured(run(entry.method, judge), pool, entry.name)
    for turn in range(rounds):
        for entry in found[:: -1 if turn % 2 else 1]:
            calls = [run(entry.method, judge)] * (1 if entry.is_long else SAMPLES)
            clock.turns(calls[1:2])
            entry.events += [1e3 * second for second in clock.turns(calls)]
            if entry.replay is not None:
                entry.graphs += [1e3 * second for second in clock.turns([entry.replay] * SAMPLES)]


def run(method: Method, judge: Judge) -> Callable[[], Tensor]:
    return lambda: method(judge.q, judge.k, judge.v, judge.problem)


def captured(call: Callable[[], object], pool: Any, name: str) -> Callable[[], object] | None:
    """A replay of the call; None, with the reason printed, where it cannot be captured."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=pool):
            call()
    except RuntimeError as error:
        torch.cuda.synchronize()
        print(f"{name}: no graph ({str(error).splitlines()[0][:100]})")
        return None
    return graph.replay


def show(found: list[Timed]) -> None:
    """The table, fastest first."""
    flat = [entry.best for entry in found if entry.name.startswith("flat")]
    heads = " ".join(f"{head:>7}" for head in ("mass", "recall", "error"))
    print(f"{'method':34} {'K':>3} {heads} {'ms':>9} {'graph':>9} {'÷ best flat':>11}  backend")
    for entry in sorted(found, key=lambda entry: entry.best):
        top_k = entry.method.top_k if isinstance(entry.method, BlockMethod) else "all"
        values = (entry.quality.mass_kept, entry.quality.recall, entry.quality.output_error)
        shares = " ".join(f"{'–' if value is None else f'{value:.4f}':>7}" for value in values)
        graph = f"{median(entry.graphs):9.3f}" if entry.graphs else f"{'–':>9}"
        ratio = f"{min(flat) / entry.best:11.2f}" if flat else f"{'–':>11}"
        print(f"{entry.name:34} {top_k:>3} {shares} {median(entry.events):9.3f} {graph} {ratio}  {entry.backend}")


if __name__ == "__main__":
    main()
