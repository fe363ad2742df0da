"""Packages that bring data: fetched whole, checked, and read without what they were made with."""

from __future__ import annotations

import dataclasses
import io
import struct
import subprocess
import tarfile
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest

from pyramidbench.errors import UserError
from pyramidbench.evaluation import carriers, novels
from pyramidbench.evaluation.carriers import AUSTEN, EVALS, Carrier, fetch, member
from pyramidbench.evaluation.request import fetch_data
from pyramidbench.model_files import file_sha256, silent


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYRAMIDBENCH_MODELS", str(tmp_path / "models"))
    return tmp_path / "models"


def served(monkeypatch: pytest.MonkeyPatch, archive: Path) -> None:
    """Let pip find one file, which it copies."""

    def download(_command: Any, cwd: Path, **_: Any) -> Any:
        (cwd / archive.name).write_bytes(archive.read_bytes())
        return subprocess.CompletedProcess([], 0, "", "")

    monkeypatch.setattr(carriers.subprocess, "run", download)


@pytest.mark.parametrize("ending", ["whl", "tar.gz"])
def test_members_are_kept_and_the_archive_is_not(
    tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    archive = tmp_path / f"data-1.{ending}"
    if ending == "whl":
        with zipfile.ZipFile(archive, "w") as wheel:
            wheel.writestr("sets/one/task.json", "[1]")
    else:
        with tarfile.open(archive, "w:gz") as tar:
            entry = tarfile.TarInfo("sets/one/task.json")
            entry.size = 3
            tar.addfile(entry, io.BytesIO(b"[1]"))
    carrier = Carrier("data", "1", "pip", file_sha256(archive), 1, "none", ("sets/one/task.json",))
    served(monkeypatch, archive)
    assert fetch(carrier, silent) == models / "data" / "data-1"
    assert member(carrier, "sets/one/task.json").read_text() == "[1]"
    assert [path.name for path in (models / "data").iterdir()] == ["data-1"]
    monkeypatch.setattr(carriers.subprocess, "run", None)
    fetch(carrier, silent)


def test_another_file_is_not_used(tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tmp_path / "evals-3.whl"
    archive.write_bytes(b"something else")
    served(monkeypatch, archive)
    with pytest.raises(UserError, match="expected 0abcb2051303"):
        fetch(EVALS, silent)
    assert list((models / "data").iterdir()) == []


def test_a_download_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "noise\nERROR: no network\n")
    monkeypatch.setattr(carriers.subprocess, "run", lambda *_args, **_others: failed)
    with pytest.raises(UserError, match=r"could not be downloaded \(ERROR: no network\)"):
        fetch(EVALS, silent)
    with pytest.raises(UserError, match="unknown package 'eval'"):
        fetch_data("eval", silent)


def test_novels_are_read_from_r_s_file() -> None:
    def vector(lines: list[str]) -> bytes:
        head = b"X\n" + struct.pack(">iii", 3, 262657, 197888) + struct.pack(">i", 5) + b"UTF-8"
        body = b"".join(struct.pack(">ii", 0x40009, len(line.encode())) + line.encode() for line in lines)
        raw = head + struct.pack(">ii", 16, len(lines)) + body
        return struct.pack(">I", len(raw)) + zlib.compress(raw)

    AUSTEN.folder.mkdir(parents=True)
    path = AUSTEN.folder / "data-Rdata.rdb"
    path.write_bytes(b"".join(vector([name.upper(), "", "It is, perhaps, “true”."]) for name in novels.NOVELS))
    assert novels.read_novel("emma").text == "EMMA\n\nIt is, perhaps, “true”."
    assert novels.read_novel("sense-and-sensibility").text.startswith("SENSE-AND-SENSIBILITY")
    path.write_bytes(vector(["one"]))
    with pytest.raises(UserError, match="does not hold the six novels"):
        novels.read_novel("emma")


def test_what_is_not_there_says_how_to_get_it() -> None:
    with pytest.raises(UserError, match=r"`pyramidbench evaluate --fetch evals` fetches evals 3.0.1.post1 \(46 MB\)"):
        member(EVALS, EVALS.members[0])
    assert dataclasses.replace(EVALS, version="4").folder != EVALS.folder
