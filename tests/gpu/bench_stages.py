"""What a stage's time is: timed alone from an idle device, by the stage clock, and without any host as a CUDA graph.

    python tests/gpu/bench_stages.py [--method pyramid:fastest] [--lengths 65536,262144]

Prints, for each length, milliseconds of each stage and the share that choosing blocks has in the call, three times: with the
device waited for at both ends of a stage (what the stage clock did before), between events with the host ahead of the device
(what it does), and choosing and the whole call replayed as graphs. Then the whole call under the clock of sweeps, in batches of
one: the first after a wait, which has nothing before it, and the later ones, before which the device is kept busy.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

import torch

from pyramidbench.clock import clock_for
from pyramidbench.device_queue import CudaQueue
from pyramidbench.graphs import record_graph
from pyramidbench.method import Method
from pyramidbench.problem import Problem
from pyramidbench.registry import create
from pyramidbench.sampling import sample_in_turns
from pyramidbench.stage_clock import Staged, queued_times, staged
from pyramidbench.units import milliseconds

DEVICE = torch.device("cuda")
HEADS, HEAD_DIM, TOP_K, REPEATS, SECONDS = 16, 128, 64, 9, 1.0


def stages_of(method: Method, length: int) -> tuple[Callable[[], object], Callable[[], object], Callable[[], object]]:
    """Choosing, attending to what was chosen last, and the whole call, all compiled."""
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    q, k, v = (
        torch.randn(1, HEADS, length, HEAD_DIM, device=DEVICE, dtype=torch.bfloat16, generator=generator)
        for _ in range(3)
    )
    problem = Problem.of(q, k, v, causal=True, scale=None)
    chosen = method.select(q, k, problem)
    method.attend(q, k, v, chosen, problem)
    torch.cuda.synchronize()
    return (
        lambda: method.select(q, k, problem),
        lambda: method.attend(q, k, v, chosen, problem),
        lambda: method(q, k, v, problem),
    )


def waited_for(call: Staged, queue: CudaQueue) -> dict[str, float]:
    """Median seconds of each stage with the device idle at both of its ends, and a cold cache."""
    runs = []
    for _ in range(REPEATS):
        seconds: dict[str, float] = {}

        @contextmanager
        def listener(name: str, seconds: dict[str, float] = seconds) -> Iterator[None]:
            queue.wait()
            start = time.perf_counter()
            yield
            queue.wait()
            seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start

        queue.cool()
        call(listener)
        runs.append(seconds)
    return {name: median(run[name] for run in runs) for name in runs[0]}


def replayed(call: Callable[[], object]) -> float | str:
    """Median seconds of a call as a CUDA graph with a cold cache, or why it cannot be one."""
    graph = record_graph(call, DEVICE)
    if isinstance(graph, str):
        return graph
    (sampled,) = sample_in_turns([graph], clock_for(DEVICE), SECONDS)
    return median(sampled.seconds)


def show(what: str, seconds: dict[str, float], whole_s: float) -> None:
    parts = ", ".join(f"{name} {milliseconds(taken)}" for name, taken in seconds.items())
    print(f"  {what}: {parts} ms; choosing is {100 * seconds['select'] / whole_s:.2f} % of a call")


def report(method: Method, length: int) -> None:
    select, attend, whole = stages_of(method, length)
    queue, call = CudaQueue(DEVICE), staged(select, attend)
    clock = clock_for(DEVICE)
    first = clock.turns([whole])[0]
    later = [clock.turns([whole])[0] for _ in range(REPEATS)]
    whole_s, host_s = median(later), clock.host_s(whole, REPEATS) or 0.0
    print(f"{length} tokens: a call takes {milliseconds(whole_s)} ms, its host {milliseconds(host_s)}")
    waits = waited_for(call, queue)
    show("device idle at both ends", waits, whole_s)
    queued = queued_times(call, queue, "cold", REPEATS)
    show("host ahead of the device", queued.seconds, whole_s)
    added = queued.seconds["select"] + queued.seconds["attend"]
    waiting = ", with waits for the host" if queued.waits_for_host else ""
    print(f"    added up ÷ the whole call: {added / whole_s:.4f}{waiting}")
    graphs = replayed(select), replayed(whole)
    if isinstance(graphs[0], str) or isinstance(graphs[1], str):
        print(f"  as graphs: {graphs}")
    else:
        show(f"as graphs (a call {milliseconds(graphs[1])} ms)", {"select": graphs[0]}, graphs[1])
    print(f"  whole call in batches of one: first {milliseconds(first)} ms, later {milliseconds(min(later))} to "
          f"{milliseconds(max(later))}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="pyramid:fastest")
    parser.add_argument("--lengths", default="65536,262144")
    given = parser.parse_args()
    method = create(given.method, {"top_k": TOP_K})
    queue = CudaQueue(DEVICE)
    print(f"{torch.cuda.get_device_name(DEVICE)}, torch {torch.__version__}; {given.method}, K {TOP_K}, {HEADS} heads of "
          f"{HEAD_DIM}, bf16; an overwrite of the L2 takes {1e6 * queue.overwrite_s:.1f} µs")  # fmt: skip
    for length in given.lengths.split(","):
        report(method, int(length))


if __name__ == "__main__":
    main()
