"""The scripts of a visit to a GPU, as far as a CPU can tell: what they run in which order, and wheels that come in pieces."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent / "gpu"


def called(script: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    command = ["sh", str(SCRIPTS / script), *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.mark.parametrize("script", ["everything.sh", "pack.sh", "prepare.sh"])
def test_each_says_how_it_is_called(script: str) -> None:
    answer = called(script)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert answer.stderr.startswith("usage: ")


@pytest.mark.parametrize(("script", "kind"), [("everything.sh", "part"), ("pack.sh", "group")])
def test_an_unknown_word_is_said_before_anything_runs(script: str, kind: str, tmp_path: Path) -> None:
    answer = called(script, str(tmp_path / "out"), "tset", PYTHON="/nowhere/python")
    assert answer.returncode == 2
    assert f"unknown {kind} 'tset'; there are: " in answer.stderr


def asked(folder: Path, *parts: str, **variables: str) -> list[str]:
    """What the script asks of Python, without the tests' options, in order."""
    log, python = folder / "log", folder / "python"
    python.write_text(f'#!/bin/sh\necho "$*" >>"{log}"\n')
    python.chmod(0o755)
    done = called("everything.sh", str(folder / "out"), *parts, PYTHON=str(python), **variables)
    assert done.returncode == 0, done.stderr
    return log.read_text().replace(f"{SCRIPTS}/", "").replace(f"{folder}/", "").splitlines()


def test_parts_run_alone_and_in_the_order_given(tmp_path: Path) -> None:
    lines = asked(tmp_path, "decode", "training", TIMING="50ms")
    assert lines == [
        f"-m pyramidbench sweep {name} --timing 50ms --json --out out/{name}" for name in ("decode", "training")
    ]


def test_what_times_waits_until_nothing_compiles(tmp_path: Path) -> None:
    lines = asked(tmp_path, "compile", "alone", SUITES="decode upstream", JOBS="3")
    assert lines[0].startswith("bench_prefill.py")
    assert lines[1:3] == ["compile_steps.py decode --jobs 3", "compile_suite.py upstream --jobs 3"]
    assert "-m gpu and alone" in lines[3]
    assert len(lines) == 4


def test_all_of_it_holds_every_suite_of_a_gpu(tmp_path: Path) -> None:
    lines = asked(tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}")
    swept = [line.split()[3] for line in lines if line.startswith("-m pyramidbench sweep")]
    assert swept == ["prefill", "training", "training_tokens", "decode", "upstream"]


def test_a_wheel_in_pieces_is_joined_when_all_are_there(tmp_path: Path) -> None:
    wheels, name = tmp_path / "wheels", "apart-1.0-py3-none-any.whl"
    for number, piece in enumerate(halves(tmp_path / name)):
        folder = wheels / f"apart-{number}"
        folder.mkdir(parents=True)
        (folder / f"{name}.{number}").write_bytes(piece)
    total = hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
    (wheels / "apart-0" / f"{name}.sha256").write_text(f"{total}  {name}\n")
    whole = called("prepare.sh", str(wheels), str(tmp_path / "whole"), PYTHON=sys.executable)
    assert whole.returncode == 0, whole.stderr
    assert f"{tmp_path}/whole/site" in whole.stdout
    assert (tmp_path / "whole" / "site" / "apart.py").read_text() == "HERE = True\n"

    (wheels / "apart-1" / f"{name}.1").unlink()
    part = called("prepare.sh", str(wheels), str(tmp_path / "part"), PYTHON=sys.executable)
    assert f"pieces of {name} are missing, so it is not installed" in part.stderr
    assert "no wheels in" in part.stderr
    assert part.returncode == 2


def halves(wheel: Path) -> tuple[bytes, bytes]:
    """The bytes of the least wheel that pip installs, in two pieces."""
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("apart.py", "HERE = True\n")
        file.writestr("apart-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: apart\nVersion: 1.0\n")
        file.writestr("apart-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr("apart-1.0.dist-info/RECORD", "apart.py,,\n")
    data = wheel.read_bytes()
    return data[:100], data[100:]
