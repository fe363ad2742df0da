"""Clock, graphs, memory and NVML on a real device: what the fake ones of other tests stand for."""

from __future__ import annotations

import time
from statistics import median
from typing import get_args

import pytest
import torch

from pyramidbench.clock import Cache, CudaClock, clock_for
from pyramidbench.device_queue import CudaQueue
from pyramidbench.graphs import record_graph
from pyramidbench.memory import measure_peaks
from pyramidbench.nvml import NvmlWatch, watch_for
from pyramidbench.problem import Problem
from pyramidbench.registry import create
from pyramidbench.sampling import sample_in_turns
from pyramidbench.stage_clock import Staged, queued_times, staged
from pyramidbench.stages import Listener
from pyramidbench.timing import is_launch_bound, measure_in_turns

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
GIB = 1 << 30


@pytest.fixture(autouse=True)
def nan_filled() -> None:
    """Not here: filled memory and deterministic algorithms are more work than what is timed has."""


def sleeping(cycles: int) -> None:
    torch.cuda._sleep(cycles)


def test_events_see_the_device_and_not_the_host() -> None:
    short, long = lambda: sleeping(1_000_000), lambda: sleeping(4_000_000)
    clock = clock_for(CUDA, "cold")
    a, b = sample_in_turns([short, long], clock, 2.0)
    assert median(b.seconds) / median(a.seconds) == pytest.approx(4, rel=0.05)
    host = clock.host_s(long, 5)
    assert host is not None
    assert host < 0.5 * median(b.seconds)


def test_a_cold_cache_is_slower_than_a_warm_one() -> None:
    """Half the L2, read and written again and again: from L2 it comes faster than from memory. The call takes 10 µs, less than
    its launch, so it is timed with the host ahead of the device."""
    size = torch.cuda.get_device_properties(CUDA).L2_cache_size // 4
    source, target = torch.ones(size, dtype=torch.uint8, device=CUDA), torch.empty(size, dtype=torch.uint8, device=CUDA)

    def call(listener: Listener) -> None:
        with listener("copy"):
            target.copy_(source)

    times = {}
    for cache in get_args(Cache):
        timed = queued_times(call, CudaQueue(CUDA), cache, 30)
        assert not timed.waits_for_host
        times[cache] = timed.seconds["copy"]
    assert times["warm"] < 0.95 * times["cold"]


def test_a_launch_bound_call_gets_a_graph_and_a_large_one_does_not() -> None:
    """Each alone: behind a large one the host would be ahead with the small one too."""
    small, square = torch.ones(64, 64, device=CUDA), torch.randn(8192, 8192, device=CUDA, dtype=torch.bfloat16)

    def many() -> torch.Tensor:
        x = small
        for _ in range(60):
            x = x + 1
        return x

    ((first,), (second,)) = (measure_in_turns([call], CUDA, "cold", 2.0) for call in (many, lambda: square @ square))
    assert is_launch_bound(first)
    assert first.graph is not None
    assert median(first.graph.seconds) < median(first.sampled.seconds)
    assert not is_launch_bound(second)
    assert (second.graph, second.graph_gap) == (None, None)


def test_a_call_that_waits_for_the_device_has_no_graph_and_spoils_nothing() -> None:
    x = torch.arange(100.0, device=CUDA)
    reason = record_graph(lambda: x[: int(x.sum().item()) % 50], CUDA)
    assert isinstance(reason, str)
    assert "captur" in reason
    torch.cuda.synchronize()
    assert float(x.sum()) == 4950.0
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert bool(torch.randn(100, device=CUDA).isfinite().all())
    assert not isinstance(record_graph(lambda: x + 1, CUDA), str)


def with_delays(delay_s: float) -> Staged:
    """Kernels of about 0.1 and 1 ms, with a host that sleeps before each."""

    def call(listener: Listener) -> None:
        with listener("select"):
            for _ in range(3):
                time.sleep(delay_s)
                sleeping(200_000)
        with listener("attend"):
            time.sleep(delay_s)
            sleeping(2_000_000)

    return call


