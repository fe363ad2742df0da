"""Nsight Compute: its command, its CSV in the format that it writes, and its figures in a profile's rows."""

from __future__ import annotations

import csv
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyramidbench.device import Device
from pyramidbench.errors import UserError
from pyramidbench.profiling import ncu
from pyramidbench.profiling.counters import METRICS, joined, read_counters
from pyramidbench.profiling.ncu import FAILED, RIGHTS, collect, command, printed, tool
from pyramidbench.profiling.rows import KernelRow, short_name

TEXT = (Path(__file__).parent / "fixtures" / "ncu.csv").read_text()
H200 = (Path(__file__).parent / "fixtures" / "ncu-h200.csv").read_text()
RAW = (Path(__file__).parent / "fixtures" / "ncu-raw.csv").read_text()
LONG_HEADER = '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'
DEVICE = Device(
    kind="cuda", name="H200", memory_bytes=1, threads=1, system="", python="", torch="", triton=None, cuda="13.0",
    capability="9.0", peak_flops_per_s=1e15, peak_bytes_per_s=4e12,
)  # fmt: skip


def kernel(name: str, path: str = "route", **columns: Any) -> KernelRow:
    return KernelRow(
        **({"name": name, "path": path, "launches": 1, "time_s": 1e-3, "bytes": 5.0, "source": "arguments"} | columns)
    )


def test_counters_are_read_in_si() -> None:
    walk, attend, fill = read_counters(TEXT)
    assert (walk.name, walk.launches) == ("_walk", 1)
    assert walk.values == {
        "bytes": 67108864 + 1048576, "l2_bytes": 268435456, "sm_share": pytest.approx(0.412),
        "tensor_share": pytest.approx(0.035), "occupancy": pytest.approx(0.1875), "registers": 168,
        "counted_s": pytest.approx(240e-6),
    }  # fmt: skip
    assert (attend.name, attend.launches) == ("_attend_rows", 2)
    assert attend.values["bytes"] == pytest.approx(450e6)
    assert attend.values["occupancy"] == pytest.approx((1 * 0.5 + 3 * 0.7) / 4), "weighted by the launches' times"
    assert "bytes" not in fill.values, "what the device does not tell is missing, not 0"


def test_figures_stand_in_the_rows_of_their_kernels() -> None:
    rows = [
        kernel("_walk", flops=1e9), kernel("_attend_rows", "attend", launches=2), kernel("_pool", "build"), kernel("_walk2")
    ]  # fmt: skip
    walk, attend, pool, other = joined(rows, read_counters(TEXT), DEVICE)
    assert (walk.bytes, walk.registers, walk.source) == (68157440, 168, "ncu")
    assert walk.bytes_per_s == pytest.approx(68157440 / 240e-6), "in the time in which they were counted"
    assert walk.roof_share == pytest.approx(68157440 / 4e12 / 240e-6)
    assert walk.flops_per_s == pytest.approx(1e9 / 1e-3), "operations are the formula's, in the time of the trace"
    assert attend.bytes == pytest.approx(450e6)
    assert attend.registers is None
    assert pool == rows[2]
    assert other == rows[3]


