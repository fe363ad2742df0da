"""Reports: one self-contained page, escaped, honest about what is missing; a summary and a table beside it."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest

from pyramidbench.errors import UserError
from pyramidbench.frame import summarise
from pyramidbench.record import columns
from pyramidbench.reporting.facts import command
from pyramidbench.reporting.write import Source, write_report

MANIFEST = {
    "name": "demo",
    "argv": ["bin/pyramidbench", "sweep", "demo", "--input", "my text.safetensors"],
    "created": "2026-01-02T03:04:05+00:00",
    "version": "0.1.0",
    "git": "abc1234",
}
DEVICE = {
    "kind": "cpu", "name": "Xeon", "memory_bytes": 8 << 30, "triton": None, "peak_bytes_per_s": 1.3e10,
    "peak_flops_per_s": 2e11,
}  # fmt: skip
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
    files = write_report([Source(shown_run, MANIFEST, DEVICE)], out)
    assert sorted(files) == sorted(out.iterdir())
    return out


@pytest.fixture(scope="module")
def page(report: Path) -> Page:
    return Page((report / "report.html").read_text(encoding="utf-8"))


PICTURES = ("tradeoff", "scaling", "stages", "stages-levels", "memory", "quality", "recall-length", "budget", "levels", "heads",
            "roofline")  # fmt: skip


def test_the_folder_holds_page_pictures_summary_and_table(report: Path) -> None:
    names = {path.name for path in report.iterdir()}
    pictures = {f"{name}.{kind}" for name in PICTURES for kind in ("png", "svg")}
    assert names == {"report.html", "summary.md", "results.csv"} | pictures
    assert (report / "report.html").stat().st_size < 1e6


def test_the_page_needs_no_network(report: Path, page: Page) -> None:
    for tag, attributes in page.tags:
        assert tag not in ("link", "iframe", "img", "object")
        for name in ("src", "href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith("#"), (tag, attributes)
    text = (report / "report.html").read_text(encoding="utf-8")
    assert "url(http" not in text
    assert "@import" not in text
    policy = next(a["content"] for tag, a in page.tags if tag == "meta" and a.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "unsafe-eval" not in policy


def test_text_from_a_run_is_escaped_everywhere(report: Path, page: Page) -> None:
    assert HOSTILE in page.text
    for path in report.iterdir():
        if path.suffix != ".png" and path.name != "results.csv":
            assert "<script>alert" not in path.read_text(encoding="utf-8"), path.name
    assert [attributes.get("type") for tag, attributes in page.tags if tag == "script"] == [
        "application/json", "text/plain", None,
    ]  # fmt: skip


def test_the_data_of_the_page_is_json_and_names_every_row_once(report: Path, shown_run: pd.DataFrame) -> None:
    text = (report / "report.html").read_text(encoding="utf-8")
    data = json.loads(re.search(r'id="data">(.*?)</script>', text)[1])  # type: ignore[index]
    assert list(data["charts"]) == list(PICTURES)
    assert len(data["cells"]) == len(summarise(shown_run))
    assert {cell["title"] for cell in data["cells"]} >= {HOSTILE, "exact_topk (bound)"}


def test_the_order_is_the_questions_that_a_reader_has(page: Page) -> None:
    parts = [
        "is the fastest selection that keeps", "Speed-up against attention mass kept", "Time of one attention call by length",
        "Where the time goes, by length", "Peak memory of a call", "What each method finds at an equal budget",
        "Arithmetic rate beside", "What the columns mean", "was killed at 7.9 GiB", "peak bandwidth",
    ]  # fmt: skip
    places = [page.text.rindex(part) for part in parts]
    assert places == sorted(places)


def test_the_page_says_what_failed_and_how_to_repeat(page: Page) -> None:
    assert "predicted 4.2 min, over the 60 s of this sweep" in page.text
    assert "the worker was killed at 7.9 GiB" in page.text
    assert "pyramidbench sweep demo --input 'my text.safetensors'" in page.text
    assert "8.00 GiB" in page.text
    assert "13.0 GB/s" in page.text


def test_pictures_have_words_for_those_who_cannot_see_them(page: Page) -> None:
    said = [attributes["aria-label"] or "" for tag, attributes in page.tags if attributes.get("role") == "img"]
    assert len(said) >= len(PICTURES)
    assert all(text.strip(" ,:") for text in said)
    assert "pyramid:fast 5.44×" in page.text
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_the_end_of_a_log_stands_beside_the_cell_that_left_it(shown_run: pd.DataFrame, tmp_path: Path) -> None:
    lost = shown_run[shown_run["status"] == "oom"]
    (tmp_path / "run" / "logs").mkdir(parents=True)
    log = "\n".join([*(f"line {i}" for i in range(40)), "MemoryError: <b>no room</b>"])
    (tmp_path / "run" / "logs" / f"{lost['cell'].iloc[0]}.txt").write_text(log)
    write_report([Source(lost, MANIFEST, DEVICE, tmp_path / "run")], tmp_path / "report")
    text = (tmp_path / "report" / "report.html").read_text()
    assert "MemoryError: &lt;b&gt;no room&lt;/b&gt;" in text
    assert "line 39" in text
    assert "line 5\n" not in text


def test_two_runs_stand_side_by_side_each_with_its_own_facts(shown_run: pd.DataFrame, tmp_path: Path) -> None:
    small = shown_run[shown_run["seq_len"] == 4096]
    other = small.assign(device="H200")
    sources = [Source(small, MANIFEST, DEVICE), Source(other, MANIFEST, {**DEVICE, "name": "H200"})]
    write_report(sources, tmp_path)
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "2 runs side by side" in page.text
    assert page.text.count("How it was measured") == 1
    assert (tmp_path / "tradeoff-2.png").is_file()
    table = pd.read_csv(tmp_path / "results.csv")
    assert table["run"].value_counts().to_dict() == {"demo, Xeon": len(small), "demo, H200": len(small)}
    summary = (tmp_path / "summary.md").read_text()
    assert "### demo, Xeon" in summary
    assert "### demo, H200" in summary


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


@pytest.mark.parametrize("rows", ["none", "failed", "dense"])
def test_a_run_without_selections_gives_a_report_that_says_so(
    shown_run: pd.DataFrame, rows: str, tmp_path: Path
) -> None:
    chosen = {
        "none": shown_run.iloc[:0],
        "failed": shown_run[shown_run["status"].isin(["oom", "skipped"])],
        "dense": shown_run[shown_run["kind"] == "dense"],
    }[rows]
    write_report([Source(chosen, {"name": "empty"}, {})], tmp_path)
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
        write_report([Source(shown_run.iloc[:0], MANIFEST, DEVICE)], tmp_path / "file" / "report")


def test_the_command_is_what_one_types() -> None:
    assert command(["/usr/bin/pyramidbench", "list"]) == "pyramidbench list"
    assert command(["lib/pyramidbench/__main__.py", "list"]) == "pyramidbench list"
    assert command(["sweep", "--out", "a b"]) == "pyramidbench sweep --out 'a b'"