@pytest.mark.parametrize("cache", ["cold", "warm"])
def test_a_stage_takes_as_long_with_a_slow_host(cache: Cache) -> None:
    """Waits of 2 ms a launch would make 0.3 ms of the first stage 6.3."""
    quick, slow = (queued_times(with_delays(delay_s), CudaQueue(CUDA), cache, 5) for delay_s in (0.0, 2e-3))
    assert not quick.waits_for_host
    assert not slow.waits_for_host
    assert slow.seconds == pytest.approx(quick.seconds, rel=0.1)


def test_a_stage_that_waits_for_the_device_says_so() -> None:
    x = torch.arange(100.0, device=CUDA)
    assert queued_times(staged(lambda: x.sum().item(), lambda: x + 1), CudaQueue(CUDA), "cold", 3).waits_for_host


def test_the_stages_of_a_method_add_up_to_its_call() -> None:
    generator = torch.Generator(device=CUDA).manual_seed(0)
    q, k, v = (torch.randn(1, 16, 16384, 128, device=CUDA, dtype=torch.bfloat16, generator=generator) for _ in range(3))
    problem = Problem.of(q, k, v, causal=True, scale=None)
    method = create("pyramid:fastest", {"top_k": 64})
    chosen = method.select(q, k, problem)

    def whole(listener: Listener) -> None:
        with listener("whole"):
            method(q, k, v, problem)

    stages = staged(lambda: method.select(q, k, problem), lambda: method.attend(q, k, v, chosen, problem))
    parts, call = (queued_times(each, CudaQueue(CUDA), "cold", 9) for each in (stages, whole))
    assert not parts.waits_for_host
    assert parts.seconds["build"] + parts.seconds["route"] <= 1.02 * parts.seconds["select"]
    assert parts.seconds["select"] + parts.seconds["attend"] == pytest.approx(call.seconds["whole"], rel=0.1)


def test_the_first_call_of_a_batch_does_not_wait_for_the_host() -> None:
    """Batches of one call, each after a synchronise, take what calls in the middle of a batch take."""

    def call() -> None:
        sleeping(100_000)
        time.sleep(1e-3)
        sleeping(8_000_000)

    clock = clock_for(CUDA, "cold")
    together = clock.turns([call] * 6)[1:]
    alone = [clock.turns([call])[0] for _ in range(5)]
    assert median(alone) == pytest.approx(median(together), rel=0.05)
    assert CudaClock(CudaQueue(CUDA), "cold").turns([call])[0] > median(alone) + 0.5e-3


def test_the_device_is_held_for_as_long_as_asked() -> None:
    queue = CudaQueue(CUDA)
    assert queue.buffer.numel() >= 2 * torch.cuda.get_device_properties(CUDA).L2_cache_size
    queue.wait()
    start = queue.mark()
    queue.hold(5e-3)
    end = queue.mark()
    assert not end.query(), "handing it over takes less than doing it"
    queue.wait()
    assert 4e-3 < 1e-3 * start.elapsed_time(end) < 10e-3


def test_the_allocators_peak_is_exact_and_by_stage() -> None:
    """Of sizes that fit no hole between tensors that still live, such as a library's workspace: what lies in one is not taken
    from the device, and counts as held alone."""

    def held(gibibytes: float) -> torch.Tensor:
        return torch.empty(int(gibibytes * GIB), dtype=torch.uint8, device=CUDA)

    inputs = held(1)

    def attend(lists: torch.Tensor) -> torch.Tensor:
        held(1.5)
        return lists

    peaks = measure_peaks(lambda: held(0.5), attend, CUDA)
    assert peaks is not None
    assert peaks.stages == {"index": GIB // 2, "attend": 2 * GIB}
    assert peaks.held == 2 * GIB
    assert peaks.reserved is not None
    assert peaks.reserved >= peaks.held
    assert inputs.numel() == GIB


def test_nvml_tells_the_state_of_this_device() -> None:
    pytest.importorskip("pynvml")
    watch = watch_for(CUDA)
    if not isinstance(watch, NvmlWatch):
        pytest.skip(str(watch.gap))
    state = watch.read()
    assert state is not None
    assert state.sm_clock_hz is None or 1e8 < state.sm_clock_hz < 4e9
    assert state.temperature_c is None or 10 < state.temperature_c < 110
    assert state.power_w is None or 10 < state.power_w < 2000
