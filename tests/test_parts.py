"""Parts of a sweep: together they are all of it, nothing that is compared is torn apart, and merged they are one run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pyramidbench import sweep
from pyramidbench.cell import Cell
from pyramidbench.errors import UserError
from pyramidbench.merging import plan_merge, write_merged
from pyramidbench.parts import Part, parse_part
from pyramidbench.suite import load_suite, suite_from_flags

AXES: dict[str, Any] = {
    "seq": "128,256", "method": ["dense", "flat"], "top_k": "2", "block_size": "16", "query_tile": "16", "head_dim": "16",
}  # fmt: skip


def cells(**axes: Any) -> list[Cell]:
    return suite_from_flags(**(AXES | axes), input=["normal"]).cells()


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_the_parts_are_the_sweep_and_keep_its_order(count: int) -> None:
    whole = load_suite("prefill").cells()
    parts = [Part(number, count).of(whole) for number in range(1, count + 1)]
    assert Counter(cell.identity for part in parts for cell in part) == Counter(cell.identity for cell in whole)
    for part in parts:
        assert part == [cell for cell in whole if cell in part]


def test_cells_on_the_same_tensors_stay_together() -> None:
    whole = cells(pass_="forward,backward")
    first, second = (Part(number, 2).of(whole) for number in (1, 2))
    assert {cell.seq_len for cell in first} == {256}
    assert {cell.seq_len for cell in second} == {128}
    assert {cell.direction for cell in first} == {"forward", "backward"}


def test_the_longest_are_dealt_out_back_and_forth() -> None:
    whole = cells(seq="128..2k")
    lengths = [sorted({cell.seq_len for cell in Part(number, 2).of(whole)}) for number in (1, 2)]
    assert lengths == [[128, 256, 2048], [512, 1024]]


def test_more_parts_than_groups_are_refused() -> None:
    with pytest.raises(UserError, match=r"--part 3/3: the sweep has 2 groups .*accepted: at most 2 parts"):
        Part(3, 3).of(cells())


@pytest.mark.parametrize("text", ["0/2", "3/2", "2", "a/b", "1/0", "-1/2"])
def test_what_is_no_part_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=f"--part {text}: accepted: I/N"):
        parse_part(text)


def test_merged_parts_are_the_whole_run(tmp_path: Path) -> None:
    given: dict[str, Any] = AXES | {"input": "normal", "timing_s": 0.02, "device": "cpu"}
    runs = [sweep(**given, part=f"{number}/2", out=tmp_path / str(number)) for number in (1, 2)]
    assert [set(run.frame["seq_len"]) for run in runs] == [{256}, {128}]
    merged = write_merged(plan_merge(runs), tmp_path / "merged")
    planned = suite_from_flags(**AXES, input=["normal"]).cells()
    assert {record.cell for record in merged.records} == {cell.identity for cell in planned}
    assert merged.missing == 0
    assert set(merged.frame.loc[merged.frame["method"] == "flat", "speedup"].notna()) == {True}
