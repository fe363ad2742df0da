"""What this machine can do, and what to change where it cannot: the findings of `pyramidbench doctor`."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, Field

import pyramidbench
from pyramidbench.device import fingerprint, free_memory, installed_version, pick_device
from pyramidbench.doctor_gpu import GpuFinding, look_at_gpu, unseen_gpus
from pyramidbench.errors import UserError
from pyramidbench.nvml import watch_for
from pyramidbench.plugins import plugin_version
from pyramidbench.registry import all_names, create, hidden_names, preset_names
from pyramidbench.units import gibibytes, significant

ENOUGH_DISK = 1 << 30
ENOUGH_MEMORY = 1 << 30
COMPILERS = ("cc", "gcc", "clang")
State = Literal["ok", "note", "warning", "error"]


class Finding(BaseModel):
    """One thing looked at, and what to do about it."""

    subject: str
    state: State = Field(
        description="ok; note: something optional is not here; warning: a sweep runs, and its numbers are doubtful or its "
        "methods slow; error: no sweep can run"
    )
    found: str
    advice: str = Field(default="", description="what to do, or what follows")


def examine(device: str = "auto") -> list[Finding]:
    """Look at device, versions, methods and disk; a sweep can run if no finding is an error."""
    return [*_device(device), *_versions(device), *_extras(), *_methods(), _disk()]


def can_sweep(findings: list[Finding]) -> bool:
    """Whether nothing that was found stops a sweep."""
    return all(finding.state != "error" for finding in findings)


def _device(kind: str) -> Iterator[Finding]:
    try:
        device = pick_device(kind)
    except UserError as error:
        yield Finding(subject="device", state="error", found=str(error), advice="choose another --device, or see below")
        yield from _unseen()
        return
    if device.type == "cpu":
        yield from _unseen()
    # Other processes are looked for before this one puts anything on the GPU.
    watched = [_of_gpu(found) for found in look_at_gpu(watch_for(device))] if device.type == "cuda" else [_load()]
    found = fingerprint(device, peaks=True)
    assert found.peak_flops_per_s is not None
    assert found.peak_bytes_per_s is not None
    alone = "times compare methods on this CPU only; a GPU ranks them differently" if device.type == "cpu" else ""
    yield Finding(subject="device", state="ok", found=found.name, advice=alone)
    yield from watched
    product = "fp32" if device.type == "cpu" else "bf16"
    rates = f"{significant(found.peak_flops_per_s / 1e12)} TFLOP/s ({product} product), "
    yield Finding(
        subject="measured peaks", state="ok", found=f"{rates}{significant(found.peak_bytes_per_s / 1e9)} GB/s (copy)"
    )
    free = free_memory(device)
    scarce = free < ENOUGH_MEMORY
    yield Finding(
        subject="free memory", state="warning" if scarce else "ok", found=gibibytes(free),
        advice="long cells will be skipped; end what holds it" if scarce else "",
    )  # fmt: skip


def _unseen() -> Iterator[Finding]:
    found = unseen_gpus()
    if found is not None:
        yield _of_gpu(found)


def _of_gpu(found: GpuFinding) -> Finding:
    return Finding(
        subject=found.subject, state="ok" if found.fine else "warning", found=found.found, advice=found.advice
    )


def _load() -> Finding:
    """How much others use this CPU: a benchmark wants it alone."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    busy = load > 0.5 * cores
    return Finding(
        subject="other processes", state="warning" if busy else "ok",
        found=f"{load:.1f} processes run on {cores} cores, mean of a minute",
        advice="times will be too long and vary; wait, or end them" if busy else "",
    )  # fmt: skip


def _versions(kind: str) -> Iterator[Finding]:
    yield Finding(subject="pyramidbench", state="ok", found=pyramidbench.__version__)
    yield Finding(subject="Python", state="ok", found=platform.python_version())
    missing = installed_version("torch") is None
    cuda = f", CUDA {torch.version.cuda}" if torch.version.cuda else ", without CUDA"
    yield Finding(
        subject="torch", state="error" if missing else "ok", found="not installed" if missing else torch.__version__ + cuda,
        advice="pip install torch" if missing else "",
    )  # fmt: skip
    on_gpu = kind != "cpu" and torch.cuda.is_available()
    triton = installed_version("triton")
    yield Finding(
        subject="triton", state="warning" if on_gpu and triton is None else "ok", found=triton or "not installed",
        advice="" if triton else "methods run as plain torch: pip install triton" if on_gpu else "not needed on a CPU",
    )  # fmt: skip
    compiler = next((name for name in COMPILERS if shutil.which(name)), None)
    if on_gpu:
        yield Finding(
            subject="C compiler", state="ok" if compiler else "warning", found=compiler or "none",
            advice="" if compiler else "Triton builds its launchers with one: install gcc or clang",
        )  # fmt: skip


def _extras() -> Iterator[Finding]:
    """The optional packages of each extra, but that of developers."""
    packages: dict[str, list[str]] = defaultdict(list)
    try:
        requirements = importlib.metadata.requires("pyramidbench") or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding(
            subject="extras", state="note", found="unknown: the package runs from a folder and is not installed",
            advice="pip install . tells which optional packages it could use",
        )  # fmt: skip
        return
    for requirement in requirements:
        named = re.search(r"extra == ['\"]([\w-]+)['\"]", requirement)
        if named and named[1] != "dev":
            packages[named[1]].append(re.split(r"[<>=!~;\[ (]", requirement, maxsplit=1)[0])
    for extra, names in sorted(packages.items()):
        versions = {name: installed_version(name) for name in names}
        missing = [name for name, version in versions.items() if version is None]
        yield Finding(
            subject=f"extra {extra}", state="note" if missing else "ok",
            found=", ".join(f"{name} {version or 'is not installed'}" for name, version in versions.items()),
            advice=f"optional: pip install 'pyramidbench[{extra}]'" if missing else "",
        )  # fmt: skip


def _methods() -> Iterator[Finding]:
    """How many methods and presets can run here, and for each reason why some cannot, which."""
    specs = [f"{name}:{preset}" for name in all_names() for preset in preset_names(name)]
    lacking: dict[str, list[str]] = defaultdict(list)
    for spec in specs:
        if why := create(spec).unavailable():
            lacking[why].append(spec.removesuffix(":default"))
    able = len(specs) - sum(map(len, lacking.values()))
    found = f"{able} of {len(specs)} presets of {len(all_names())} methods"
    advice = "" if able else "what each needs stands below"
    yield Finding(subject="methods", state="ok" if able else "error", found=found, advice=advice)
    for reason, names in lacking.items():
        yield Finding(subject=", ".join(names), state="note", found="cannot run here", advice=reason)
    for name in hidden_names():
        hidden = f"that of {plugin_version(name)} is hidden by pyramidbench's own of this name"
        yield Finding(subject=name, state="note", found=hidden, advice="rename its entry point")


def _disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free
    enough = free >= ENOUGH_DISK
    return Finding(
        subject="free disk here", state="ok" if enough else "error", found=gibibytes(free),
        advice="" if enough else "a sweep wants 1 GiB; free some, or change the folder",
    )  # fmt: skip
