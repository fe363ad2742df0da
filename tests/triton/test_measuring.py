"""Clock, graphs, memory and NVML on a real device: what the fake ones of other tests stand for."""

from __future__ import annotations

from statistics import median

import pytest
import torch

from pyramidbench.clock import clock_for
from pyramidbench.graphs import record_graph
from pyramidbench.memory import measure_peaks
from pyramidbench.nvml import NvmlWatch, watch_for
from pyramidbench.sampling import sample_in_turns
from pyramidbench.timing import is_launch_bound, measure_in_turns

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA = torch.device("cuda")
MIB = 1 << 20


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
    """Half the L2, read again and again: from L2 it comes faster than from memory."""
    held = torch.ones(torch.cuda.get_device_properties(CUDA).L2_cache_size // 2, dtype=torch.uint8, device=CUDA)
    target = torch.empty_like(held[: held.numel() // 2])
    source = held[: target.numel()]
    times = {}
    for cache in ("cold", "warm"):
        (sampled,) = sample_in_turns([lambda: target.copy_(source)], clock_for(CUDA, cache), 2.0)
        times[cache] = median(sampled.seconds)
    assert times["warm"] < 0.95 * times["cold"]


def test_a_launch_bound_call_gets_a_graph_and_a_large_one_does_not() -> None:
    small, square = torch.ones(64, 64, device=CUDA), torch.randn(8192, 8192, device=CUDA, dtype=torch.bfloat16)

    def many() -> torch.Tensor:
        x = small
        for _ in range(20):
            x = x + 1
        return x

    first, second = measure_in_turns([many, lambda: square @ square], CUDA, "cold", 2.0)
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


def test_the_allocators_peak_is_exact_and_by_stage() -> None:
    def held(mebibytes: int) -> torch.Tensor:
        return torch.empty(mebibytes * MIB, dtype=torch.uint8, device=CUDA)

    inputs = held(64)

    def attend(lists: torch.Tensor) -> torch.Tensor:
        held(96)
        return lists

    peaks = measure_peaks(lambda: held(32), attend, CUDA)
    assert peaks is not None
    assert peaks.stages == {"index": 32 * MIB, "attend": (32 + 96) * MIB}
    assert peaks.held == 128 * MIB
    assert peaks.reserved is not None
    assert peaks.reserved >= peaks.held
    assert inputs.numel() == 64 * MIB


def test_nvml_tells_the_state_of_this_device() -> None:
    watch = watch_for(CUDA)
    if not isinstance(watch, NvmlWatch):
        pytest.skip(str(watch.gap))
    state = watch.read()
    assert state is not None
    assert state.sm_clock_hz is None or 1e8 < state.sm_clock_hz < 4e9
    assert state.temperature_c is None or 10 < state.temperature_c < 110
    assert state.power_w is None or 10 < state.power_w < 2000
