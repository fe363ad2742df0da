"""What the doctor finds, and that it advises where something is missing."""

from __future__ import annotations

import json
import sys
from collections import namedtuple
from collections.abc import Mapping

import pytest

from pyramidbench import cli, doctor
from pyramidbench.doctor import Finding, examine
from pyramidbench.methods.flat import FlatTopK
from pyramidbench.registry import create, method_names

Usage = namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyramidbench.device.PEAK_SECONDS", 1e-3)


def found(device: str = "cpu") -> Mapping[str, Finding]:
    return {finding.subject: finding for finding in examine(device)}


def test_a_sound_machine_is_fine() -> None:
    findings = found()
    assert all(finding.fine for finding in findings.values())
    assert {"device", "measured peaks", "free memory", "torch", "triton", "methods", "free disk here"} <= set(findings)
    assert "TFLOP/s" in findings["measured peaks"].found
    assert "GB/s" in findings["measured peaks"].found
    assert "GiB" in findings["free memory"].found
    assert "a GPU ranks them differently" in findings["device"].advice
    here = [name for name in method_names() if create(name).unavailable() is None]
    assert findings["methods"].found.startswith(f"{len(here)} of {len(method_names())} available")
    assert all(name in findings["methods"].advice for name in set(method_names()) - set(here))


def test_a_device_that_is_not_there_is_not_fine() -> None:
    finding = found("tpu")["device"]
    assert not finding.fine
    assert "accepted: auto, cpu, cuda" in finding.found


def test_a_full_disk_is_not_fine_and_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage(1 << 40, 1 << 40, 1 << 20))
    finding = found()["free disk here"]
    assert not finding.fine
    assert "1 GiB" in finding.advice


def test_optional_packages_may_be_missing_and_torch_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed_version", lambda _: None)
    findings = found()
    assert findings["triton"].fine
    assert findings["transformers"].fine
    assert "pyramidbench[hf]" in findings["transformers"].advice
    assert not findings["torch"].fine
    assert findings["torch"].advice == "pip install torch"


def test_a_method_that_cannot_run_is_named_and_where_its_reason_is(monkeypatch: pytest.MonkeyPatch) -> None:
    before = found()["methods"]
    monkeypatch.setattr(FlatTopK, "unavailable", lambda _: "needs the package nothing")
    finding = found()["methods"]
    assert finding.fine
    assert ", flat" not in before.advice
    assert ", flat" in finding.advice
    assert "`pyramidbench list methods` says why" in finding.advice


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
        assert set(finding) == {"subject", "fine", "found", "advice"}
        assert finding["subject"].split()[0] in table
