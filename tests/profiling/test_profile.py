"""`pyramidbench profile`: files, tables, figures and mistakes on a small cell; and what it says of a GPU, on made-up rows."""

from __future__ import annotations

import gzip
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.image import imread
from rich.console import Console

from pyramidbench import cli
from pyramidbench.cell import Cell
from pyramidbench.cost import Cost, StageCost
from pyramidbench.device import Device
from pyramidbench.profiling.draw import save_figure
from pyramidbench.profiling.figures import profile_figures
from pyramidbench.profiling.profile import Profile
from pyramidbench.profiling.rows import KernelRow, StageRow, kernel_rows
from pyramidbench.profiling.table import sentences
from pyramidbench.profiling.trace import Traced, TracedKernel
from pyramidbench.profiling.work import Work
from pyramidbench.render_tools import show_profile

TINY = (
    "--seq", "256", "--method", "pyramid", "--head-dim", "16", "--block-size", "16", "--query-tile", "16", "--top-k", "1",
    "--levels", "2", "--device", "cpu", "--timing", "20ms",
)  # fmt: skip
FAST = ("--seq", "128", "--method", "dense,flat", "--head-dim", "16", "--device", "cpu", "--timing", "20ms")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    no_workers: None,  # noqa: ARG001
) -> Run:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["pyramidbench", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capfd.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, printed.out, printed.err

    return call


def test_a_profile_of_a_small_cell(run: Run, tmp_path: Path) -> None:
    code, out, err = run("profile", *TINY, "--out", "made")
    assert (code, err) == (0, "")
    lines = {line.split()[0]: line.split() for line in out.splitlines() if line}
    assert {"build", "route", "index", "attend"} <= set(lines)
    assert "- level 1" in out
    assert "- level 0" in out
    assert "Host overhead: " in out
    folder = tmp_path / "made"
    assert {path.name for path in folder.iterdir()} == {
        "trace.json.gz", "profile.json", "stages.csv", "kernels.csv", "stages.png", "roofline.png",
    }  # fmt: skip
    made = Profile.model_validate_json((folder / "profile.json").read_bytes())
    stages = {stage.path: stage for stage in made.stages}
    parts = sum(stage.wall_s for stage in made.stages if stage.path.startswith("route/"))
    assert 0 < parts <= 1.05 * stages["route"].wall_s
    whole = sum(stages[name].wall_s for name in ("build", "route", "index", "attend"))
    assert 0.3 * made.wall_s < whole < 3 * made.wall_s
    method, problem = made.cell.make_method(), made.cell.problem("cpu")
    assert stages["attend"].flops == method.cost(problem).stage("attend").flops
    traced = sum(kernel.time_s for kernel in made.kernels)
    assert sum(stages[name].kernels_s for name in ("build", "route", "index", "attend")) == pytest.approx(
        traced, rel=0.05
    )
    assert "traceEvents" in json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))
    table = pd.read_csv(folder / "kernels.csv")
    assert len(table) == len(made.kernels)
    assert {"flops_per_s", "bytes_per_s", "roof_share", "source"} <= set(table.columns)
    assert np.ptp(imread(folder / "stages.png")) > 0.5


def test_json_is_the_profile_and_nothing_else(run: Run) -> None:
    code, out, err = run("profile", *TINY, "--out", "made", "--json")
    assert code == 0
    assert Profile.model_validate_json(out).cell.seq_len == 256
    assert "Profile: made" in err


def test_a_pass_with_gradients_has_its_backward(run: Run) -> None:
    code, out, _ = run(
        "profile", "--seq", "64", "--method", "dense", "--pass", "train", "--device", "cpu", "--json", "--timing", "9ms"
    )
    made = Profile.model_validate_json(out)
    assert code == 0
    assert [stage.path for stage in made.stages] == ["attend", "backward"]
    attend, backward = made.stages
    assert attend.flops is not None
    assert backward.flops == 2.5 * attend.flops


