"""Fixtures of the browser tests: headless Chromium with the network off, and reports to open in it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from pyramidbench.reporting.write import Source, write_report

FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
MANIFEST = {
    "name": "demo",
    "argv": ["pyramidbench", "sweep", "demo", "--input", "text.safetensors"],
    "version": "0.1.0",
}
DEVICE = {"kind": "cpu", "name": "Xeon", "peak_flops_per_s": 2e11, "peak_bytes_per_s": 4e10}


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Debian's chromium, or the one of that name on the path, without a profile of its own."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        pytest.skip("no chromium on this machine; .ci/run installs Debian's")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=found, headless=True, args=list(FLAGS))
        yield started
        started.close()


@pytest.fixture(scope="session")
def page_file(shown_run: pd.DataFrame, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run that has everything: failures, gaps, levels, budgets, heads, a method called <script>."""
    out = tmp_path_factory.mktemp("report")
    write_report([Source(shown_run, MANIFEST, DEVICE)], out)
    return out / "report.html"


@pytest.fixture(scope="session")
def large_page_file(large_run: pd.DataFrame, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of 500 cells."""
    out = tmp_path_factory.mktemp("large")
    write_report([Source(large_run, MANIFEST, DEVICE)], out)
    return out / "report.html"


@pytest.fixture
def opened(browser: Browser, page_file: Path) -> Iterator[Page]:
    """The page, drawn, on a screen of 1280 × 900, with the network off; no test passes with an error on the console."""
    context = browser.new_context(offline=True, viewport={"width": 1280, "height": 900}, color_scheme="light")
    page = context.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: said.append(f"error: {error}"))
    page.on("request", lambda request: said.append(f"request: {request.url}") if "file:" not in request.url else None)
    page.goto(page_file.as_uri())
    page.wait_for_selector("body[data-drawn]", timeout=60_000)
    yield page
    context.close()
    assert [line for line in said if not line.startswith("request: blob:")] == []
