"""What README.md and docs/ say is what the code does: tables, examples, commands, links, names and defaults."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import typer
from torch import Tensor

from pyramidbench.capture_file import CaptureMetadata, describe_capture
from pyramidbench.cli import app
from pyramidbench.gate import check_call, check_causal
from pyramidbench.method import BlockMethod
from pyramidbench.model_files import SMOLLM2_PACKAGE, SMOLLM2_SHA256
from pyramidbench.problem import Problem
from pyramidbench.record import MEASURED, Status
from pyramidbench.reference import TABLES, filled
from pyramidbench.registry import create, method_class, parameter_names, preset_names
from pyramidbench.suite import load_suite, suite_from_flags
from pyramidbench.tables import RESULTS

ROOT = Path(__file__).parent.parent
PAGES = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))}
COMMANDS: dict[str, Any] = dict(vars(typer.main.get_command(app))["commands"])
LINKS = [
    (page, link) for page, text in PAGES.items() for link in re.findall(r"\]\(([^)#:]+)\)", re.sub(r"\s+", " ", text))
]
SAMPLE = Problem(1, 2, 1, 64, 64, 64, 64, "float32", True, 0.125)


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGES[page], re.DOTALL | re.MULTILINE)


def rows(page: str, heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, without its two head lines."""
    below = PAGES[page].split(f"\n## {heading}\n")[1].split("\n## ")[0]
    table = re.search(r"(?:^\|.*\n)+", below, re.MULTILINE)
    assert table is not None
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table[0].splitlines()[2:]]


SHELL = [
    shlex.split(line, comments=True)
    for page in PAGES
    for block in blocks(page, "sh")
    for line in block.splitlines()
    if line.startswith("pyramidbench ")
]


@pytest.mark.parametrize("page", TABLES)
def test_generated_tables_are_what_the_code_generates(page: str) -> None:
    assert PAGES[page] == filled(page, PAGES[page]), "run `python -m pyramidbench.reference docs`"


@pytest.mark.parametrize(("page", "link"), LINKS)
def test_links_lead_somewhere(page: str, link: str) -> None:
    folder = ROOT if page == "README.md" else ROOT / "docs"
    assert (folder / link).is_file()


@pytest.mark.parametrize("page", PAGES)
def test_pages_name_no_file_that_users_do_not_have(page: str) -> None:
    assert not re.search(r"shared/|/(?:work|root|tmp)/", PAGES[page])
    for path in re.findall(r"`((?:pyramidbench|methods|kernels|suites|tests|docs)/[\w./]*\w)`", PAGES[page]):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("line", SHELL, ids=" ".join)