@pytest.mark.parametrize(
    "rows",
    [
        (kernel("_walk", "route"), kernel("_walk", "backward")),
        (kernel("_attend_rows", "attend", launches=1),),
        (kernel("void at::native::copy<4, F>(F)"),),
    ],
    ids=["of two stages", "of another number of launches", "of several instances"],
)
def test_a_kernel_that_cannot_be_told_keeps_its_estimates(rows: tuple[KernelRow, ...]) -> None:
    line = '"{}","void at::native::copy<(int){}, F>(T2)","lts__t_bytes.sum","byte","1,000"'
    instances = "\n".join([LONG_HEADER, line.format(0, 4), line.format(1, 8)])
    known = [*read_counters(TEXT), *read_counters(instances)]
    assert len(known) == 5
    assert joined(rows, known, DEVICE) == rows


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("_walk", "_walk"),
        ("void at::native::fill_kernel<4, F, A<char*, 1>>(int, F, A)", "at::native::fill_kernel"),
        ("void foo(int)", "foo"),
        ("void at::native::(anonymous namespace)::cat<float, 4>(float*)", "at::native::cat"),
        ("void at::native::<unnamed>::cat<float, 4>(float*)", "at::native::cat"),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD"),
    ],
)  # fmt: skip
def test_names_of_two_tools_agree(name: str, short: str) -> None:
    assert short_name(name) == short


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "it says: nothing"),
        (
            "==ERROR== The user does not have permission to access NVIDIA GPU Performance Counters",
            "does not have permission",
        ),
        ('"ID","Kernel Name","Metric Name","Metric Value"\n', "it says: nothing"),
        ('"ID","Kernel Name","Metric Name","Metric Value"\n"0","k","m","1"\n', "lacks the column 'Metric Unit'"),
        (f'{LONG_HEADER}\n"0","k","lts__t_bytes.sum","furlong","1"\n', "'1' in 'furlong' of lts__t_bytes.sum"),
        (f'{LONG_HEADER}\n"0","k","lts__t_bytes.sum","byte","many"\n', "'many' in 'byte'"),
        (f'{LONG_HEADER}\n"0","k","gpu__time_duration.sum","ns","1.420.832"\n', "'1.420.832' in 'ns'"),
        (f'{LONG_HEADER}\n"0","k","sm__throughput.avg.pct_of_peak_sustained_elapsed","%","22,60"\n', "'22,60' in '%'"),
        (f'{LONG_HEADER}\n"0","k","Duration","nsecond","1420832"\n', "no value of the metrics that are read"),
        (f'{LONG_HEADER}\n"0","k","lts__t_b', "no value of the metrics that are read"),
    ],
    ids=["nothing", "no rights", "a header alone", "a column less", "unit", "value", "German thousands", "German decimals",
         "labels, as --import prints", "cut off"],
)  # fmt: skip
def test_what_is_no_table_of_counters_is_refused(text: str, told: str) -> None:
    with pytest.raises(UserError) as refused:
        read_counters(text)
    assert told in str(refused.value)


def test_the_command_collects_what_is_read(tmp_path: Path) -> None:
    words = command(["python", "-m", "x y"], tmp_path / "ncu.csv")
    asked = set(words[words.index("--metrics") + 1].split(","))
    assert set(METRICS) == asked
    assert shlex.split(printed(["python", "-m", "x y"], tmp_path / "ncu.csv")) == words


def test_no_setting_of_the_device_is_changed_and_every_process_is_seen(tmp_path: Path) -> None:
    words = command(["python"], tmp_path / "ncu.csv")
    for option, value in (("--clock-control", "none"), ("--cache-control", "all"), ("--target-processes", "all")):
        assert words[words.index(option) + 1] == value


def as_raw_page(text: str) -> str:
    """The same counters in the form of --page raw: a column for each metric, and a row of units."""
    lines = text.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith('"ID"'))
    cells: dict[tuple[str, str], dict[str, str]] = {}
    units: dict[str, str] = {}
    for row in csv.DictReader(lines[start:]):
        cells.setdefault((row["ID"], row["Kernel Name"]), {})[row["Metric Name"]] = row["Metric Value"]
        units.setdefault(row["Metric Name"], row["Metric Unit"])
    table = [["ID", "Kernel Name", *units], ["", "", *units.values()]]
    table += [[*key, *(found.get(name, "n/a") for name in units)] for key, found in cells.items()]
    rows = [",".join(f'"{cell}"' for cell in row) for row in table]
    return "\n".join([*lines[:start], *rows, "==PROF== Disconnected from process 4711"])


def test_the_raw_page_says_the_same() -> None:
    """Of the kernels whose launches have one unit for a metric, as on a page they must."""
    raw, long = read_counters(as_raw_page(TEXT)), read_counters(TEXT)
    assert [(found.name, found.launches) for found in raw] == [(found.name, found.launches) for found in long]
    assert (raw[0], raw[2]) == (long[0], long[2])
    assert raw[0].values


