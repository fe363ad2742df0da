"""Reports: one self-contained page, escaped, honest about what is missing; a summary and a table beside it."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest

from pyramidbench.errors import UserError
from pyramidbench.frame import summarise
from pyramidbench.record import columns
from pyramidbench.report import command, write_report
from pyramidbench.verdict import Verdict, verdict

MANIFEST = {
    "name": "demo",
    "argv": ["bin/pyramidbench", "sweep", "demo", "--input", "my text.safetensors"],
    "created": "2026-01-02T03:04:05+00:00",
    "version": "0.1.0",
    "git": "abc1234",
}
DEVICE = {"kind": "cpu", "name": "Xeon", "memory_bytes": 8 << 30, "triton": None, "peak_bytes_per_s": 1.3e10}
HOSTILE = "<script>alert(1)</script>"


class Page(HTMLParser):
    """Collects tags, their attributes, and the text that a reader sees."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.seen: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] not in ("script", "style"):
            self.seen.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.seen).split())


@pytest.fixture(scope="module")
def report(shown_run: pd.DataFrame, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("reports") / "new" / "demo"
    files = write_report(shown_run, MANIFEST, DEVICE, out)
    assert sorted(files) == sorted(out.iterdir())
    return out


@pytest.fixture(scope="module")
def page(report: Path) -> Page:
    return Page((report / "report.html").read_text(encoding="utf-8"))


def judged(frame: pd.DataFrame) -> Verdict:
    return verdict(summarise(frame))


def test_the_folder_holds_page_pictures_summary_and_table(report: Path) -> None:
    names = {path.name for path in report.iterdir()}
    pictures = {f"{name}.png" for name in ("tradeoff", "quality", "scaling", "levels", "budget")}
    assert names == {"report.html", "summary.md", "results.csv"} | pictures
    assert (report / "report.html").stat().st_size < 3e6


def test_the_page_needs_no_network(report: Path, page: Page) -> None:
    for tag, attributes in page.tags:
        assert tag not in ("link", "iframe", "img", "object")
        for name in ("src", "href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith("#"), (tag, attributes)
    text = (report / "report.html").read_text(encoding="utf-8")
    assert "url(http" not in text
    assert "@import" not in text
    assert len([tag for tag, _ in page.tags if tag == "svg"]) == 5


def test_text_from_a_run_is_escaped_everywhere(report: Path, page: Page) -> None:
    assert HOSTILE in page.text
    for name in ("report.html", "summary.md"):
        assert "<script>alert" not in (report / name).read_text(encoding="utf-8")
    assert len([tag for tag, _ in page.tags if tag == "script"]) == 1


def test_the_order_is_verdict_figures_table_failures_method(page: Page) -> None:
    parts = [
        "is the fastest selection that keeps",
        "Figures",
        "All results",
        "Cells without a number",
        "How it was measured",
    ]
    places = [page.text.index(part) for part in parts]
    assert places == sorted(places)


def test_the_page_says_what_failed_and_how_to_repeat(page: Page) -> None:
    assert "predicted 4.2 min, over the 60 s of this sweep" in page.text
    assert "the worker was killed at 7.9 GiB" in page.text
    assert "pyramidbench sweep demo --input 'my text.safetensors'" in page.text
    assert "8.00 GiB" in page.text
    assert "13.0 GB/s" in page.text


def test_pictures_have_words_for_those_who_cannot_see_them(page: Page) -> None:
    said = [attributes["aria-label"] or "" for tag, attributes in page.tags if attributes.get("role") == "img"]
    assert len(said) == 5
    assert any("pyramid:fast 5.44×" in text for text in said)
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    used = re.findall(r'"#([^"]+)"', " ".join(f'"{attributes.get("xlink:href")}"' for _, attributes in page.tags))
    assert set(used) <= set(ids)


def test_a_missing_number_sorts_as_missing_and_never_shows_as_zero(page: Page) -> None:
    cells = [
        attributes.get("data-v") for tag, attributes in page.tags if tag in ("td", "th") and "data-v" in attributes
    ]
    assert "" in cells
    assert not {"nan", "None", "NaN"} & set(cells)
    assert "nan" not in page.text.lower().split()


def test_the_csv_has_a_row_per_cell_and_its_speedup(report: Path, shown_run: pd.DataFrame) -> None:
    table = pd.read_csv(report / "results.csv")
    assert list(table.columns) == [name for name in columns() if name != "backward_s"]
    assert len(table) == len(shown_run)
    assert table["top_k"].dropna().tolist() == shown_run["top_k"].dropna().tolist()
    assert ",8,2,64," in (report / "results.csv").read_text()
    fast = table[(table["method"] == "pyramid:fast") & (table["seq_len"] == 8192) & (table["query_tile"] == 64)]
    assert fast["speedup"].tolist() == pytest.approx([5.442177] * 2, rel=1e-6)
    assert table["recall_by_head"].dropna().str.startswith("[").all()


def test_the_summary_is_markdown_for_a_pull_request(report: Path) -> None:
    text = (report / "summary.md").read_text(encoding="utf-8")
    assert "![Speed-up against attention mass kept](tradeoff.png)" in text
    assert "| pyramid:fast | 8k | 64 | 8 | 2 |" in text
    assert "| flat | 2k |" not in text
    assert len(text) < 10_000


def test_the_verdict_names_method_pace_reference_and_rival(shown_run: pd.DataFrame) -> None:
    first, second = judged(shown_run).sentences
    assert "pyramid (K 8, tile 64) is the fastest selection that keeps 99.5 %" in first
    assert "2.20× the speed of dense (sdpa-flash, 103 ms)" in first
    assert "from 4k tokens on" in second
    assert "the best that is no pyramid: flat:exact (K 8, tile 64) keeps 99.6 % at 1.20×" in second


def test_the_verdict_admits_that_the_pyramid_loses(shown_run: pd.DataFrame) -> None:
    slow = shown_run["method"].str.startswith("pyramid")
    slower = shown_run.assign(latency_s=shown_run["latency_s"].where(~slow, shown_run["latency_s"].astype(float) * 3))
    first, second = judged(slower).sentences
    assert "flat:exact" in first
    assert "Pyramid Top-K loses here: pyramid (K 8, tile 64) keeps 99.5 % at 0.733×" in second


def test_the_verdict_admits_that_nothing_beats_dense(shown_run: pd.DataFrame) -> None:
    sparse = shown_run["kind"] != "dense"
    slower = shown_run.assign(latency_s=shown_run["latency_s"].where(~sparse, shown_run["latency_s"].astype(float) * 9))
    assert "no selection that keeps 99% of what exact Top-K keeps beats dense attention" in judged(slower).text


def test_the_verdict_says_what_is_faster_than_dense_where_the_good_ones_are_not(shown_run: pd.DataFrame) -> None:
    good = shown_run["mass_ratio"].astype(float) >= 0.99
    slower = shown_run.assign(latency_s=shown_run["latency_s"].where(~good, shown_run["latency_s"].astype(float) * 9))
    first, second = judged(slower).sentences
    assert "no selection that keeps 99%" in first
    assert second.startswith("What is faster keeps less: ")
    assert any(name in second for name in ("flat (", "pyramid:paper (", "sliding_window (", "pyramid:fast ("))


def test_the_verdict_without_quality_speaks_of_speed_and_says_so(shown_run: pd.DataFrame) -> None:
    unjudged = dict.fromkeys(("recall", "mass_kept", "mass_ratio", "mass_outside_forced", "output_error"))
    first, second = judged(shown_run.assign(**unjudged)).sentences
    assert "is the fastest selection: " in first
    assert "× the speed of dense" in first
    assert second == "Quality was not measured in this run, so it does not say what they miss."


def test_the_verdict_says_when_no_selection_is_good(shown_run: pd.DataFrame) -> None:
    text = judged(shown_run.assign(mass_ratio=shown_run["mass_ratio"].astype(float) * 0.9)).text
    assert "no selection keeps 99% of what exact Top-K keeps: the nearest, flat:exact" in text


def test_the_verdict_without_time_speaks_of_quality_only(shown_run: pd.DataFrame) -> None:
    first, second = judged(shown_run.assign(latency_s=None)).sentences
    assert first == "No cell was timed, so this run says nothing about speed."
    assert "pyramid (K 8, tile 64) finds 0.914" in second
    assert "no speed-up" in judged(shown_run[shown_run["kind"] != "dense"]).sentences[0]


def test_plain_dense_that_took_several_kernels_is_one_row(shown_run: pd.DataFrame) -> None:
    """Another layer may have another fastest kernel."""
    other = (shown_run["method"] == "dense") & (shown_run["layer"] == 20)
    mixed = summarise(shown_run.assign(backend=shown_run["backend"].where(~other, "sdpa-math")))
    dense = mixed[(mixed["method"] == "dense") & (mixed["status"] == "ok")]
    assert set(dense["backend"]) == {"sdpa-flash or sdpa-math"}
    assert set(dense["cells"]) == {2}
    assert len(mixed) == len(summarise(shown_run))


def test_on_hopper_a_run_without_flash_attention_3_or_4_says_so(shown_run: pd.DataFrame) -> None:
    hopper = shown_run.assign(device="NVIDIA H200")
    dense = (hopper["kind"] == "dense") & (hopper["method"] == "dense") & (hopper["status"] == "ok")
    assert "FlashAttention-3, the faster dense kernel" in " ".join(judged(hopper).caveats)
    for kernel in ("fa3", "fa4"):
        taken = hopper.assign(backend=hopper["backend"].where(~dense, kernel))
        assert "FlashAttention-3" not in " ".join(judged(taken).caveats)


def test_caveats_name_weak_numbers_and_inputs(shown_run: pd.DataFrame) -> None:
    notes = " ".join(judged(shown_run.assign(quality_source="structured")).caveats)
    assert "structured" in notes
    assert "fewer than 20 samples" in notes
    assert "6 cells gave no number" in notes
    assert "predicted 3.1 min" in notes
    assert "captured model" not in " ".join(judged(shown_run).caveats)


@pytest.mark.parametrize("rows", ["none", "failed", "dense"])
def test_a_run_without_selections_gives_a_report_that_says_so(
    shown_run: pd.DataFrame, rows: str, tmp_path: Path
) -> None:
    chosen = {
        "none": shown_run.iloc[:0],
        "failed": shown_run[shown_run["status"].isin(["oom", "skipped"])],
        "dense": shown_run[shown_run["kind"] == "dense"],
    }[rows]
    write_report(chosen, {"name": "empty"}, {}, tmp_path)
    text = Page((tmp_path / "report.html").read_text(encoding="utf-8")).text
    said = {
        "none": "This run is empty",
        "failed": "No cell of this run gave a number",
        "dense": "No selection method was",
    }
    assert said[rows] in text
    assert said[rows] in (tmp_path / "summary.md").read_text(encoding="utf-8")
    assert "not recorded" in text


def test_an_unwritable_folder_is_the_users_to_fix(shown_run: pd.DataFrame, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="give another folder"):
        write_report(shown_run.iloc[:0], MANIFEST, DEVICE, tmp_path / "file" / "report")


def test_the_command_is_what_one_types() -> None:
    assert command(["/usr/bin/pyramidbench", "list"]) == "pyramidbench list"
    assert command(["lib/pyramidbench/__main__.py", "list"]) == "pyramidbench list"
    assert command(["sweep", "--out", "a b"]) == "pyramidbench sweep --out 'a b'"
