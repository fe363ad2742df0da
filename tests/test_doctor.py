"""What the doctor finds, and that it advises where something is missing; the GPU is a fake NVML."""

from __future__ import annotations

import json
import os
import sys
from collections import namedtuple
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pyramidbench
from pyramidbench import cli, doctor, doctor_gpu
from pyramidbench.device import fingerprint
from pyramidbench.doctor import Finding, can_sweep, examine
from pyramidbench.doctor_gpu import GpuFinding, look_at_gpu, unseen_gpus
from pyramidbench.methods.dense import Dense
from pyramidbench.methods.flat import FlatTopK
from pyramidbench.nvml import NvmlWatch, Unwatched
from pyramidbench.registry import method_names, preset_names

Usage = namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyramidbench.device.PEAK_SECONDS", 1e-3)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.1, 0.1, 0.1))


def found(device: str = "cpu") -> Mapping[str, Finding]:
    return {finding.subject: finding for finding in examine(device)}


def test_a_sound_machine_is_fine() -> None:
    findings = found()
    assert can_sweep(list(findings.values()))
    assert {"device", "measured peaks", "free memory", "torch", "triton", "methods", "free disk here", "Python"} <= set(
        findings
    )
    assert {finding.state for finding in findings.values()} <= {"ok", "note"}
    assert "TFLOP/s (fp32 product)" in findings["measured peaks"].found
    assert "GB/s (copy)" in findings["measured peaks"].found
    assert "GiB" in findings["free memory"].found
    assert "a GPU ranks them differently" in findings["device"].advice
    presets = sum(len(preset_names(name)) for name in method_names())
    assert findings["methods"].found.endswith(f" of {presets} presets of {len(method_names())} methods")


def test_a_device_that_is_not_there_is_an_error_and_the_rest_is_looked_at() -> None:
    findings = found("tpu")
    assert findings["device"].state == "error"
    assert "accepted: auto, cpu, cuda" in findings["device"].found
    assert {"torch", "methods", "free disk here"} <= set(findings)
    assert not can_sweep(list(findings.values()))


def test_a_full_disk_is_an_error_and_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage(1 << 40, 1 << 40, 1 << 20))
    finding = found()["free disk here"]
    assert finding.state == "error"
    assert "1 GiB" in finding.advice


def test_little_memory_and_a_busy_machine_are_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "free_memory", lambda _: 1 << 20)
    monkeypatch.setattr(os, "getloadavg", lambda: (64.0, 1.0, 1.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    findings = found()
    assert findings["free memory"].state == findings["other processes"].state == "warning"
    assert findings["other processes"].found == "64.0 processes run on 2 cores, mean of a minute"
    assert "wait, or end them" in findings["other processes"].advice
    assert can_sweep(list(findings.values()))


def test_optional_packages_may_be_missing_and_torch_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed_version", lambda _: None)
    findings = found()
    assert findings["triton"].state == "ok"
    assert "transformers is not installed" in findings["extra hf"].found
    assert findings["extra hf"].advice == "optional: pip install 'pyramidbench[hf]'"
    assert "extra dev" not in findings
    assert findings["torch"].state == "error"
    assert findings["torch"].advice == "pip install torch"


def test_a_package_that_runs_from_a_folder_is_known_by_its_own_version(from_a_folder: None) -> None:  # noqa: ARG001
    findings = found()
    assert findings["pyramidbench"].found == pyramidbench.__version__
    assert findings["extras"].state == "note"
    assert "not installed" in findings["extras"].found


def test_methods_that_cannot_run_stand_with_their_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FlatTopK, "unavailable", lambda _: "needs the package nothing")
    monkeypatch.setattr(Dense, "unavailable", lambda method: "needs fa3" if method.kernel == "fa3" else None)
    findings = found()
    assert findings["dense:fa3"].advice == "needs fa3"
    (flat,) = [finding for finding in findings.values() if finding.advice == "needs the package nothing"]
    presets = [f"flat:{p}" for p in preset_names("flat") if p != "default"]
    assert flat.subject.split(", ") == ["flat", *presets, "flex"], "flex attends to the lists of flat"
    assert findings["methods"].state == "ok"
    for name in method_names():
        monkeypatch.setattr(type(doctor.create(name)), "unavailable", lambda _: "gone")
    assert found()["methods"].state == "error"


class FakeNvml:
    """NVML with one GPU: what it answers is set per test; a missing answer is NVML's own error."""

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0

    class NVMLError(Exception): ...

    def __init__(self, **answers: Any) -> None:
        usual = {
            "nvmlInit": None, "nvmlDeviceGetCount": 1, "nvmlSystemGetDriverVersion": "580.65.06",
            "nvmlSystemGetCudaDriverVersion": 13000, "nvmlDeviceGetComputeRunningProcesses": [],
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=0), "nvmlDeviceGetClockInfo": 1980,
            "nvmlDeviceGetMaxClockInfo": 1980, "nvmlDeviceGetPowerUsage": 120_000, "nvmlDeviceGetTemperature": 35,
            "nvmlDeviceGetCurrentClocksEventReasons": 0x1,
        }  # fmt: skip
        self.answers = usual | answers

    def __getattr__(self, name: str) -> Any:
        if name not in self.answers:
            raise AttributeError(name)

        def answer(*_: object) -> Any:
            value = self.answers[name]
            if value is FakeNvml.NVMLError:
                raise self.NVMLError
            return value

        return answer


