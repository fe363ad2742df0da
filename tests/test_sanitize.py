"""tests/gpu/sanitize.sh with a stand-in of compute-sanitizer: it checks only where a planted fault was found."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "gpu" / "sanitize.sh"
TOOL = """#!/bin/sh
case "$*" in
--help) echo "  --padding arg" ;;
*planted_fault.py*)
    echo "planted fault: {library} sanitizer's library is loaded"
    echo "$*" | grep -qE -- "{finds}" && exit 9
    echo "========= ERROR SUMMARY: 0 errors{says}"
    ;;
esac
exit 0
"""
PYTHON = """#!/bin/sh
echo "$*"
case "$*" in *{fails}*) exit 1 ;; esac
"""


def sanitized(
    folder: Path, finds: str, *, library: str = "a", says: str = "", fails: str = "nothing"
) -> subprocess.CompletedProcess[str]:
    texts = {
        "compute-sanitizer": TOOL.format(finds=finds, library=library, says=says),
        "python": PYTHON.format(fails=fails),
    }
    for name, text in texts.items():
        path = folder / name
        path.write_text(text)
        path.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHON": str(folder / "python")}
    return subprocess.run(["sh", str(SCRIPT)], capture_output=True, text=True, env=environment, check=False)


@pytest.mark.parametrize(
    ("finds", "said"),
    [
        pytest.param("next$", "the element behind a tensor was found", id="the nearest"),
        pytest.param("far$", "1 MiB behind a tensor was found", id="far alone"),
    ],
)
def test_a_fault_that_is_found_says_how_near(tmp_path: Path, finds: str, said: str) -> None:
    done = sanitized(tmp_path, finds)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
    checks = [line for line in done.stdout.splitlines() if "--under" in line]
    assert len(checks) == 4
    assert all("--target-processes all" in line for line in checks)
    assert all(("--padding" in line) is ("memcheck" in line) for line in checks)
    assert ("goes unseen" in done.stderr) is ("far" in finds)


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        pytest.param({}, 4, "nothing is checked", id="finds nothing"),
        pytest.param({"library": "no"}, 4, "has not loaded itself", id="is not there"),
        pytest.param({"says": " Device not supported"}, 3, "cannot see this device", id="another device"),
    ],
)
def test_without_a_fault_found_nothing_is_checked(
    tmp_path: Path, changes: dict[str, str], code: int, said: str
) -> None:
    done = sanitized(tmp_path, "never", **changes)
    assert done.returncode == code
    assert said in done.stderr
    assert "--under" not in done.stdout
    assert ("has not loaded itself" in done.stderr) is (changes.get("library") == "no")


def test_a_fault_in_a_kernel_is_the_exit_code(tmp_path: Path) -> None:
    assert sanitized(tmp_path, "next$", fails="racecheck").returncode == 1
    assert sanitized(tmp_path, "next$", fails="every_kernel.py").returncode == 1
