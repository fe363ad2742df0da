"""What NVML's answers become, on a binding that is made up."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from pyramidbench.nvml import REASONS, THROTTLING, DeviceState, NvmlWatch, Unwatched, watch_for


class Refused(Exception):
    """The driver has no answer."""


def binding(bits: int = 0, *, power: Callable[[Any], int] = lambda _: 412_345) -> Any:
    return SimpleNamespace(
        NVMLError=Refused,
        NVML_CLOCK_SM=1,
        NVML_TEMPERATURE_GPU=0,
        nvmlDeviceGetClockInfo=lambda handle, kind: {("gpu", 1): 1755}[handle, kind],
        nvmlDeviceGetPowerUsage=power,
        nvmlDeviceGetTemperature=lambda handle, kind: {("gpu", 0): 61}[handle, kind],
        nvmlDeviceGetCurrentClocksEventReasons=lambda _: bits,
    )


def test_a_reading_is_in_si_units() -> None:
    state = NvmlWatch(binding(), "gpu").read()
    assert state == DeviceState(1.755e9, 412.345, 61, frozenset())


@pytest.mark.parametrize(
    ("bits", "reasons", "throttled"),
    [
        (0x0, set(), False),
        (0x1, set(), False),
        (0x2, set(), False),
        (0x4, {"power cap"}, False),
        (0x48, {"hardware slowdown", "hardware thermal slowdown"}, True),
        (0x20, {"software thermal slowdown"}, True),
        (0x84, {"power brake", "power cap"}, True),
    ],
    ids=["none", "idle", "application clocks", "power cap", "hardware", "thermal", "brake"],
)
def test_what_holds_the_clock_back_is_named(bits: int, reasons: set[str], throttled: bool) -> None:
    state = NvmlWatch(binding(bits), "gpu").read()
    assert state is not None
    assert (state.reasons, state.throttled) == (reasons, throttled)


def test_the_bits_are_those_of_nvml() -> None:
    named = {
        "power cap": pynvml.nvmlClocksEventReasonSwPowerCap,
        "hardware slowdown": pynvml.nvmlClocksThrottleReasonHwSlowdown,
        "sync boost": pynvml.nvmlClocksEventReasonSyncBoost,
        "software thermal slowdown": pynvml.nvmlClocksEventReasonSwThermalSlowdown,
        "hardware thermal slowdown": pynvml.nvmlClocksThrottleReasonHwThermalSlowdown,
        "power brake": pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
        "display clocks": pynvml.nvmlClocksEventReasonDisplayClockSetting,
    }
    assert {text: bit for bit, text in REASONS.items()} == named
    assert set(REASONS.values()) >= THROTTLING


def test_what_a_driver_does_not_tell_is_missing_and_never_zero() -> None:
    def refuse(_: Any) -> int:
        raise Refused("not supported")

    state = NvmlWatch(binding(power=refuse), "gpu").read()
    assert state == DeviceState(1.755e9, None, 61, frozenset())


def test_the_worst_of_several_readings() -> None:
    states = [
        DeviceState(1.9e9, 300.0, 50.0, frozenset({"power cap"})),
        DeviceState(1.2e9, None, 80.0, frozenset({"hardware slowdown"})),
    ]
    assert DeviceState.worst(states) == DeviceState(1.2e9, 300.0, 80.0, frozenset({"power cap", "hardware slowdown"}))
    assert DeviceState.worst([DeviceState()]) == DeviceState()


def test_a_cpu_is_not_watched() -> None:
    watch = watch_for(torch.device("cpu"))
    assert isinstance(watch, Unwatched)
    assert (watch.gap, watch.read()) == (None, None)


def test_a_gpu_whose_driver_does_not_answer_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="0-1"))
    monkeypatch.setattr(pynvml, "nvmlInit", refuse)
    watch = watch_for(torch.device("cuda"))
    assert watch.gap is not None
    assert watch.gap.startswith("NVML does not answer: ")
    assert watch.read() is None
