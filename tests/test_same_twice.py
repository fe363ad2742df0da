"""The A/A test of tests/gpu/same_twice.py: that its twins are twins, that it could fail, and what it has recorded."""

from __future__ import annotations

import csv
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from pyramidbench.comparing.matching import Pair
from pyramidbench.comparing.verdicts import Margins, differences
from pyramidbench.record import Record

ROOT = Path(__file__).parents[1]
RECORDED = sorted((ROOT / "results" / "reference").glob("same-twice-*"))
MOST_WRONG, CLOSE = 1, 0.005
"""Of 20 groups, at most 5 % may be called faster or slower; on a GPU the median ratio is within 0.5 % of 1."""


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("same_twice", ROOT / "tests" / "gpu" / "same_twice.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_twins_are_two_cells_of_one_group_with_one_method(script: ModuleType, device: str) -> None:
    pairs = script.twins(device)
    assert len(pairs) == 20
    assert len({first.group for first, _ in pairs}) == 20, "each pair is a session of its own"
    assert len({cell.identity for pair in pairs for cell in pair}) == 40
    for first, second in pairs:
        assert first.group == second.group
        assert first.make_method() == second.make_method()


def test_one_that_takes_three_per_cent_longer_is_called_slower() -> None:
    rng = np.random.default_rng(0)
    first = rng.normal(1e-3, 2e-5, 60)
    a, b = (Record(cell=name, status="ok", method="flat", latency_s=1e-3) for name in "ab")
    (found,) = differences([Pair(a, b)], lambda _: (first, 1.03 * first, True), Margins())
    assert found.time_verdict == "slower"


@pytest.mark.parametrize("folder", RECORDED, ids=lambda folder: folder.name)
def test_what_was_recorded_follows_from_its_samples_and_meets_the_bar(folder: Path) -> None:
    about = json.loads((folder / "manifest.json").read_text())
    with np.load(folder / "samples.npz", allow_pickle=False) as file:
        samples = dict(file)
    lines = list(csv.DictReader((folder / "pairs.csv").read_text().splitlines()))
    assert len(lines) == 20
    ratios = []
    for line in lines:
        first, second = (samples[f"{line['method']}-{line['seq_len']}.{which}"] for which in ("first", "second"))
        count = min(len(first), len(second))
        ratios.append(float(np.median(second[:count] / first[:count])))
        assert ratios[-1] == pytest.approx(float(line["ratio"]), rel=1e-5)
    assert sum(line["verdict"] in ("faster", "slower") for line in lines) <= MOST_WRONG
    if about["device"]["kind"] == "cuda":
        assert abs(float(np.median(ratios)) - 1) <= CLOSE
