"""tests/gpu/evaluate.sh with a stand-in of Python: which evaluations it asks for, and in which order of attentions."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parent / "gpu" / "evaluate.sh"
SECOND = {
    "single-needle-long", "multi-key-long", "multi-query", "multi-value", "variables", "words", "zero-shot", "shots-8k-1",
    "shots-8k-2",
}  # fmt: skip


def asked(folder: Path, *parts: str) -> dict[str, list[str]]:
    """Folder of each evaluation → its attentions in order."""
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
            name = Path(words[words.index("--out") + 1]).name.removeprefix("smollm2-")
            assert name not in found
            found[name] = words[words.index("--method") + 1].split(",")
    return found


def test_each_of_the_second_group_starts_at_another_attention(tmp_path: Path) -> None:
    found = asked(tmp_path)
    assert set(found) == SECOND
    assert len({order[0] for order in found.values()}) == len(SECOND)
    assert len({frozenset(order) for order in found.values()}) == 1


def test_a_part_asks_for_the_same_in_whatever_company(tmp_path: Path) -> None:
    """Another order would be another evaluation, which a folder that was begun refuses."""
    together, apart = asked(tmp_path), asked(tmp_path, "words", "values", "places", "zero")
    assert (apart["words"], apart["zero-shot"]) == (together["words"], together["zero-shot"])
    assert apart["values"] == apart["places"] == together["single-needle-long"], "as results/reference has them"