def test_commands_parse(line: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options, their values, and the sweep that they describe; nothing is run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "key_norms.py").write_text(blocks("README.md", "python")[2])
    _, name, *arguments = line
    given = COMMANDS[name].make_context(name, arguments).params
    if name in ("sweep", "recall"):
        axes = ("seq", "method", "top_k", "keep", "levels", "query_tile", "heads")
        values = {key: given[key] for key in axes if given.get(key)}
        suite = suite_from_flags(**values, input=[given["input"]] if given["input"] else [])
        assert suite.grids[0].methods
    if name == "list" and given["name"] and given["what"] == "methods":
        assert parameter_names(given["name"])


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_options_in_the_text_exist(page: str) -> None:
    text = PAGES[page]
    known = {
        option
        for command in COMMANDS.values()
        for param in command.params
        for option in (*param.opts, *param.secondary_opts)
    }
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", re.sub(r"<!--.*?-->|(?m:^#SBATCH.*$)", "", text))) <= known
    assert set(re.findall(r"`pyramidbench ([a-z]+)", text)) <= set(COMMANDS)
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:`|^)make ([\w-]+)", text, re.MULTILINE)) <= targets


def test_the_readme_shows_python_and_shell() -> None:
    """The tests over its blocks are empty without any."""
    assert len(blocks("README.md", "python")) == 3
    assert len(SHELL) >= 8


def run(code: str, folder: Path) -> str:
    """What a script of this code prints, in an otherwise empty folder."""
    script = folder / "example.py"
    script.write_text(code)
    command = [sys.executable, "-W", "error", str(script)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_attention_from_python_as_in_the_readme(tmp_path: Path) -> None:
    lines = run(blocks("README.md", "python")[0], tmp_path).splitlines()
    assert lines[0].startswith("torch.Size([1, 2, 16, ")
    assert 0 < float(lines[0].split()[-1]) < 1
    assert 0 < float(lines[1].removeprefix("tensor(").removesuffix(")")) < 1


def test_a_sweep_from_python_as_in_the_readme(tmp_path: Path) -> None:
    printed = run(blocks("README.md", "python")[1], tmp_path)
    assert [line.split()[1] for line in printed.splitlines()[1:]] == ["dense", "pyramid"] * 2
    (folder,) = (tmp_path / "results").iterdir()
    files = {cells[0] for cells in rows("results.md", "Files of a run")}
    there = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    assert there <= set(re.findall(r"`([\w.]+)", " ".join(files)))


def test_tensors_of_ones_own_as_in_the_page_about_captures(tmp_path: Path) -> None:
    run(blocks("capture.md", "python")[0], tmp_path)
    assert describe_capture(tmp_path / "mine.safetensors").label == "mine:a-batch-of-mine"


def test_the_example_method_works(tmp_path: Path, tensors: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> None:
    code = blocks("README.md", "python")[2]
    assert len(code.splitlines()) < 25
    path = tmp_path / "key_norms.py"
    path.write_text(code)
    method = create(str(path), {"top_k": 2, "block_size": 16, "query_tile": 32})
    assert method.name == "key_norms"
    assert isinstance(method, BlockMethod)
    q, k, v = tensors(queries=203, heads=4, kv_heads=2, dim=16, dtype=torch.float32)
    k[:, :, 48:64] *= 5
    problem = Problem.of(q, k, v, causal=True, scale=None)
    passed = check_call(method, q, k, v, problem)
    check_causal(method, q, k, v, problem, passed)
    assert passed.selection is not None
    assert bool((passed.selection.indices[:, :, 3:] == 3).any(-1).all()), "the block with the longest keys was not kept"
    assert method.cost(problem).stage("attend").flops > 0


def test_statuses_are_all_explained() -> None:
    told = {cells[0].strip("`| "): cells[-1].strip("| ") for cells in rows("results.md", "Statuses")}
    assert list(told) == list(get_args(Status))
    assert {status for status, numbers in told.items() if numbers == "yes"} == set(MEASURED)


def test_the_readme_explains_the_columns_that_are_shown() -> None:
    assert [cells[0].strip("| ") for cells in rows("README.md", "Reading the result")] == [c.header for c in RESULTS]


def test_parameters_have_the_names_and_defaults_of_the_code() -> None:
    method = create("pyramid")
    assert isinstance(method, BlockMethod)
    in_force = dataclasses.asdict(method) | {"sink_blocks": method.sinks(SAMPLE), "local_blocks": method.locals(SAMPLE)}
    told = {cells[1].strip("`"): cells[2] for cells in rows("selection.md", "Symbols")}
    assert told.pop("scale") == "1/√D"
    assert told == {name: "none" if value is None else json.dumps(value) for name, value in in_force.items()}


def test_presets_are_those_of_the_code() -> None:
    told = {cells[0].strip("`| "): cells[1] for cells in rows("selection.md", "Presets")}
    assert tuple(told) == preset_names("pyramid")
    for name, text in told.items():
        # "All blocks" stands in words for a parameter that is None.
        values = {key: value for key, value in method_class("pyramid").presets[name].items() if value is not None}
        assert re.findall(r"`(\w+=\S+)`", text) == [f"{key}={json.dumps(value)}" for key, value in values.items()]


def test_the_capture_is_described_as_it_is() -> None:
    below = PAGES["capture.md"].split("| key | meaning |")[1].split("\n\n")[0]
    named = {key for line in below.splitlines() for key in re.findall(r"`(\w+)`", line.split(" | ")[0])}
    assert named == {field.name for field in dataclasses.fields(CaptureMetadata)}
    assert SMOLLM2_SHA256 in PAGES["capture.md"]
    package, _, version = SMOLLM2_PACKAGE.partition("==")
    assert f"`{package}` {version}" in PAGES["capture.md"]


def test_suites_that_are_named_exist() -> None:
    named = {name for text in PAGES.values() for name in re.findall(r"`suites/(\w+)\.toml`", text)}
    assert named
    assert all(load_suite(name).grids for name in named)
