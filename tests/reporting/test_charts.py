"""Interactive charts: every specification is valid Vega-Lite, holds the figure's data, and says what each mark is."""

from __future__ import annotations

import json
import shlex

import altair as alt
import pandas as pd
import pytest

from pyramidbench.frame import summarise
from pyramidbench.reporting.chart_looks import SHAPES
from pyramidbench.reporting.chart_parts import ROWS
from pyramidbench.reporting.charts import charts
from pyramidbench.reporting.evidence import Evidence, Source
from pyramidbench.reporting.figure import Figure
from pyramidbench.reporting.figures import figures
from pyramidbench.reporting.hover import cell_texts, repeat
from pyramidbench.reporting.page import PATHS, embedded
from pyramidbench.reporting.palette import BOUND_MARKERS, DENSE_MARKERS, FAVOURED, MARKERS
from pyramidbench.suite import suite_from_flags

NAMES = ("tradeoff", "scaling", "stages", "stages-levels", "memory", "quality", "recall-length", "budget", "levels", "heads",
         "roofline")  # fmt: skip


@pytest.fixture(scope="module")
def evidence(shown_run: pd.DataFrame) -> Evidence:
    device = {"kind": "cpu", "peak_flops_per_s": 2e11, "peak_bytes_per_s": 4e10}
    argv = ["pyramidbench", "sweep", "demo", "--input", "my text.safetensors"]
    return Evidence([Source(shown_run, {"argv": argv}, device)])


@pytest.fixture(scope="module")
def drawn(evidence: Evidence) -> dict[str, Figure]:
    return {figure.name: figure for figure in figures(evidence) if isinstance(figure, Figure)}


@pytest.mark.parametrize("name", NAMES)
def test_a_chart_is_valid_vega_lite_with_the_figures_data(drawn: dict[str, Figure], name: str) -> None:
    made = charts(drawn[name])
    for chart in made:
        alt.LayerChart.from_dict(chart.spec, validate=True)
    rows = [row for chart in made for row in chart.spec["datasets"][ROWS]]
    assert len(rows) == len(drawn[name].data)
    assert {row["cell"] for row in rows} == set(drawn[name].data["cell"])
    assert "NaN" not in json.dumps([chart.spec for chart in made])


def test_the_trade_off_stands_by_nines_and_names_the_frontier_of_a_crowd(shown_run: pd.DataFrame) -> None:
    """Between 0.98 and 0.99 lies about as much as between 0.8 and 0.9: on a straight axis most methods lie on one another."""
    flat = shown_run[(shown_run["method"] == "flat") & (shown_run["query_tile"] == 64)]
    more = [flat.assign(method=f"flat{i}", mass_kept=0.5 + 0.01 * i) for i in range(6)]
    found = figures(Evidence([Source(pd.concat([shown_run, *more], ignore_index=True), {}, {})]))
    figure = next(figure for figure in found if figure.name == "tradeoff")
    assert isinstance(figure, Figure)
    spec = charts(figure)[-1].spec
    at = {row["x"]: row["at"] for row in spec["datasets"][ROWS]}
    assert sorted(at, key=lambda x: at[x]) == sorted(at)
    assert at[1.0] - at[max(x for x in at if x < 1)] > 1 - max(x for x in at if x < 1)
    written = [layer for layer in spec["layer"] if layer["mark"]["type"] == "text"]
    names = {row["shown"] for layer in written for row in spec["datasets"][layer["data"]["name"]]} if written else set()
    tile = figure.data[figure.data["panel"].str.startswith("tile")]
    assert names == set(tile.loc[tile["frontier"], "shown"])


def test_colours_are_variables_that_the_page_sets(drawn: dict[str, Figure]) -> None:
    text = json.dumps([chart.spec for chart in charts(drawn["scaling"])])
    assert "var(--c0072b2)" in text
    assert "#" not in text


def test_every_marker_has_a_symbol_and_a_path() -> None:
    used = {marker for _, marker in FAVOURED.values()} | set(MARKERS) | set(BOUND_MARKERS) | set(DENSE_MARKERS)
    assert used <= set(SHAPES) == set(PATHS)
    assert len(set(PATHS.values())) == len(PATHS)


def test_embedded_data_cannot_end_its_element() -> None:
    text = embedded({"a": "</script><!-- & \u2028"})
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {"a": "</script><!-- & \u2028"}


def test_a_cell_says_its_numbers_or_its_reason(evidence: Evidence) -> None:
    texts = dict(
        zip(
            zip(evidence.summary["label"], evidence.summary["seq_len"], evidence.summary["query_tile"]),
            cell_texts(evidence),
        )
    )
    lost = texts["flat:exact", 8192, 1]
    assert (lost.status, lost.reason, lost.numbers) == ("oom", "the worker was killed at 7.9 GiB", ())
    assert dict(texts["pyramid:fast", 4096, 64].numbers)["speed-up"] == "2.88×"


def test_the_command_of_a_cell_measures_that_cell(shown_run: pd.DataFrame) -> None:
    row = summarise(shown_run[(shown_run["method"] == "pyramid") & (shown_run["levels"] == 4)]).iloc[0].to_dict()
    given, remark = repeat({**row, "layers": None, "input": "topics"}, [])
    words = dict(zip(*[iter(shlex.split(given)[2:])] * 2))
    assert remark == ""
    flags = {name.strip("-").replace("-", "_"): value for name, value in words.items()}
    suite = suite_from_flags(**{**flags, "method": [flags["method"]], "input": [flags["input"]]})  # type: ignore[arg-type]
    (cell,) = suite.cells()
    assert (cell.method, cell.seq_len, cell.heads, cell.kv_heads, cell.head_dim) == ("pyramid", 8192, 9, 3, 64)
    assert cell.parameters == {"block_size": 64, "query_tile": 64, "levels": 4, "top_k": 8}


def test_the_command_names_the_capture_and_what_no_flag_can_say(shown_run: pd.DataFrame) -> None:
    own = shown_run[(shown_run["method"] == "flat") & (shown_run["seq_len"] == 4096)]
    row = summarise(own.assign(parameters='{"tile_reduce": "mean", "top_k": 8}')).iloc[0].to_dict()
    command, remark = repeat(row, ["pyramidbench", "sweep", "demo", "--input", "my text.safetensors"])
    assert "--input 'my text.safetensors' --layers 0,20" in command
    assert remark == 'and in a suite: tile_reduce = "mean"'
