"""Nsight Compute: its command, its CSV in the format that it writes, and its figures in a profile's rows."""

from __future__ import annotations

import csv
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from pyramidbench.device import Device
from pyramidbench.errors import UserError
from pyramidbench.profiling.ncu import RIGHTS, collect, command, joined, printed, read_counters
from pyramidbench.profiling.rows import KernelRow, short_name

TEXT = (Path(__file__).parent / "fixtures" / "ncu.csv").read_text()
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
    }  # fmt: skip
    assert (attend.name, attend.launches) == ("_attend_rows", 2)
    assert attend.values["bytes"] == pytest.approx(450e6)
    assert attend.values["occupancy"] == pytest.approx((1 * 0.5 + 3 * 0.7) / 4), "weighted by the launches' times"
    assert "bytes" not in fill.values, "what the device does not tell is missing, not 0"


def test_figures_stand_in_the_rows_of_their_kernels() -> None:
    rows = [kernel("_walk", flops=1e9), kernel("_attend_rows", "attend"), kernel("_pool", "build"), kernel("_walk2")]
    walk, attend, pool, other = joined(rows, read_counters(TEXT), DEVICE)
    assert (walk.bytes, walk.registers, walk.source) == (68157440, 168, "ncu")
    assert walk.bytes_per_s == pytest.approx(68157440 / 1e-3)
    assert walk.roof_share == pytest.approx(68157440 / 4e12 / 1e-3)
    assert attend.bytes == pytest.approx(450e6)
    assert attend.registers is None
    assert pool == rows[2]
    assert other == rows[3]


def test_a_kernel_of_two_stages_keeps_its_estimates() -> None:
    rows = (kernel("_walk", "route"), kernel("_walk", "backward"))
    assert joined(rows, read_counters(TEXT), DEVICE) == rows


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
        (
            '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n"0","k","m","furlong","1"\n',
            "'1' in 'furlong'",
        ),
        (
            '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n"0","k","m","byte","many"\n',
            "'many' in 'byte'",
        ),
    ],
)
def test_what_is_no_table_of_counters_is_refused(text: str, told: str) -> None:
    with pytest.raises(UserError) as refused:
        read_counters(text)
    assert told in str(refused.value)


def test_the_command_collects_what_is_read(tmp_path: Path) -> None:
    words = command(["python", "-m", "x y"], tmp_path / "ncu.csv")
    asked = set(words[words.index("--metrics") + 1].split(","))
    written = {line.split('","')[12] for line in TEXT.splitlines() if line.startswith(('"0', '"1'))}
    assert written <= asked
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


DENIED = f"ERR_NVGPUCTRPERM - no permission; {RIGHTS}"
NCU = """#!{python}
import sys
from pathlib import Path
arguments = sys.argv[1:]
Path(arguments[arguments.index("--log-file") + 1]).write_text({text!r})
sys.exit({code})
"""


@pytest.mark.parametrize(
    ("text", "code", "told"),
    [
        (TEXT, 0, None),
        ("==ERROR== ERR_NVGPUCTRPERM - no permission\n", 1, f"ncu ended with 1 and no counters: {DENIED}"),
        ("==ERROR== ERR_NVGPUCTRPERM - no permission\n", 0, f"ncu ended with 0 and no counters: {DENIED}"),
        (
            "==PROF== Connected to process 1\n==WARNING== No kernels were profiled.\n",
            0,
            "ncu ended with 0 and no counters: No kernels were profiled.",
        ),
        (TEXT[: TEXT.index('"0"')], 0, "ncu ended with 0 and no counters: no reason given"),
        (
            "==ERROR== Failed to find metric sm__x.sum\n" + TEXT,
            1,
            "ncu ended with 1 and no counters: Failed to find metric sm__x.sum",
        ),
        ("", 9, "ncu ended with 9 and no counters: no reason given"),
    ],
    ids=["counters", "no permission", "no permission, code 0", "no kernels", "header alone", "no metric", "silent"],
)
def test_it_runs_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, code: int, told: str | None
) -> None:
    tool = tmp_path / "ncu"
    tool.write_text(NCU.format(python=sys.executable, text=text, code=code))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert collect(["true"], tmp_path / "ncu.csv") == told
    assert (tmp_path / "ncu.csv").read_text() == text


def test_where_it_is_not_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert collect(["true"], tmp_path / "ncu.csv") == "Nsight Compute (ncu) is not installed here"
