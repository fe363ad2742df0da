"""Nsight Compute: the command that collects hardware counters of one call, and running it.

By default the tool locks the device's clocks while it measures; here it must not, as no setting of a device is ever changed. It
replays each kernel several times and empties the caches before each, which is asked for by name: what a kernel finds in the
L2 otherwise depends on the replay before. It writes numbers as the user's language settings say (1.420,5 in German), so these
are set too.

Where it fails, its log and its streams share the reasons: "The application returned an error code (1)" may stand in the log
and, on stderr, why. Lines that begin with == are the tool's.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from pyramidbench.errors import UserError
from pyramidbench.profiling.counters import METRICS, read_counters, table_in

FAILED = "ncu-failed.txt"
PLACES = ("/usr/local/cuda/bin", "/opt/nvidia/nsight-compute")
"""Where the CUDA toolkit and the tool's own packages put it, which need not be on the PATH."""
DENIED = "does not have permission to access NVIDIA GPU Performance Counters"
RIGHTS = (
    "this user may not read the GPU's counters (ERR_NVGPUCTRPERM): they are for administrators, until one loads the driver "
    "with NVreg_RestrictProfilingToAdminUsers=0; a container needs the capability SYS_ADMIN besides"
)
CONSEQUENCES = ("The application returned an error code", "No kernels were profiled")
"""What the tool says of a run that failed for another reason, which it may have said elsewhere."""


def tool() -> str | None:
    """Where Nsight Compute is: on the PATH, or else the newest in its usual places; None where it is not."""
    toolkit, own = (Path(place) for place in PLACES)
    newest = sorted(own.glob("*/ncu"), key=lambda path: [int(part) for part in re.findall(r"\d+", path.parent.name)])
    found = [str(path) for path in (toolkit / "ncu", *reversed(newest)) if os.access(path, os.X_OK)]
    return shutil.which("ncu") or next(iter(found), None)


def command(program: Sequence[str], log: Path) -> list[str]:
    """The command that runs a program under Nsight Compute and writes the counters of the range that it opens to `log`."""
    options = [
        "--profile-from-start", "off", "--target-processes", "all", "--clock-control", "none", "--cache-control", "all",
        "--csv", "--print-units", "base", "--metrics", ",".join(METRICS),
    ]  # fmt: skip
    ours = ["env", "LC_ALL=C.UTF-8", tool() or "ncu", *options, "--log-file", str(log), "--force-overwrite"]
    return [*ours, *program]


def printed(program: Sequence[str], log: Path) -> str:
    """The command as one types it."""
    return shlex.join(command(program, log))


def collect(program: Sequence[str], log: Path, timeout_s: float = 600.0) -> str | None:
    """Run that command where the tool is installed; why there are no counters, or None.

    A run that fails (counters may need rights that the driver does not give to everybody) is an answer, and no error. Then
    `log` is not there, and all that was said lies beside it in a file FAILED.
    """
    if tool() is None:
        return "Nsight Compute (ncu) is not installed here"
    code, streams = _run(command(program, log), timeout_s)
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    reason = _failure(code, streams, text, timeout_s)
    if reason is None:
        return None
    log.unlink(missing_ok=True)
    said = log.with_name(FAILED)
    said.write_text(f"{streams}\n{text}", encoding="utf-8")
    return f"{reason} (all of it: {said})"


def _failure(code: int | None, streams: str, text: str, timeout_s: float) -> str | None:
    if code is None:
        return f"ncu gave nothing within {timeout_s:.0f} s"
    if code or not table_in(text):
        reason = _reason([*streams.splitlines(), *text.splitlines()])
        return f"ncu ended with {code} and no counters: {reason}"
    try:
        read_counters(text)
    except UserError as error:
        return f"ncu's counters cannot be read: {error}"
    return None


def _run(words: Sequence[str], timeout_s: float) -> tuple[int | None, str]:
    """Exit code (None: its time was over), and stdout and stderr together.

    In a process group of its own: ended early, the tool would leave its program running, which holds the device.
    """
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True
    ) as process:
        try:
            said, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return None, process.communicate()[0]
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        return process.returncode, said


def _reason(lines: Sequence[str]) -> str:
    """The most telling of all lines: the tool's errors, then the program's last words, then the tool's warnings."""
    if any(DENIED in line for line in lines):
        return RIGHTS
    said = [match.groups() for line in lines if (match := re.match(r"==(ERROR|WARNING)==\s*(.+)", line))]
    errors = [text for mark, text in said if mark == "ERROR"]
    causes = [text for text in errors if not text.startswith(CONSEQUENCES)]
    if causes:
        return causes[0]
    last = [line.strip() for line in lines if line.strip() and not line.startswith(("==", '"'))][-1:]
    if errors:
        return " ".join([errors[0], *last])
    return next((text for _, text in said if text.startswith(CONSEQUENCES)), said[0][1] if said else "no reason given")
