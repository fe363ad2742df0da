"""What this machine can do, and what to change where it cannot: the findings of `pyramidbench doctor`."""

from __future__ import annotations

import shutil
from pathlib import Path

from pydantic import BaseModel

from pyramidbench.device import fingerprint, free_memory, installed_version, pick_device
from pyramidbench.errors import UserError
from pyramidbench.plugins import plugin_version
from pyramidbench.registry import all_names, create, hidden_names, preset_names
from pyramidbench.units import gibibytes

ENOUGH_DISK = 1 << 30


class Finding(BaseModel):
    """One thing looked at: whether it is as a sweep needs it, and what to do if not (or what follows)."""

    subject: str
    fine: bool
    found: str
    advice: str = ""


def examine(device: str = "auto") -> list[Finding]:
    """Look at device, packages, methods and disk; a sweep can run if every finding is fine."""
    return [*_device(device), *_packages(), _methods(), _disk()]


def _device(kind: str) -> list[Finding]:
    try:
        device = pick_device(kind)
    except UserError as error:
        return [Finding(subject="device", fine=False, found=str(error))]
    found = fingerprint(device, peaks=True)
    assert found.peak_flops_per_s is not None
    assert found.peak_bytes_per_s is not None
    rates = f"{found.peak_flops_per_s / 1e12:.3g} TFLOP/s, {found.peak_bytes_per_s / 1e9:.3g} GB/s"
    on_cpu = "times compare methods on this CPU only; a GPU ranks them differently" if device.type == "cpu" else ""
    return [
        Finding(subject="device", fine=True, found=found.name, advice=on_cpu),
        Finding(subject="measured peaks", fine=True, found=rates),
        Finding(subject="free memory", fine=True, found=gibibytes(free_memory(device))),
    ]


def _packages() -> list[Finding]:
    versions = {name: installed_version(name) for name in ("torch", "triton", "transformers")}
    hints = {
        "torch": "pip install torch",
        "triton": "not needed on a CPU",
        "transformers": "only `capture` needs it: pip install 'pyramidbench[hf]'",
    }
    return [
        Finding(
            subject=name, fine=name != "torch" or version is not None, found=version or "not installed",
            advice="" if version else hints[name],
        )
        for name, version in versions.items()
    ]  # fmt: skip


def _methods() -> Finding:
    missing = {name: create(name).unavailable() for name in all_names()}
    can = [name for name, reason in missing.items() if reason is None]
    specs = [f"{name}:{preset}" for name in can for preset in preset_names(name)]
    presets = sum(create(spec).unavailable() is None for spec in specs)
    absent = [name for name, reason in missing.items() if reason is not None]
    told = [f"not here: {', '.join(absent)} (`pyramidbench list methods` says why)"] if absent else []
    told += [f"method '{name}' of {plugin_version(name)} is hidden by pyramidbench's own" for name in hidden_names()]
    return Finding(
        subject="methods",
        fine=bool(can),
        found=f"{len(can)} of {len(missing)} available, {presets} presets",
        advice="; ".join(told),
    )


def _disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free
    return Finding(
        subject="free disk here", fine=free >= ENOUGH_DISK, found=gibibytes(free),
        advice="" if free >= ENOUGH_DISK else "a sweep wants 1 GiB; free some, or change the folder",
    )  # fmt: skip
