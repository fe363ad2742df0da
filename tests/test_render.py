"""What is printed: plain aligned ASCII away from a terminal, tables that fit in one, nothing a run's text could break."""

from __future__ import annotations

import io
from dataclasses import dataclass

import pandas as pd
import pytest
from rich.console import Console

from pyramidbench.cell import Cell
from pyramidbench.errors import UserError
from pyramidbench.render import show_plan, show_recall, show_results, show_table
from pyramidbench.units import duration, interval, percent, ratio, share, significant, tokens


@pytest.fixture
def plain() -> Console:
    return Console(file=io.StringIO(), width=80)


def terminal(width: int, *, colour: bool = False) -> Console:
    return Console(file=io.StringIO(), width=width, force_terminal=True, color_system="standard" if colour else None)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture(scope="module")
def tile_rows(shown_run: pd.DataFrame) -> pd.DataFrame:
    return shown_run[(shown_run["query_tile"] != 1) & (shown_run["seq_len"] <= 8192)]


def table_lines(text: str) -> list[str]:
    """Header and rows of the first plain table."""
    lines = text.splitlines()
    return lines[1 : next(i for i, line in enumerate(lines) if line.startswith("Speed-up is"))]


def test_plain_output_is_ascii_with_one_header_and_nothing_cut(plain: Console, tile_rows: pd.DataFrame) -> None:
    show_results(plain, tile_rows)
    text = printed(plain)
    assert text.isascii()
    lines = table_lines(text)
    assert text.count("mass kept  outside forced") == 1
    assert len({len(line) for line in lines}) == 1
    assert all(len(line) > 100 for line in lines)
    assert any(line.startswith("pyramid:fast") and "19.0 +-0.7" in line and "5.44x" in line for line in lines)


def test_rows_go_by_length_dense_first_then_by_mass(plain: Console, tile_rows: pd.DataFrame) -> None:
    show_results(plain, tile_rows[(tile_rows["top_k"] != 4) & (tile_rows["top_k"] != 16)])
    rows = [line.split() for line in table_lines(printed(plain))[1:]]
    at_4k = [cells[0] for cells in rows if "4k" in cells]
    assert at_4k[:4] == ["dense", "dense:math", "exact_topk", "flat:exact"]
    assert at_4k[-1] == "random_blocks"
    lengths = [next(cell for cell in cells if cell in ("2k", "4k", "8k")) for cells in rows]
    assert lengths == sorted(lengths)


def test_weak_missing_and_failed_show_as_such(plain: Console, shown_run: pd.DataFrame) -> None:
    show_results(plain, shown_run)
    text = printed(plain)
    assert "~40.7 +-1.4" in text
    assert "Times marked ~ rest on fewer than 20 samples." in text
    untimed = next(line for line in text.splitlines() if line.startswith("exact_topk (bound)") and "  1   8" in line)
    assert untimed.split().count("-") == 2
    assert "the worker was killed at 7.9 GiB" in text
    assert (
        "Speed-up is against the fastest dense method: dense by sdpa-flash (2k, 4k, 8k). Device: Xeon 8481C, 2 threads."
        in text
    )
    assert "recall: share of the exact Top-K blocks that was chosen" in text


def test_no_dense_is_said(plain: Console, shown_run: pd.DataFrame) -> None:
    show_results(plain, shown_run[shown_run["kind"] != "dense"])
    assert "No speed-up: no dense method was timed beside these rows." in printed(plain)


def test_an_empty_run_and_a_failed_one_are_said(plain: Console, shown_run: pd.DataFrame) -> None:
    show_results(plain, shown_run.iloc[:0])
    assert printed(plain).strip() == "This run holds no cell."
    show_results(plain, shown_run[shown_run["status"] == "oom"])
    assert "No cell gave a number." in printed(plain)


@pytest.mark.parametrize("width", [100, 120, 200])
def test_a_terminal_gets_a_table_that_fits(tile_rows: pd.DataFrame, width: int) -> None:
    console = terminal(width)
    show_results(console, tile_rows)
    text = printed(console)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert "5.44×" in text
    assert ("Left out for want of width" in text) == (width < 140)


def test_bounds_are_dimmed_and_marked(tile_rows: pd.DataFrame) -> None:
    console = terminal(200, colour=True)
    show_results(console, tile_rows)
    line = next(line for line in printed(console).splitlines() if "exact_topk (bound)" in line)
    assert "\x1b[2m" in line


