"""Methods from files and packages: found, made, and told apart; a broken one says so in one line and stops nobody else."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pyramidbench import cli, plugins, registry
from pyramidbench.catalogue import method_facts
from pyramidbench.doctor import examine
from pyramidbench.errors import UserError
from pyramidbench.method import Method
from pyramidbench.registry import create, fault, method_class, parameter_names
from pyramidbench.store import load_run

OWN_METHOD = '''
"""Mine."""
from dataclasses import dataclass
from pyramidbench.method import Method

@dataclass(frozen=True)
class Mine(Method):
    """Keeps nothing."""

    presets = {"wide": {"width": 9}}
    width: int = 3

    def select(self, q, k, problem):
        return None

    def attend(self, q, k, v, selection, problem):
        return q

    def backend(self, problem):
        return "torch"

    def cost(self, problem):
        raise NotImplementedError
'''
HALF_A_METHOD = '''
"""Half of a method."""
from dataclasses import dataclass
from pyramidbench.method import BlockMethod

@dataclass(frozen=True)
class Half(BlockMethod):
    """Keeps nothing."""

    def select(self, q, k, problem):
        return None
'''
SLIDING = '''
"""A window."""
from dataclasses import dataclass
from pyramidbench.methods.sliding_window import SlidingWindow

@dataclass(frozen=True)
class Mine(SlidingWindow):
    """Keeps a window. Cost: the attention."""
'''
Install = Callable[..., None]
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def forgetful() -> Iterator[None]:
    """What is found in one test is not found in the next."""
    for cached in (method_class, plugins.entry_points):
        cached.cache_clear()
    yield
    for cached in (method_class, plugins.entry_points):
        cached.cache_clear()


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs a package "outside 1.2" of one module with entry points, name=value."""

    def make(code: str, *points: str) -> None:
        (tmp_path / "outside_methods.py").write_text(code)
        info = tmp_path / "outside-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text("\n".join([f"[{plugins.GROUP}]", *points]))
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "outside_methods", raising=False)

    return make


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    no_workers: None,  # noqa: ARG001
) -> Command:
    """Runs a command in a folder, in this process: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["pyramidbench", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, printed.out, printed.err

    return run


TINY = ("--seq", "64", "--heads", "1", "--head-dim", "16", "--block-size", "16", "--query-tile", "16", "--top-k", "1",
        "--timing", "20ms", "--device", "cpu")  # fmt: skip


def test_a_method_in_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(OWN_METHOD)
    method = create(f"{path}:wide")
    assert isinstance(method, Method)
    assert method.name == "mine"
    assert dataclasses.asdict(method) == {"width": 9}
    assert parameter_names(str(path)) == ("width",)
    assert fault(str(path)) is None
    with pytest.raises(UserError, match=r"unknown preset of method .* 'wid'"):
        create(f"{path}:wid")


def test_a_file_that_is_not_there_is_a_mistake_in_the_command(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"method file '.*gone.py' does not exist; give the path of a Python file"):
        create(str(tmp_path / "gone.py"))


BROKEN = {
    "import": ("import nothing_of_this_name", "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
    "syntax": ("def (", "SyntaxError: "),
    "exit": ("raise SystemExit(3)", "SystemExit: 3"),
    "none": ("x = 1", "it defines 0 methods; accepted: exactly one subclass of Method per file"),
    "two": (OWN_METHOD + "\n@dataclass(frozen=True)\nclass Two(Method):\n    pass\n", "it defines 2 methods"),
    "half": (HALF_A_METHOD, "Half has no attend; accepted: a Method with select, attend, backend and cost"),
    "bare": (
        HALF_A_METHOD.replace("BlockMethod", "Method").partition("    def")[0],
        "Half has no select and no attend and ",
    ),
    "no-dataclass": (OWN_METHOD.replace("@dataclass(frozen=True)\n", ""), "Mine is not a dataclass; put @dataclass"),
    "no-default": (OWN_METHOD.replace("width: int = 3", "width: int"), "ValidationError: "),
    "asked": (
        OWN_METHOD + "\n    def unavailable(self):\n        return 1 / 0\n",
        "ZeroDivisionError: division by zero",
    ),
    "answer": (OWN_METHOD + "\n    def unavailable(self):\n        return True\n", "unavailable() returned True"),
}


@pytest.mark.parametrize(("code", "reason"), BROKEN.values(), ids=BROKEN)
def test_a_broken_file_says_in_one_line_what_and_why(tmp_path: Path, code: str, reason: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(code)
    said = create(f"{path}:whatever", {"width": 4}).unavailable()
    assert said is not None
    assert said.startswith(f"method file '{path}' is broken: ")
    assert reason in said
    assert "\n" not in said
    assert fault(str(path)) == said


@pytest.mark.parametrize("value", ["outside_methods", "outside_methods:Mine"])
def test_a_package_brings_a_method(install: Install, value: str) -> None:
    install(OWN_METHOD, f"outer = {value}")
    assert "outer" in registry.all_names()
    assert "outer" not in registry.method_names()
    method = create("outer:wide")
    assert (method.name, dataclasses.asdict(method)) == ("outer", {"width": 9})
    assert plugins.plugin_version("outer") == "outside 1.2"
    with pytest.raises(UserError, match="Did you mean 'outer'"):
        create("outter")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("outside_methods:Nobody", "AttributeError"),
        ("no_such_module_at_all", "ModuleNotFoundError: No module named 'no_such_module_at_all'"),
        ("outside_methods:dataclass", "is no subclass of Method"),
    ],
)
def test_a_broken_package_says_in_one_line_what_and_why(install: Install, value: str, reason: str) -> None:
    install(OWN_METHOD, f"outer = {value}")
    said = create("outer").unavailable() or ""
    assert said.startswith(f"method 'outer' of outside 1.2 ({value}) is broken: ")
    assert reason in said
    listed = {method.name: method for method in method_facts()}
    assert listed["outer"].unavailable == said
    assert listed["pyramid"].unavailable is None


def test_one_that_fails_when_asked_stops_neither_the_list_nor_the_plan(install: Install, command: Command) -> None:
    install(
        SLIDING + "\n    def unsupported(self, problem):\n        return problem.no_such_size\n",
        "outer = outside_methods",
    )
    listed = {method.name: method for method in method_facts()}
    assert "AttributeError: 'Problem' object has no attribute 'no_such_size'" in (listed["outer"].unavailable or "")
    code, out, _ = command("sweep", *TINY, "--method", "dense,outer", "--dry-run")
    assert code == 0
    assert "outer cannot be planned: AttributeError" in out
    assert "1 of 2 cells run" in out


def test_a_name_of_our_own_goes_before_a_packages_and_doctor_tells(install: Install) -> None:
    install(OWN_METHOD, "flat = outside_methods")
    assert method_class("flat").__module__ == "pyramidbench.methods.flat"
    (finding,) = [found for found in examine("cpu") if found.subject == "flat"]
    assert finding.found == "that of outside 1.2 is hidden by pyramidbench's own of this name"


def test_a_sweep_goes_on_without_a_broken_one_and_ends_with_3(command: Command, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import nothing_of_this_name")
    code, out, err = command("sweep", *TINY, "--method", "dense,./mine.py,flat", "--out", "run")
    assert code == 3
    told = [line for line in err.splitlines() if line.startswith("error: ")]
    assert told == [
        "error: method file 'mine.py' is broken: ModuleNotFoundError: No module named 'nothing_of_this_name'; the other "
        "methods go on"
    ]
    records = {record.method: record for record in load_run(tmp_path / "run").records}
    assert records["dense"].latency_s
    assert records["flat"].latency_s
    assert records["./mine.py"].status == "unsupported"
    assert "nothing_of_this_name" in (records["./mine.py"].reason or "")
    assert "nothing_of_this_name" in out


def test_what_a_file_prints_does_not_reach_stdout(command: Command, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SLIDING + "\nprint('at import')\n")
    code, out, err = command("sweep", *TINY, "--method", "dense,./mine.py", "--out", "run", "--json")
    assert code == 0
    assert [json.loads(out)[i]["status"] in ("ok", "low_n") for i in range(2)] == [True, True]
    assert "at import" in err


def test_a_method_of_a_package_is_swept_listed_and_remembered_with_its_version(
    install: Install, command: Command, tmp_path: Path
) -> None:
    install(SLIDING, "outer = outside_methods")
    assert command("sweep", *TINY, "--method", "dense,outer", "--out", "run")[0] == 0
    run = load_run(tmp_path / "run")
    assert {record.method: record.status in ("ok", "low_n") for record in run.records} == {"dense": True, "outer": True}
    settings: Any = run.manifest.settings
    assert settings["files"] == {"outer": "outside 1.2"}
    code, out, _ = command("list", "methods", "--json")
    assert code == 0
    assert "outer" in [method["name"] for method in json.loads(out)]
    assert "outer" not in command("list", "methods", "--markdown")[1]
    assert "Keeps a window." in command("list", "methods", "outer")[1]