def test_what_the_tool_wrote_on_a_gpu_stands_in_the_rows() -> None:
    """An excerpt of what `profile --ncu` left on an H200."""
    rows = joined([kernel("_build_base", "build"), kernel("_descend", launches=2)], read_counters(H200), DEVICE)
    build, descend = rows
    assert (build.bytes, build.counted_s, build.registers) == (279_386_112, pytest.approx(90.368e-6), 125)
    assert (build.sm_share, build.tensor_share) == (pytest.approx(0.4898), pytest.approx(0.0001))
    assert (descend.bytes, descend.l2_bytes, descend.registers) == (28_380_416, 67_213_824, 72)
    assert type(build.registers) is int, "as its column says"
    assert '"registers":125}' in build.model_dump_json()


def test_a_raw_page_of_the_tool_is_read() -> None:
    """The form of Nsight Compute 2024.1 with --page raw: no separators, times spelled out, a launch without the
    L2's metric, an instance of a template, and the lines of the tool around it."""
    walk, copy = read_counters(RAW)
    assert (walk.name, walk.launches, copy.launches) == ("_walk", 2, 1)
    assert walk.values["counted_s"] == pytest.approx((1_420_832 + 1_400_000) * 1e-9)
    assert walk.values["bytes"] == 268457472 + 265940992 + 268457472 + 265940992
    assert walk.values["sm_share"] == pytest.approx(0.226)
    assert "l2_bytes" not in copy.values
    assert short_name(copy.name) == "at::native::vectorized_elementwise_kernel"


def test_the_table_of_a_second_process_goes_on_in_the_first() -> None:
    lines = RAW.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith('"ID"'))
    assert read_counters("\n".join([*lines[:-1], lines[start], *lines[-1:]])) == read_counters(RAW)


def test_values_that_are_not_read_may_have_any_unit() -> None:
    rows = '"0","k","smsp__cycles_active.avg","cycle","12"\n"0","k","","",""\n"0","k","lts__t_bytes.sum","byte","7"'
    (found,) = read_counters(f"{LONG_HEADER}\n{rows}")
    assert found.values == {"l2_bytes": 7}


def test_a_raw_page_without_units_is_refused() -> None:
    lines = as_raw_page(TEXT).splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith('"ID"'))
    with pytest.raises(UserError, match="lacks the row of units"):
        read_counters("\n".join([*lines[: start + 1], *lines[start + 2 :]]))


@pytest.mark.parametrize("value", ["n/a", "(!) n/a", "nan", "(!) nan", "inf", ""])
def test_a_value_that_is_none_is_missing(value: str) -> None:
    line = f'"0","k","lts__t_bytes.sum","byte","{value}"\n"0","k","dram__bytes_read.sum","byte","1,000"\n'
    (found,) = read_counters('"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n' + line)
    assert "l2_bytes" not in found.values


DENIED = (
    "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters on the target "
    "device 0. For instructions on enabling permissions and to get more information see ...\n"
)
RETURNED = "==ERROR== The application returned an error code (1).\n"
NO_KERNELS = "==WARNING== No kernels were profiled.\n"
NCU = """#!{python}
import sys
from pathlib import Path
arguments = sys.argv[1:]
Path(arguments[arguments.index("--log-file") + 1]).write_text({text!r})
print({said!r}, end="", file=sys.stderr)
sys.exit({code})
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Puts a program called ncu first on the PATH, and nothing of this machine in its usual places."""
    found = folder / "bin" / "ncu"
    found.parent.mkdir()
    found.write_text(script)
    found.chmod(0o755)
    monkeypatch.setenv("PATH", str(found.parent), prepend=os.pathsep)
    monkeypatch.setattr(ncu, "PLACES", (str(folder / "toolkit"), str(folder / "own")))


@pytest.mark.parametrize("text", [TEXT, RAW], ids=["long", "raw"])
def test_it_runs_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    install(tmp_path, monkeypatch, NCU.format(python=sys.executable, text=text, said="", code=0))
    assert collect(["true"], tmp_path / "ncu.csv") is None
    assert (tmp_path / "ncu.csv").read_text() == text


