"""tests/gpu/evaluate.sh with a stand-in of Python: which evaluations it asks for, and in which order of attentions."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from pyramidbench.axes import parse_axis, parse_keep
from pyramidbench.evaluation.catalogue import find_tasks

SCRIPT = Path(__file__).parent / "gpu" / "evaluate.sh"
ALL = [
    "dense", "pyramid", "pyramid:paper", "pyramid:fast", "flat", "flat:exact", "exact_topk", "sliding_window", "random_blocks"
]  # fmt: skip


PARTS = (
    "perplexity", "needle-0", "needle-1", "key-0", "key-1", "values", "places", "choices-1", "choices-2", "timed",
    "needle-4k", "needle-8k", "key-4k", "key-8k", "queries", "four", "tracking", "zero", "eights-1", "eights-2",
)  # fmt: skip


def asked(folder: Path, *parts: str) -> dict[str, list[str]]:
    """Folder of each evaluation → its attentions in order."""
    return {name: flag(words, "--method").split(",") for name, words in commands(folder, *parts).items()}


def flag(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def commands(folder: Path, *parts: str) -> dict[str, list[str]]:
    """Folder of each evaluation → the words of its command behind `evaluate`."""
    log, python, models = folder / "log", folder / "python", folder / "models"
    models.mkdir(exist_ok=True)
    python.write_text(f'#!/bin/sh\necho "$*" >>"{log}"\n')
    python.chmod(0o755)
    log.write_text("")
    command = ["sh", str(SCRIPT), str(folder / "out"), str(models), *parts]
    subprocess.run(command, check=True, env={**os.environ, "PYTHON": str(python)}, capture_output=True)
    found = {}
    for line in log.read_text().splitlines():
        words = line.split()
        if "--method" in words:
            name = Path(flag(words, "--out")).name.removeprefix("smollm2-")
            assert name not in found
            found[name] = words[words.index("evaluate") + 1 :]
    return found


def test_parts_start_at_different_attentions(tmp_path: Path) -> None:
    """All of them do where no part is named, so that kernels are compiled once."""
    found = asked(tmp_path)
    (attentions,) = {frozenset(order) for order in found.values()}
    assert {order[0] for order in found.values()} == attentions


def test_a_part_asks_for_the_same_in_whatever_company(tmp_path: Path) -> None:
    """Another order would be another evaluation, which a folder that was begun refuses."""
    together, apart = asked(tmp_path), asked(tmp_path, "eights-2", "values", "places", "zero")
    assert (apart["shots-8k-2"], apart["zero-shot"]) == (together["shots-8k-2"], together["zero-shot"])
    assert apart["values"] == apart["places"] == sorted(apart["values"], key=ALL.index), "as results/reference has them"


def test_every_part_is_a_command_that_evaluate_accepts(tmp_path: Path) -> None:
    found = commands(tmp_path, *PARTS)
    assert len(found) == len(PARTS) + 2, "perplexity asks three times"
    for words in found.values():
        find_tasks(words[0].split(","), None)
        assert all(map(parse_keep, flag(words, "--keep").split(",")))
        for name in ("--length", "--shots"):
            if name in words:
                assert max(parse_axis(flag(words, name), name, minimum=0)) <= 8192