def looked(**answers: Any) -> dict[str, GpuFinding]:
    return {finding.subject: finding for finding in look_at_gpu(NvmlWatch(FakeNvml(**answers), "gpu 0"))}


def test_an_idle_gpu_is_fine() -> None:
    findings = looked()
    assert all(finding.fine for finding in findings.values())
    assert findings["driver"].found == "580.65.06, up to CUDA 13.0"
    assert findings["other processes"].found == "none, the GPU is used 0 % now"
    assert findings["clock"].found == "1980 MHz now, 1980 MHz at most, 120 W, 35 °C"


def process(pid: int, held: int | None) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=held)


@pytest.mark.parametrize(
    ("answers", "subject", "told"),
    [
        ({"nvmlDeviceGetComputeRunningProcesses": [process(71, 3 << 30), process(72, None)]}, "other processes",
         "2 on the GPU (pid 71, 72) hold 3 GiB"),
        ({"nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=93)}, "other processes", "the GPU is used 93 % now"),
        ({"nvmlDeviceGetCurrentClocksEventReasons": 0x20, "nvmlDeviceGetClockInfo": 900}, "clock",
         "900 MHz now, 1980 MHz at most, 120 W, 35 °C, held back by: software thermal slowdown"),
    ],
    ids=["processes", "hidden use", "throttled"],
)  # fmt: skip
def test_what_disturbs_a_measurement_is_not_fine_and_has_advice(
    answers: dict[str, Any], subject: str, told: str
) -> None:
    finding = looked(**answers)[subject]
    assert not finding.fine
    assert finding.found == told
    assert finding.advice


def test_this_process_itself_disturbs_nothing() -> None:
    own = process(os.getpid(), 1 << 30)
    assert looked(nvmlDeviceGetComputeRunningProcesses=[own])["other processes"].fine


def test_what_a_device_does_not_tell_is_left_out() -> None:
    findings = looked(
        nvmlDeviceGetUtilizationRates=FakeNvml.NVMLError, nvmlDeviceGetPowerUsage=FakeNvml.NVMLError,
        nvmlSystemGetCudaDriverVersion=FakeNvml.NVMLError, nvmlSystemGetDriverVersion=b"535.1",
    )  # fmt: skip
    assert findings["other processes"].found == "none"
    assert findings["clock"].found == "1980 MHz now, 1980 MHz at most, 35 °C"
    assert findings["driver"].found == "535.1"


def test_a_silent_nvml_is_said() -> None:
    (finding,) = look_at_gpu(Unwatched("NVML does not answer: no driver"))
    assert (finding.fine, finding.found) == (False, "NVML does not answer: no driver")


def test_a_gpu_that_torch_does_not_see_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    assert "1 here, and torch" in found()["GPU"].found
    assert found()["GPU"].state == "warning"
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(nvmlInit=FakeNvml.NVMLError))
    assert unseen_gpus() is None


def test_a_gpu_is_looked_at_before_anything_runs_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's device faked: the order of what is asked, and what stands in the table."""
    asked: list[str] = []

    def fake(device: torch.device, *, peaks: bool) -> Any:  # noqa: ARG001
        asked.append("peaks")
        return fingerprint(torch.device("cpu"), peaks=True).model_copy(update={"name": "NVIDIA H200"})

    def watch(_: torch.device) -> NvmlWatch:
        asked.append("watch")
        return NvmlWatch(FakeNvml(), "gpu 0")

    monkeypatch.setattr(doctor, "pick_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(doctor, "fingerprint", fake)
    monkeypatch.setattr(doctor, "watch_for", watch)
    monkeypatch.setattr(doctor, "free_memory", lambda _: 100 << 30)
    monkeypatch.setattr("shutil.which", lambda _: None)
    findings = found("cuda")
    assert asked == ["watch", "peaks"]
    assert {"driver", "other processes", "clock", "C compiler"} <= set(findings)
    assert "(bf16 product)" in findings["measured peaks"].found
    assert findings["C compiler"].state == "warning"


@pytest.mark.parametrize(("device", "code"), [("cpu", 0), ("tpu", 6)])
def test_the_command_ends_with_0_only_if_a_sweep_can_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], device: str, code: int
) -> None:
    def run(*flags: str) -> str:
        monkeypatch.setattr(sys, "argv", ["pyramidbench", "doctor", "--device", device, *flags])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == code
        return capsys.readouterr().out

    findings = json.loads(run("--json"))
    table = run()
    for finding in findings:
        assert set(finding) == {"subject", "state", "found", "advice"}
        assert finding["subject"].split()[0] in table


def test_the_modules_that_are_faked_are_those_that_are_used() -> None:
    assert doctor.look_at_gpu is look_at_gpu
    assert doctor_gpu.NvmlWatch is NvmlWatch
