"""The timer against triton.testing.do_bench and against CUDA-graph replay, on three calls: a launch-bound one, one bound by
memory, and one bound by arithmetic.

`python tests/gpu/bench_clock.py` prints medians in microseconds, and each figure ÷ ours, which is of the three in
turns, as methods are measured. "Alone" is our timer on that call only, as the other tools have it. Ours, do_bench and
the replayed graph see a cold L2; do_bench_cudagraph repeats the call inside one graph, with the L2 as the call leaves
it. The call that is bound by memory is a kernel: a copy would become a memory node of the graph, which is another
operation.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch
from triton.testing import do_bench, do_bench_cudagraph

from pyramidbench.clock import clock_for
from pyramidbench.graphs import record_graph
from pyramidbench.sampling import sample_in_turns
from pyramidbench.timing import is_launch_bound, measure_in_turns

DEVICE = torch.device("cuda")
SECONDS = 2.0


def calls() -> dict[str, Callable[[], object]]:
    generator = torch.Generator(device=DEVICE).manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16, generator=generator)

    small, large, square = randn(256, 256), randn(1 << 28), randn(8192, 8192)
    twice = torch.empty_like(large)
    return {
        "softmax of 256 x 256": lambda: small.softmax(-1),
        "512 MiB doubled": lambda: torch.mul(large, 2, out=twice),
        "product of 8192 x 8192": lambda: square @ square,
    }


def others(call: Callable[[], object]) -> dict[str, float | str]:
    """Microseconds by the other timers, or why one cannot time this call."""
    (alone,) = sample_in_turns([call], clock_for(DEVICE, "cold"), SECONDS)
    found: dict[str, float | str] = {
        "alone": 1e6 * median(alone.seconds),
        "do_bench": 1e3 * float(do_bench(call, warmup=200, rep=1000, return_mode="median")),
    }
    replay = record_graph(call, DEVICE)
    if isinstance(replay, str):
        return found | {"graph replay": replay}
    (sampled,) = sample_in_turns([replay], clock_for(DEVICE, "cold"), SECONDS)
    found["graph replay"] = 1e6 * median(sampled.seconds)
    return found | {"do_bench_cudagraph": 1e3 * float(do_bench_cudagraph(call, rep=200, return_mode="median"))}


def main() -> None:
    named = calls()
    for call in named.values():
        call()
    timings = measure_in_turns(list(named.values()), DEVICE, "cold", SECONDS)
    print(
        f"{torch.cuda.get_device_name(DEVICE)}, torch {torch.__version__}; {timings[0].clock}; medians in microseconds"
    )
    for (name, call), timing in zip(named.items(), timings):
        ours, bound = (
            1e6 * median(timing.sampled.seconds),
            "launch-bound" if is_launch_bound(timing) else "not launch-bound",
        )
        print(f"{name}: ours {ours:.2f}, host {1e6 * (timing.host_s or 0.0):.2f} ({bound})")
        for timer, found in others(call).items():
            print(f"    {timer}: " + (found if isinstance(found, str) else f"{found:.2f} ({found / ours:.3f} of ours)"))


if __name__ == "__main__":
    main()
