"""The report's page in headless Chromium, from a file URL with the network off: what a reader can see and do there."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Locator, Page

pytestmark = pytest.mark.browser
SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"
"""Where screenshots are left to be looked at; git ignores it."""
HOSTILE = "<script>alert(1)</script>"
MARKS = "[role=img] svg .mark-symbol path, [role=img] svg .mark-rect path"
SERIOUS = ("serious", "critical")


def first_column(page: Page) -> list[str]:
    return page.locator("table.results tbody tr:not([hidden]) th").all_inner_texts()


def column(page: Page, key: str) -> list[str]:
    """Values of a column of the rows that are shown, from top to bottom."""
    place = page.locator("table.results thead th").evaluate_all(
        "(heads, key) => heads.findIndex((h) => h.dataset.key === key)", key
    )
    rows = page.locator("table.results tbody tr:not([hidden])")
    return rows.evaluate_all("(rows, place) => rows.map((row) => row.cells[place].dataset.v)", place)


def tip(page: Page) -> Locator:
    return page.locator("#tip")


def point_at(page: Page, figure: str, cell: str) -> None:
    """Move the mouse onto the first mark of a figure whose row is named so."""
    chart = page.locator(f"#figure-{figure} .charts").last
    chart.scroll_into_view_if_needed()
    found = chart.evaluate(
        """(place, name) => {
          const report = JSON.parse(document.getElementById("data").textContent);
          const hit = [...place.querySelectorAll(".mark-symbol path")].find((path) => {
            const datum = path.__data__ && path.__data__.datum;
            return datum && datum.cell !== undefined && report.cells[datum.cell].title === name;
          });
          const box = hit.getBoundingClientRect();
          return [box.x + box.width / 2, box.y + box.height / 2];
        }""",
        cell,
    )
    page.mouse.move(*found)


def test_every_chart_is_drawn(opened: Page) -> None:
    charts = opened.locator(".chart")
    assert charts.count() > 20
    assert opened.locator(".chart svg").count() == charts.count()
    empty = charts.evaluate_all(
        "(all) => all.filter((c) => !c.querySelector('.mark-symbol path, .mark-rect path')).length"
    )
    assert empty == 0
    assert opened.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_method_called_script_shows_as_text(opened: Page) -> None:
    assert HOSTILE in first_column(opened)
    assert opened.locator(f"button[data-pick='{HOSTILE}']").first.inner_text() == HOSTILE
    point_at(opened, "scaling", HOSTILE)
    assert tip(opened).locator("b").inner_text() == HOSTILE


def test_a_column_sorts_both_ways_with_missing_numbers_last(opened: Page) -> None:
    head = opened.locator("table.results th[data-key=speedup] button")
    head.click()
    assert opened.locator("table.results th[data-key=speedup]").get_attribute("aria-sort") == "descending"
    falling = column(opened, "speedup")
    known = [float(value) for value in falling if value]
    assert known == sorted(known, reverse=True)
    assert "" in falling
    assert set(falling[len(known) :]) == {""}
    head.press("Enter")
    rising = column(opened, "speedup")
    assert [float(value) for value in rising if value] == sorted(known)
    assert rising[-1] == ""


def test_words_and_choices_filter_the_rows(opened: Page) -> None:
    everything = len(first_column(opened))
    opened.get_by_label("Filter", exact=True).fill("pyramid 8k")
    shown = first_column(opened)
    assert 0 < len(shown) < everything
    assert all("pyramid" in name for name in shown)
    assert set(column(opened, "seq_len_kv")) == {"8192"}
    assert opened.locator("#shown").inner_text() == f"{len(shown)} of {everything} rows"
    opened.get_by_label("Filter", exact=True).fill("")
    opened.locator("select[data-filter='0']").select_option("flat")
    opened.locator("select[data-filter='1']").select_option("4k")
    assert set(first_column(opened)) == {"flat"}
    opened.get_by_label("Filter", exact=True).fill("no such thing")
    assert first_column(opened) == []


def test_the_csv_holds_the_rows_that_are_shown(opened: Page, tmp_path: Path) -> None:
    opened.locator("select[data-filter='0']").select_option(HOSTILE)
    shown = len(first_column(opened))
    with opened.expect_download() as download:
        opened.get_by_role("button", name="Download CSV").click()
    download.value.save_as(tmp_path / "shown.csv")
    with (tmp_path / "shown.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == shown > 0
    assert {row["label"] for row in rows} == {HOSTILE}
    assert all(float(row["latency_s"]) < 1 for row in rows)


def test_pointing_at_a_mark_tells_the_cell_and_its_command(opened: Page) -> None:
    point_at(opened, "tradeoff", "pyramid:fast")
    text = tip(opened).inner_text()
    assert "1.81×" in text
    assert re.search(r"pyramidbench sweep --seq 8192 --method pyramid:fast .*--top-k 8 .*--query-tile 1", text)
    opened.keyboard.press("Escape")
    assert tip(opened).is_hidden()


def test_pointing_at_the_end_of_a_line_tells_why_it_ends(opened: Page) -> None:
    chart = opened.locator("#figure-scaling .charts").last
    chart.scroll_into_view_if_needed()
    place = chart.evaluate(
        """(chart) => {
          const ends = [...chart.querySelectorAll(".mark-symbol path")]
            .filter((path) => path.__data__ && path.__data__.datum && path.__data__.datum.part === "end");
          const box = ends[0].getBoundingClientRect();
          return [box.x + box.width / 2, box.y + box.height / 2];
        }"""
    )
    opened.mouse.move(*place)
    assert re.search(r"skipped: predicted \d", tip(opened).inner_text())


def test_a_key_picks_a_method_out_in_every_chart(opened: Page) -> None:
    button = opened.locator("#figure-scaling button[data-pick=flat]")
    button.press("Enter")
    assert opened.locator("button[data-pick=flat][aria-pressed=true]").count() > 3
    faded = "(paths) => paths.filter((path) => Number(getComputedStyle(path).opacity) < 0.2).length"
    opened.wait_for_function(
        "() => document.querySelectorAll('#figure-memory .mark-symbol path[opacity=\"0.1\"]').length > 5"
    )
    opened.keyboard.press("Escape")
    opened.wait_for_function("() => !document.querySelector('.mark-symbol path[opacity=\"0.1\"]')")
    assert opened.locator(MARKS).evaluate_all(faded) == 0


def test_the_data_of_a_figure_opens_as_a_table(opened: Page) -> None:
    details = opened.locator("#figure-tradeoff details.data")
    details.locator("summary").press("Enter")
    rows = details.locator("tbody tr")
    rows.first.wait_for()
    assert rows.count() > 10
    assert HOSTILE in details.inner_text()


def test_the_theme_follows_the_system_and_the_button(browser: Browser, page_file: Path) -> None:
    context = browser.new_context(offline=True, color_scheme="dark")
    page = context.new_page()
    page.goto(page_file.as_uri())
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(ground)
    button = page.locator("#theme")
    assert button.inner_text() == "Light theme"
    button.press("Enter")
    light = page.evaluate(ground)
    assert sum(map(int, re.findall(r"\d+", dark))) < 100 < 600 < sum(map(int, re.findall(r"\d+", light)))
    assert button.inner_text() == "Dark theme"
    page.wait_for_selector(".chart svg .mark-text text")
    ink = "getComputedStyle(document.querySelector('#figure-scaling .role-axis-label text')).fill"
    page.wait_for_selector("#figure-scaling .role-axis-label text")
    assert page.evaluate(ink) == "rgb(22, 25, 29)"
    button.click()
    assert page.evaluate(ink) == "rgb(236, 239, 242)"
    context.close()


@pytest.mark.parametrize(
    ("scheme", "width"), [("light", 1280), ("dark", 1280), ("light", 390)], ids=["light", "dark", "phone"]
)
def test_an_accessibility_scan_finds_nothing_serious(
    browser: Browser, page_file: Path, scheme: str, width: int
) -> None:
    context = browser.new_context(offline=True, color_scheme=scheme, viewport={"width": width, "height": 900})  # type: ignore[arg-type]
    page = context.new_page()
    page.goto(page_file.as_uri())
    page.wait_for_selector("body[data-drawn]", timeout=60_000)
    for details in page.locator("details").all():
        details.evaluate("(details) => { details.open = true; }")
    found = Axe().run(page).response["violations"]
    assert [(one["id"], one["nodes"][0]["html"][:200]) for one in found if one["impact"] in SERIOUS] == []
    context.close()


def test_everything_that_can_be_pressed_is_reached_by_the_keyboard(opened: Page) -> None:
    reached = set()
    for _ in range(60):
        opened.keyboard.press("Tab")
        reached.add(
            opened.evaluate(
                "document.activeElement.id || document.activeElement.dataset.pick || document.activeElement.textContent"
            )
        )
    assert {"Skip to the report", "theme", "flat", "pyramid:fast", "Data of this figure"} <= reached
    assert opened.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"


@pytest.mark.parametrize("look", ["light", "dark", "phone", "print"])
def test_screenshots_to_be_looked_at(browser: Browser, page_file: Path, look: str) -> None:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    width = {"phone": 390, "print": 794}.get(look, 1280)
    context = browser.new_context(
        offline=True,
        color_scheme="dark" if look in ("dark", "print") else "light",
        viewport={"width": width, "height": 900},
    )
    page = context.new_page()
    page.goto(page_file.as_uri())
    page.wait_for_selector("body[data-drawn]", timeout=60_000)
    if look == "print":
        page.emulate_media(media="print")
        page.pdf(path=SCREENSHOTS / "print.pdf", format="A4", prefer_css_page_size=True)
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert page.locator("nav").is_hidden()
        # A head that is repeated on the next sheet loses its buttons, so it prints the same words as text.
        head = page.locator("table.results th").nth(1)
        assert head.locator("button").is_hidden()
        assert head.locator(".printed").is_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    overflow = page.locator(".chart svg").evaluate_all(
        "(all) => all.filter((svg) => svg.getBoundingClientRect().right > innerWidth + 1).length"
    )
    assert overflow == 0
    page.screenshot(path=SCREENSHOTS / f"{look}.png", full_page=True)
    assert (SCREENSHOTS / f"{look}.png").stat().st_size > 50_000
    context.close()


def test_a_page_of_500_cells_is_usable_within_two_seconds(browser: Browser, large_page_file: Path) -> None:
    """By the page's own clock: when its table is there and sorts, while the charts are still being drawn."""
    context = browser.new_context(offline=True, viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.add_init_script(
        """addEventListener("DOMContentLoaded", () => {
          document.querySelector("table.results th[data-key=recall] button").click();
          window.sortedAt = document.querySelector("th[aria-sort=descending]") ? performance.now() : Infinity;
          window.drawnThen = document.querySelectorAll(".chart svg").length;
        });"""
    )
    page.goto(large_page_file.as_uri())
    page.wait_for_selector("body[data-drawn]", timeout=60_000)
    assert page.evaluate("window.sortedAt") < 2000
    assert page.evaluate("window.drawnThen") == 0
    context.close()
