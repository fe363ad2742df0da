"""Runs the kernel tests on the CPU: Triton decides at import whether it interprets, so they get a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = sorted(file for file in HERE.glob("test_*.py") if file.name != Path(__file__).name)


# Each test in that process has the usual limit for itself; all of them together took more than it on a busy machine.
@pytest.mark.timeout(3600)
@pytest.mark.minutes
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this process is the interpreter's own")
def test_kernels_in_the_interpreter() -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "not gpu",
        "-p",
        "no:cacheprovider",
        *map(str, FILES),
    ]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout, done.stdout
