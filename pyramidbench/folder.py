"""Folders that a run is written into: where one goes by default, who may write it, and files that are never half written."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from pyramidbench.device import Device
from pyramidbench.errors import UserError


def run_folder(parent: Path, name: str, device: Device, cells: list[str]) -> Path:
    """Where a sweep goes by default: the newest folder of the same sweep on the same device, or a new one."""
    digest = hashlib.sha256("".join(cells).encode()).hexdigest()[:8]
    tail = f"-{name}-{device.slug}-{digest}"
    same = sorted(path for path in parent.glob(f"*{tail}") if (path / "manifest.json").is_file())
    return same[-1] if same else parent / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}{tail}"


def set_aside(folder: Path) -> Path | None:
    """Rename a run folder out of the way and return its new name; None where there is no run. Nothing is deleted.

    Raises:
        UserError: another process is writing the folder, or it cannot be renamed.
    """
    # A folder that is no run, such as a home directory named by mistake, must not be moved.
    if not any((folder / name).exists() for name in ("manifest.json", "cells.jsonl")):
        return None
    lock = locked(folder)
    lock.release()
    kept = folder.with_name(f"{folder.resolve().name}.before-{datetime.now(UTC):%Y%m%dT%H%M%S%fZ}")
    try:
        folder.rename(kept)
    except OSError as error:
        raise unwritable(folder, error) from None
    return kept


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file so that a crash or a full disk leaves the old one or the new one, never half of it."""
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as stream:
            stream.write(content.encode() if isinstance(content, str) else content)
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(path)
    except OSError:
        with suppress(OSError):
            part.unlink()  # it takes room on a full disk
        raise


def drop_torn_line(path: Path) -> None:
    """Cut a file of lines after its last whole one: a crash may have left half a line behind it."""
    if path.exists():
        data = path.read_bytes()
        with path.open("r+b") as stream:
            stream.truncate(data.rfind(b"\n") + 1)


def locked(folder: Path) -> FileLock:
    """Make the folder if need be, and take its lock.

    Raises:
        UserError: another process holds the lock, or the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock")
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(f"another process is writing '{folder}'. Wait for it, or give another --out.") from None
    except OSError as error:
        raise unwritable(folder, error) from None
    return lock


def full(folder: Path, error: OSError) -> UserError:
    """What to say when the disk refused a write to a folder that could be written before."""
    return UserError(
        f"cannot write to '{folder}': {error.strerror or error}. Free some space, then repeat the command."
    )


def unwritable(folder: Path, error: OSError) -> UserError:
    """What to say when a folder cannot be written at all."""
    return UserError(f"cannot write to '{folder}': {error.strerror or error}. Give another --out.")
