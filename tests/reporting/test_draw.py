"""Static figures: every one can be drawn, as PNG and SVG, for a screen and for a paper, the same each time."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from pyramidbench.reporting.draw import save
from pyramidbench.reporting.evidence import Evidence, Source
from pyramidbench.reporting.figure import Figure
from pyramidbench.reporting.figures import figures

NAMES = ("tradeoff", "scaling", "stages", "memory", "quality", "heads", "roofline")


@pytest.fixture(scope="module")
def drawn(shown_run: pd.DataFrame) -> dict[str, Figure]:
    device = {"kind": "cpu", "peak_flops_per_s": 2e11, "peak_bytes_per_s": 4e10}
    found = figures(Evidence([Source(shown_run, {}, device)]))
    return {figure.name: figure for figure in found if isinstance(figure, Figure)}


def colours(path: Path) -> set[tuple[int, ...]]:
    pixels = np.asarray(Image.open(path).convert("RGB")).reshape(-1, 3)
    return {tuple(int(part) for part in pixel) for pixel in np.unique(pixels, axis=0)}


def rgb(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))


@pytest.mark.parametrize("name", NAMES)
def test_a_figure_is_drawn_as_png_and_svg(drawn: dict[str, Figure], name: str, tmp_path: Path) -> None:
    png, svg = save(drawn[name], tmp_path)
    with Image.open(png) as image:
        assert image.width == 1280
        assert image.info["dpi"] == pytest.approx((160, 160), abs=0.1)
    seen = colours(png)
    wanted = {rgb(look.colour) for look in drawn[name].series.values()} if name not in ("stages", "heads") else set()
    assert {(255, 255, 255), (22, 25, 29), *wanted} <= seen
    root = ElementTree.fromstring(svg.read_text())
    assert root.get("width") == "8in"
    assert "script" not in {element.tag.rpartition("}")[2] for element in root.iter()}


def test_a_papers_figure_is_as_wide_as_two_columns_and_leaves_the_title_to_the_caption(
    drawn: dict[str, Figure], tmp_path: Path
) -> None:
    screen, paper = tmp_path / "screen", tmp_path / "paper"
    screen.mkdir()
    paper.mkdir()
    (on_screen, _), (png, svg) = save(drawn["scaling"], screen), save(drawn["scaling"], paper, "paper")
    with Image.open(png) as image, Image.open(on_screen) as larger:
        assert (image.width, image.info["dpi"][0]) == (2800, pytest.approx(400, abs=0.1))
        assert image.height / image.width < larger.height / larger.width
    assert ElementTree.fromstring(svg.read_text()).get("width") == "7in"


def test_a_figure_is_drawn_the_same_twice(drawn: dict[str, Figure], tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        save(drawn["quality"], folder)
    for name in ("quality.png", "quality.svg"):
        assert (first / name).read_bytes() == (second / name).read_bytes()
