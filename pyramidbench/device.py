"""The device: what it is, as every result must say, and what it can do, measured here and now."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, Field

from pyramidbench.errors import UserError

PEAK_SECONDS = 0.15
"""Time spent on each peak: long enough for a median of several runs on two cores, short enough for every start."""


class Device(BaseModel):
    """Fingerprint of the machine that measured: stored as device.json in every run."""

    model_config = ConfigDict(frozen=True)

    kind: str = Field(description="cpu or cuda")
    name: str = Field(description="the device's own name; of a merged run, all of them")
    memory_bytes: int | None = Field(description="a GPU's memory, or main memory that was free")
    threads: int | None = Field(description="CPU threads that torch used")
    system: str = Field(description="operating system")
    python: str = Field(description="version of Python")
    torch: str = Field(description="version of torch")
    triton: str | None = Field(description="version of Triton")
    cuda: str | None = Field(description="version of CUDA that torch was built with; null on a CPU")
    capability: str | None = Field(description="CUDA compute capability; null on a CPU")
    peak_flops_per_s: float | None = Field(
        default=None,
        description="operations per second of a large product at the start, bf16 on a GPU and fp32 on a CPU",
    )
    peak_bytes_per_s: float | None = Field(
        default=None, description="bytes per second of a large copy, measured at the start"
    )

    @property
    def slug(self) -> str:
        """The name as it stands in the name of a run's folder."""
        return "-".join(slug_of(self.name).split("-")[:4])


def slug_of(name: str) -> str:
    """A device's name as it stands in file names."""
    return "-".join("".join(letter if letter.isalnum() else " " for letter in name.lower()).split())


def pick_device(kind: str) -> torch.device:
    """The torch device for "auto", "cpu" or "cuda".

    Raises:
        UserError: another word, or a CUDA device asked for where there is none.
    """
    if kind not in ("auto", "cpu", "cuda"):
        raise UserError(f"device '{kind}' is not known; accepted: auto, cpu, cuda.")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError("device 'cuda' was asked for, and torch sees none here; use --device cpu, or check the driver.")
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def fingerprint(device: torch.device, *, peaks: bool) -> Device:
    """Describe a device; with `peaks`, also time a large matrix product and a large copy on it (a second at most)."""
    flops, bandwidth = measured_peaks(device) if peaks else (None, None)
    on_gpu = device.type == "cuda"
    properties = torch.cuda.get_device_properties(device) if on_gpu else None
    return Device(
        kind=device.type,
        name=properties.name if properties else _processor(),
        memory_bytes=properties.total_memory if properties else _available_memory(),
        threads=torch.get_num_threads(),
        system=platform.platform(),
        python=platform.python_version(),
        torch=torch.__version__,
        triton=installed_version("triton"),
        cuda=torch.version.cuda if on_gpu else None,
        capability=f"{properties.major}.{properties.minor}" if properties else None,
        peak_flops_per_s=flops,
        peak_bytes_per_s=bandwidth,
    )


def measured_peaks(device: torch.device) -> tuple[float, float]:
    """Operations per second of a large matrix product (bf16 on a GPU, fp32 on a CPU), and bytes per second of a copy."""
    on_gpu = device.type == "cuda"
    size, dtype = (8192, torch.bfloat16) if on_gpu else (1024, torch.float32)
    generator = torch.Generator(device=device).manual_seed(0)
    a = torch.randn(size, size, dtype=dtype, device=device, generator=generator)
    b = torch.randn(size, size, dtype=dtype, device=device, generator=generator)
    product = _best_seconds(lambda: a @ b, device)
    source = torch.randn((1 << 30) // 4 if on_gpu else 1 << 24, device=device, generator=generator)
    target = torch.empty_like(source)
    copy = _best_seconds(lambda: target.copy_(source), device)
    return 2.0 * size**3 / product, 2.0 * source.numel() * source.itemsize / copy


def free_memory(device: torch.device) -> int:
    """Bytes that a call may take now."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return _available_memory()


def release_cached(device: torch.device) -> None:
    """Give back what the CUDA allocator holds and nobody uses. What comes next would else be carved out of what some larger
    tensor left, and the rest of that place could not be given back as long as it lives: ten caches of 4 GB, each in a place of
    the gate's, took 135 GB."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def synchronize(device: torch.device) -> None:
    """Wait until all work given to the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def installed_version(package: str) -> str | None:
    """Version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _best_seconds(call: Callable[[], object], device: torch.device) -> float:
    call()
    synchronize(device)
    best, spent = float("inf"), 0.0
    while spent < PEAK_SECONDS:
        start = time.perf_counter()
        call()
        synchronize(device)
        took = time.perf_counter() - start
        best, spent = min(best, took), spent + took
    return best


def _processor() -> str:
    """The processor's own name, with the number of cores in use."""
    name = platform.processor() or platform.machine()
    information = Path("/proc/cpuinfo")
    if information.exists():
        lines = information.read_text().splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    return f"{name}, {torch.get_num_threads()} threads"


def _available_memory() -> int:
    """Free main memory in bytes: what Linux calls available, half of everything elsewhere."""
    information = Path("/proc/meminfo")
    if information.exists():
        lines = information.read_text().splitlines()
        available = next((line for line in lines if line.startswith("MemAvailable")), None)
        if available is not None:
            return int(available.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