def test_ncu_prints_the_command_and_reads_what_it_left(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("profile", *TINY, "--ncu", "--out", "made")
    assert code == 0
    (command,) = [line for line in out.splitlines() if line.startswith("Counters: env LC_ALL=")]
    assert " --profile-from-start off " in command
    assert command.endswith("-m pyramidbench profile " + " ".join(TINY) + " --out made --once")
    assert "none on a CPU" in out
    header = '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n'
    made = Profile.model_validate_json((tmp_path / "made" / "profile.json").read_bytes())
    names = [kernel.name for kernel in made.kernels]
    name = next(kernel.name for kernel in made.kernels if kernel.launches == names.count(kernel.name) == 1)
    rows = [f'"0","{name}","dram__bytes_{way}.sum","byte","1,000"\n' for way in ("read", "write")]
    (tmp_path / "made" / "ncu.csv").write_text(header + "".join(rows))
    _, out, err = run("profile", *TINY, "--ncu", "--out", "made", "--json")
    assert f"of 1 of the {len(made.kernels)} rows of kernels" in err
    counted = [kernel for kernel in Profile.model_validate_json(out).kernels if kernel.source == "ncu"]
    assert [(kernel.name, kernel.bytes) for kernel in counted] == [(name, 2000)]


def test_what_ncu_runs_is_one_call_and_no_file(run: Run, tmp_path: Path) -> None:
    assert run("profile", *TINY, "--once") == (0, "", "")
    assert list(tmp_path.iterdir()) == []


def test_a_cell_of_a_run_is_found_by_its_identity(run: Run) -> None:
    assert run("sweep", *FAST, "--out", "run")[0] == 0
    frame = pd.read_csv("run/results.csv")
    cell = frame.loc[frame["method"] == "flat", "cell"].iloc[0]
    code, out, _ = run("profile", "run", "--cell", cell[:6], "--device", "cpu", "--timing", "9ms", "--json")
    assert code == 0
    assert Profile.model_validate_json(out).cell.identity == cell
    code, _, err = run("profile", "run", "--cell", "", "--device", "cpu")
    assert (code, "several cells of 'run'" in err) == (2, True)


WRONG = '''
from dataclasses import dataclass
from pyramidbench.methods.dense import Dense

@dataclass(frozen=True)
class Wrong(Dense):
    """Dense attention, twice."""

    def attend(self, q, k, v, selection, problem):
        return 2 * super().attend(q, k, v, selection, problem)
'''


def test_a_wrong_method_has_no_profile(run: Run, tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    code, out, err = run("profile", "--seq", "64", "--method", "wrong.py", "--device", "cpu", "--out", "made")
    assert (code, out) == (4, "")
    assert "wrong.py is wrong on this cell" in err
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["--seq 4k..64k"]),
        (["--seq", "64,128", "--top-k", "1,2"], ["make 4 cells", "one value of --seq", "--top-k"]),
        (["--seq", "64", "--method", "dense,flat"], ["make 2 cells", "--method"]),
        (["--seq", "64", "--method", "pyramid", "--query-tile", "16,32"], ["make 2 cells", "--query-tile"]),
        (["--seq", "64", "--method", "pyramyd"], ["Did you mean 'pyramid'"]),
        (["--seq", "64", "--method", "dense:fa3", "--device", "cpu"], ["'dense:fa3' cannot be profiled here"]),
        (["gone", "--cell", "abc"], ["'gone' is no run"]),
        (["--cell", "abc"], ["a run and --cell belong together"]),
        (["gone"], ["a run and --cell belong together"]),
        (["gone", "--cell", "abc", "--seq", "64"], ["leave out --seq"]),
        (
            ["--seq", "64", "--device", "cpu", "--timing", "9ms", "--out", "file/x"],
            ["cannot write to 'file/x'", "--out"],
        ),
    ],
    ids=lambda value: " ".join(value)[:50] if isinstance(value, list) else "",
)
def test_mistakes_are_one_line(run: Run, tmp_path: Path, arguments: list[str], parts: list[str]) -> None:
    (tmp_path / "file").write_text("")
    code, out, err = run("profile", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    for text in parts:
        assert text in err


GPU = Device(
    kind="cuda", name="NVIDIA H200", memory_bytes=1, threads=1, system="", python="", torch="", triton="3.6", cuda="13.0",
    capability="9.0", peak_flops_per_s=700e12, peak_bytes_per_s=4e12,
)  # fmt: skip
COST = Cost((StageCost("build", 1e9, 1e9), StageCost("route", 4e10, 1e10), StageCost("attend", 2e12, 9e10)))


def gpu_profile(**columns: Any) -> Profile:
    kernels = (
        KernelRow(name="_attend_rows_hopper_with_a_long_name_of_its_own", path="attend", launches=1, time_s=5e-3, flops=2e12,
                  bytes=2e9, source="formula", roof_share=0.57),
        KernelRow(name="_descend", path="route/levels 6 to 0, scored", launches=2, time_s=1e-3, bytes=4e8, source="arguments",
                  roof_share=0.1),
        KernelRow(name="void at::native::fill<int>(int)", path="index", launches=1, time_s=4e-6),
    )  # fmt: skip
    stages = (
        StageRow(
            path="route",
            wall_s=1.4e-3,
            device_s=1.1e-3,
            kernels_s=1e-3,
            launches=2,
            flops=4e10,
            bytes=4e8,
            roof_share=0.09,
        ),
        StageRow(path="route/levels 6 to 0, scored", wall_s=1.3e-3, device_s=1.05e-3, kernels_s=1e-3, launches=2),
        StageRow(
            path="attend",
            wall_s=5.2e-3,
            device_s=5.05e-3,
            kernels_s=5e-3,
            launches=1,
            flops=2e12,
            bytes=2e9,
            roof_share=0.57,
        ),
        StageRow(path="attend/transpose", wall_s=1e-3, device_s=9e-4, kernels_s=8e-4, launches=4),
        StageRow(path="index", wall_s=1e-5, device_s=8e-6, kernels_s=4e-6, launches=1),
    )
    usual: dict[str, Any] = {
        "cell": Cell(method="pyramid:fastest", seq_len=65536, seq_len_kv=65536, heads=16, kv_heads=16, head_dim=128),
        "device": GPU, "calls": 20, "wall_s": 7e-3, "host_s": 2e-3, "device_s": 6.5e-3, "busy_s": 6e-3, "traced_s": 8e-3,
        "stages": stages, "kernels": kernels,
    }  # fmt: skip
    return Profile(**(usual | columns))


def shown(profile: Profile, width: int) -> str:
    stream = io.StringIO()
    show_profile(Console(file=stream, width=width, force_terminal=True, color_system=None), profile)
    return stream.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_tables_fit_the_terminal_and_cut_no_cell(width: int) -> None:
    text = shown(gpu_profile(), width)
    assert max(len(line) for line in text.splitlines()) <= width
    cells = [cell.strip() for line in text.splitlines() if line.startswith("│") for cell in line.strip("│").split("│")]
    assert "5.05" in cells
    assert all("…" not in cell or cell.startswith("_attend_rows") for cell in cells)
    assert text.index("route ") < text.index("index ") < text.index("attend ")


def test_what_binds_a_call_on_a_gpu_is_said() -> None:
    (line, peaks) = sentences(gpu_profile())
    assert "Host overhead: 1.00 ms (14%) in which no kernel ran" in line
    assert "so the device binds it" in line
    assert peaks == "Measured peaks: 700 TFLOP/s (bf16 product), 4000 GB/s (copy)."
    assert "so launches bind it" in sentences(gpu_profile(host_s=6.6e-3))[0]


def test_counters_have_columns_of_their_own() -> None:
    first, *others = gpu_profile().kernels
    counted = first.model_copy(update={"source": "ncu", "registers": 168, "tensor_share": 0.61, "l2_bytes": 5e9})
    text = shown(gpu_profile(kernels=(counted, *others)), 200)
    assert "168" in text
    assert "61%" in text
    assert "1000" in text, "5 GB in 5 ms"
    assert "registers" not in shown(gpu_profile(), 200)


def test_figures_are_tidy_and_drawn(tmp_path: Path) -> None:
    stages, roofline = profile_figures(gpu_profile())
    assert set(stages.data["measure"]) == {"wall", "device", "kernels"}
    assert (
        stages.data.loc[(stages.data["stage"] == "attend") & (stages.data["measure"] == "device"), "ms"].item() == 5.05
    )
    points = roofline.data.set_index("name")
    assert points.loc["attend", "intensity"] == 1000
    assert points.loc["attend", "flops_per_s"] == pytest.approx(2e12 / 5.05e-3)
    assert set(points["kind"]) == {"stage", "kernel"}
    for figure in (stages, roofline):
        picture = imread(save_figure(figure, tmp_path, dpi=80))
        assert picture.shape[1] == 640
        assert (picture[..., :3].min(axis=2) < 0.5).mean() > 0.005
    assert [
        figure.name for figure in profile_figures(gpu_profile(device=GPU.model_copy(update={"peak_flops_per_s": None})))
    ] == ["stages"]


def traced(*kernels: TracedKernel) -> Traced:
    return Traced(kernels, 1.0, 1.0, True)


def test_work_goes_to_the_kernel_by_name_by_operator_or_by_the_stages_formula() -> None:
    watched = {
        ("_walk", "select/route"): Work(None, 1e6, "arguments"), ("aten::copy_", "select"): Work(None, 2e6, "shapes"),
        ("aten::sort", "select/route"): Work(None, 3e6, "shapes"),
    }  # fmt: skip
    rows = kernel_rows(
        traced(
            TracedKernel("_walk", "select/route", 1, 1e-3),
            TracedKernel("copy<float>", "select", 1, 1e-4, "aten::copy_"),
            TracedKernel("radix_1", "select/route", 1, 1e-3, "aten::sort"),
            TracedKernel("radix_2", "select/route", 1, 1e-3, "aten::sort"),
            TracedKernel("_attend", "attend", 1, 0.95),
            TracedKernel("_combine", "attend", 1, 0.05),
        ),
        watched, COST, GPU,
    )  # fmt: skip
    found = {row.name: (row.path, row.flops, row.bytes, row.source) for row in rows}
    assert found == {
        "_walk": ("route", None, 1e6, "arguments"),
        "copy<float>": ("index", None, 2e6, "shapes"),
        "radix_1": ("route", None, None, None),
        "radix_2": ("route", None, None, None),
        "_attend": ("attend", 2e12, None, "formula"),
        "_combine": ("attend", None, None, None),
    }
    attend = next(row for row in rows if row.name == "_attend")
    assert attend.roof_share == pytest.approx(2e12 / 700e12 / 0.95)
