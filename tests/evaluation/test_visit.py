"""tests/gpu/evaluate.sh with a stand-in for Python: every part is a command that `evaluate` accepts, with its own folder."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from pyramidbench.axes import parse_axis, parse_keep
from pyramidbench.evaluation.attention import Budgets, attentions
from pyramidbench.evaluation.catalogue import find_tasks

SCRIPT = Path(__file__).parents[1] / "gpu" / "evaluate.sh"
PARTS = (
    "perplexity", "needle-0", "needle-1", "key-0", "key-1", "values", "places", "choices-1", "choices-2", "timed",
    "needle-4k", "needle-8k", "key-4k", "key-8k", "queries", "four", "tracking", "zero", "eights-1", "eights-2",
)  # fmt: skip
STAND_IN = """#!/bin/sh
[ "$1" = -c ] || echo "$*" >>"$SAID"
"""

pytestmark = pytest.mark.skipif(shutil.which("sh") is None, reason="no sh on this machine")


def commands(tmp_path: Path, *parts: str) -> list[list[str]]:
    """The words of every `pyramidbench evaluate` that the script starts."""
    python, said = tmp_path / "python", tmp_path / "said"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(python), "SAID": str(said)}
    told = [str(tmp_path / "out"), str(tmp_path), *parts]
    subprocess.run(["sh", str(SCRIPT), *told], check=True, env=environment, capture_output=True)
    return [line.split()[3:] for line in said.read_text().splitlines()]


def flag(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def test_every_part_is_a_command_with_a_folder_of_its_own(tmp_path: Path) -> None:
    asked = commands(tmp_path, *PARTS)
    assert len(asked) == len(PARTS) + 2  # perplexity asks three times
    assert len({flag(words, "--out") for words in asked}) == len(asked)
    for words in asked:
        find_tasks(words[0].split(","), None)
        keep = tuple(map(parse_keep, flag(words, "--keep").split(",")))
        found = attentions(flag(words, "--method").split(","), Budgets(keep, 8192), None, ())
        assert len({one.method for one in found}) == 9
        for name in ("--length", "--shots"):
            if name in words:
                assert max(parse_axis(flag(words, name), name, minimum=0)) <= 8192


def test_without_a_part_it_is_what_was_left_out_from_other_attentions_on(tmp_path: Path) -> None:
    asked = commands(tmp_path)
    assert len(asked) == len(re.search(r"set -- (.+)", SCRIPT.read_text())[1].split())  # type: ignore[index]
    assert len({flag(words, "--method").split(",")[0] for words in asked}) == 9