def test_text_of_a_run_is_neither_markup_nor_control(plain: Console, tile_rows: pd.DataFrame) -> None:
    renamed = tile_rows.assign(method=tile_rows["method"].str.replace("pyramid:paper", "[red]a\x1b[31m\nb"))
    for console in (plain, terminal(220)):
        show_results(console, renamed)
        text = printed(console)
        assert "[red]a [31m b" in text
        assert "\x1b[31m" not in text


def test_recall_by_levels_leads_with_levels_and_keeps_lengths_apart(plain: Console, shown_run: pd.DataFrame) -> None:
    show_recall(plain, shown_run[shown_run["method"] == "pyramid"], ["levels"])
    head, *rows = printed(plain).partition("\nlevels: ")[0].splitlines()[1:]
    assert head.split()[:3] == ["levels", "method", "N"]
    levels = [int(row.split()[0]) for row in rows]
    assert levels == sorted(levels)
    assert {row.split()[2] for row in rows} == {"2k", "4k", "8k", "16k"}


def test_recall_by_head_and_layer_shows_each(plain: Console, shown_run: pd.DataFrame) -> None:
    one = shown_run[(shown_run["method"] == "flat") & (shown_run["seq_len"] == 4096) & (shown_run["query_tile"] == 64)]
    show_recall(plain, one, ["layer", "head"])
    rows = [line.split() for line in printed(plain).splitlines()[2:8]]
    assert [(row[0], row[1]) for row in rows] == [(layer, head) for layer in ("0", "20") for head in ("0", "1", "2")]
    wanted = [value for values in one.sort_values("layer")["recall_by_head"] for value in values]
    assert [row[-2] for row in rows] == [f"{value:.3f}" for value in wanted]


def test_recall_refuses_an_unknown_breakdown(plain: Console, shown_run: pd.DataFrame) -> None:
    with pytest.raises(UserError, match="Did you mean 'layer'"):
        show_recall(plain, shown_run, ["layers"])
    show_recall(plain, shown_run.assign(recall=None), ["layer"])
    assert printed(plain).strip() == "No row has a recall."


@dataclass(frozen=True)
class Planned:
    cell: Cell
    verdict: str
    reason: str | None
    seconds: float | None
    memory_bytes: float | None


def test_the_plan_shows_verdicts_and_the_sum(plain: Console) -> None:
    cell = Cell(method="pyramid", parameters={"top_k": 8}, seq_len=4096, seq_len_kv=4096)
    planned = [
        Planned(cell, "run", None, 90.0, 2.0**20),
        Planned(cell, "run", None, 100.0, 2.0**21),
        Planned(cell, "skipped", "predicted 2 h exceeds 60 s", 7200.0, 2.0**30),
        Planned(cell, "unsupported", "needs a CUDA device", None, None),
    ]
    show_plan(plain, planned)
    text = printed(plain)
    assert "2 of 4 cells run, in about 3.2 min, 1 skipped, 1 unsupported." in text
    assert "pyramid  top_k=8     4k" in text
    assert "predicted 2 h exceeds 60 s" in text


def test_a_table_aligns_numbers_right_and_drops_empty_columns(plain: Console) -> None:
    show_table(plain, "Inputs", [["a", "9", ""], ["bcd", "10", ""]], ["name", "count", "note"])
    assert printed(plain).splitlines() == ["# Inputs", "name  count", "a         9", "bcd      10"]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (significant(0.01234), "0.0123"),
        (significant(12345.6), "12346"),
        (tokens(8192), "8k"),
        (tokens(1000), "1000"),
        (tokens(None), "–"),
        (interval(0.0123, 0.0119, 0.0127), "12.3 ±0.4"),
        (interval(0.0123, None, None), "12.3"),
        (interval(0.0123, 0.01229, 0.01231), "12.3 ±0.01"),
        (interval(float("nan"), 1, 2), "–"),
        (share(0.0001), "<0.001"),
        (share(0.0), "0.000"),
        (percent(0.9996), "99.9 %"),
        (percent(1.0), "100 %"),
        (ratio(float("nan")), "–"),
        (ratio(0.3333), "0.333×"),
        (duration(90), "90 s"),
        (duration(11160), "3.1 h"),
    ],
)
def test_units(text: str, wanted: str) -> None:
    assert text == wanted