@pytest.mark.parametrize(
    ("text", "said", "code", "told"),
    [
        (DENIED + NO_KERNELS, "", 1, f"ncu ended with 1 and no counters: {RIGHTS}"),
        (DENIED, "", 0, f"ncu ended with 0 and no counters: {RIGHTS}"),
        (
            RETURNED + NO_KERNELS,
            "==ERROR== Nsight Compute failed to connect to the CUDA driver (stub libcuda.so[.1] on path?).\n",
            1,
            "no counters: Nsight Compute failed to connect to the CUDA driver (stub libcuda.so[.1] on path?).",
        ),
        (
            RETURNED + NO_KERNELS,
            "Traceback ...\nerror: no such device\n",
            1,
            "no counters: The application returned an error code (1). error: no such device",
        ),
        (
            "==PROF== Connected to process 1\n==WARNING== Running with uncontrolled clocks.\n" + NO_KERNELS,
            "",
            0,
            "ncu ended with 0 and no counters: No kernels were profiled.",
        ),
        (TEXT[: TEXT.index('"0"')], "", 0, "ncu ended with 0 and no counters: no reason given"),
        ("==ERROR== Failed to find metric sm__x.sum\n" + TEXT, "", 1, "no counters: Failed to find metric sm__x.sum"),
        (RAW.replace("1420832", "1.420.832"), "", 0, "ncu's counters cannot be read: ncu's value '1.420.832'"),
        ("", "", 9, "ncu ended with 9 and no counters: no reason given"),
    ],
    ids=["no permission", "no permission, code 0", "no driver", "the program failed", "no kernels", "header alone",
         "no metric", "another language", "silent"],
)  # fmt: skip
def test_why_there_are_no_counters_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, said: str, code: int, told: str
) -> None:
    install(tmp_path, monkeypatch, NCU.format(python=sys.executable, text=text, said=said, code=code))
    reason = collect(["true"], tmp_path / "ncu.csv")
    assert reason is not None
    assert told in reason
    assert "\n" not in reason
    assert not (tmp_path / "ncu.csv").exists(), "or the next profile would take it for counters"
    kept = (tmp_path / FAILED).read_text()
    assert text in kept
    assert said in kept
    assert str(tmp_path / FAILED) in reason


def test_numbers_do_not_depend_on_the_language(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = '#!/bin/sh\necho "==ERROR== told in $LC_ALL"\nexit 1\n'
    install(tmp_path, monkeypatch, script)
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    reason = collect(["true"], tmp_path / "ncu.csv")
    assert reason is not None
    assert "told in C.UTF-8" in reason


def test_what_hangs_is_ended_with_the_program_under_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time is over as soon as the program under it runs, however long a busy machine takes to start both."""
    child = tmp_path / "child"
    install(tmp_path, monkeypatch, f"#!/bin/sh\nsleep 600 >/dev/null 2>&1 &\necho $! > {child}\nwait\n")
    wait = subprocess.Popen.communicate

    def waited(process: subprocess.Popen[str], timeout: float | None = None) -> tuple[str, str]:
        if timeout is not None:
            happened(lambda: child.exists() and child.read_text().endswith("\n"))
        return wait(process, timeout=None if timeout is None else 0.0)

    monkeypatch.setattr(subprocess.Popen, "communicate", waited)
    reason = collect(["true"], tmp_path / "ncu.csv", timeout_s=5.0)
    assert reason is not None
    assert "ncu gave nothing within 5 s" in reason
    happened(lambda: has_ended(int(child.read_text())))


def happened(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def has_ended(process: int) -> bool:
    """Whether a process is gone, or dead and not yet collected by its parent."""
    try:
        return "State:\tZ" in Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_where_it_is_not_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(ncu, "PLACES", (str(tmp_path / "toolkit"), str(tmp_path / "own")))
    assert collect(["true"], tmp_path / "ncu.csv") == "Nsight Compute (ncu) is not installed here"


def test_it_is_found_off_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(ncu, "PLACES", (str(tmp_path / "toolkit"), str(tmp_path / "own")))
    for version in ("2024.3.1", "2025.10.0", "2025.9.0"):
        (tmp_path / "own" / version).mkdir(parents=True)
        (tmp_path / "own" / version / "ncu").touch(mode=0o755)
    assert tool() == str(tmp_path / "own" / "2025.10.0" / "ncu")
    assert tool() in command(["true"], tmp_path / "ncu.csv")
