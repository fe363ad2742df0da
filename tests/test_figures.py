"""Derived tables and figures: what is compared with what, what is left out and why, and that each figure can be drawn."""

from __future__ import annotations

import itertools
from pathlib import Path

import matplotlib.image
import numpy as np
import pandas as pd
import pytest

from pyramidbench.draw import save_png, to_svg
from pyramidbench.figures import COLUMNS, Figure, NoFigure, figures
from pyramidbench.frame import frontier, measured, settings, speedup_reasons, summarise, with_speedups
from pyramidbench.labels import spread
from pyramidbench.palette import series_of
from pyramidbench.record import columns


@pytest.fixture(scope="module")
def summary(shown_run: pd.DataFrame) -> pd.DataFrame:
    return summarise(shown_run)


@pytest.fixture(scope="module")
def drawn(summary: pd.DataFrame) -> dict[str, Figure]:
    return {figure.name: figure for figure in figures(summary) if isinstance(figure, Figure)}


def row(frame: pd.DataFrame, method: str, length: int, **values: object) -> pd.Series:
    chosen = frame[(frame["method"] == method) & (frame["seq_len"] == length)]
    for name, value in values.items():
        chosen = chosen[chosen[name] == value]
    return chosen.iloc[0]


def test_the_frame_keeps_the_columns_of_a_record(shown_run: pd.DataFrame) -> None:
    assert list(shown_run.columns) == columns()
    assert list(with_speedups(shown_run).columns) == columns()


def test_speedup_is_against_the_fastest_dense_of_the_same_layer(shown_run: pd.DataFrame) -> None:
    frame = with_speedups(shown_run)
    for layer in (0, 20):
        dense, fast = (row(frame, method, 4096, layer=layer) for method in ("dense", "pyramid:fast"))
        assert fast["dense_method"] == "dense"
        assert fast["speedup"] == pytest.approx(dense["latency_s"] / fast["latency_s"])
    assert row(frame, "dense", 4096)["speedup"] == 1
    assert row(frame, "dense:math", 4096)["speedup"] < 1


def test_speedup_never_crosses_inputs_or_devices(shown_run: pd.DataFrame) -> None:
    elsewhere = shown_run["kind"] == "dense"
    for column in ("input", "device", "dtype", "heads"):
        moved = shown_run.assign(**{column: shown_run[column].where(~elsewhere, "another" if column != "heads" else 1)})
        assert with_speedups(moved).loc[~elsewhere, "speedup"].isna().all(), column


def test_a_missing_speedup_has_its_reason(shown_run: pd.DataFrame) -> None:
    frame = shown_run.assign(why=speedup_reasons(shown_run))
    assert "predicted 3.1 min" in row(frame, "pyramid", 16384)["why"]
    assert row(frame, "pyramid", 4096)["why"] is None
    without = shown_run[shown_run["kind"] != "dense"]
    assert speedup_reasons(without).dropna().unique() == ["no dense method was timed on this problem and input"]


def test_a_summary_averages_layers_and_nothing_else(shown_run: pd.DataFrame, summary: pd.DataFrame) -> None:
    layers = shown_run[
        (shown_run["method"] == "flat") & (shown_run["seq_len"] == 4096) & (shown_run["query_tile"] == 1)
    ]
    joined = row(summary, "flat", 4096, query_tile=1)
    assert joined["cells"] == len(layers) == 2
    assert joined["recall"] == pytest.approx(layers["recall"].astype(float).mean())
    assert joined["recall_worst_head"] == pytest.approx(layers["recall_worst_head"].astype(float).min())
    assert summary["cells"].sum() == len(shown_run)
    assert summary["cells"].max() == 2


def test_a_summary_keeps_failures_apart_with_their_reason(summary: pd.DataFrame) -> None:
    lost = row(summary, "flat:exact", 8192, query_tile=1)
    assert (lost["status"], lost["reason"], lost["cells"]) == ("oom", "the worker was killed at 7.9 GiB", 2)
    assert np.isnan(lost["latency_s"])
    assert row(summary, "flat:exact", 4096)["status"] == "low_n"


def test_rows_that_differ_in_a_parameter_get_different_labels(shown_run: pd.DataFrame) -> None:
    one = shown_run[(shown_run["method"] == "pyramid") & (shown_run["seq_len"] == 4096)]
    frame = pd.concat(
        [one.assign(parameters='{"beam": 4, "top_k": 8}'), one.assign(parameters='{"beam": 1, "top_k": 8}')]
    )
    assert set(summarise(frame)["label"]) == {"pyramid", "pyramid beam=1"}


def test_settings_never_mix_devices_or_block_sizes(shown_run: pd.DataFrame) -> None:
    other = shown_run.assign(device="another device")
    wide = shown_run[shown_run["kind"] != "dense"].assign(block_size=128.0)
    parts = settings(summarise(pd.concat([shown_run, other, wide], ignore_index=True)))
    for part in parts:
        assert part.rows["device"].nunique() == 1
        assert part.rows["block_size"].nunique() == 1
        assert part.rows["layers"].nunique() == 1
    whole = [part for part in parts if part.rows["layers"].iloc[0] == "0, 20"]
    assert len(whole) == 3
    assert all((part.rows["kind"] == "dense").any() for part in whole)


def test_the_frontier_holds_what_nothing_beats(summary: pd.DataFrame) -> None:
    best = frontier(summary)
    assert (best["kind"] != "bound").all()
    rivals = measured(summary)
    rivals = rivals[rivals["kind"] == "selection"]
    for _, point in best.iterrows():
        same = rivals[rivals["seq_len"] == point["seq_len"]]
        assert not ((same["speedup"] > point["speedup"]) & (same["mass_kept"] > point["mass_kept"])).any()
    assert {"dense", "sliding_window"} <= set(best["label"])


def test_every_figure_is_tidy_and_says_what_it_shows(drawn: dict[str, Figure]) -> None:
    assert list(drawn) == ["tradeoff", "quality", "scaling", "levels", "budget"]
    for figure in drawn.values():
        assert list(figure.data.columns) == COLUMNS
        assert set(figure.data["series"]) == set(figure.series)
        assert {panel.name for panel in figure.panels} == set(figure.data["panel"])
        assert "8k tokens" in figure.subtitle or figure.name == "scaling"
        assert figure.title in figure.alt


def test_one_point_per_series_panel_and_place(drawn: dict[str, Figure]) -> None:
    for name in ("scaling", "levels", "budget"):
        points = drawn[name].data.dropna(subset=["x"])
        assert not points.duplicated(["panel", "shown", "x"]).any(), name


def test_scaling_shows_where_a_method_ended(drawn: dict[str, Figure]) -> None:
    data = drawn["scaling"].data
    dense = data[(data["series"] == "dense") & data["panel"].str.startswith("tile")]
    assert list(dense["x"]) == [2048, 4096, 8192, 16384]
    assert list(dense["y"].isna()) == [False, False, False, True]
    assert dense["status"].iloc[-1] == "skipped"
    untimed = data[data["panel"].str.startswith("token")]
    assert "exact_topk" not in set(untimed["series"])


def test_tradeoff_puts_dense_at_one_and_leaves_the_floor_out(drawn: dict[str, Figure]) -> None:
    figure = drawn["tradeoff"]
    dense = figure.data[figure.data["series"] == "dense"]
    assert (dense[["x", "y"]].to_numpy() == 1).all()
    assert "random_blocks" not in figure.series
    assert "random_blocks" in figure.notes[0]
    assert set(figure.data.loc[figure.data["frontier"], "series"]) >= {"dense", "sliding_window"}


def test_recall_figures_leave_out_bounds(drawn: dict[str, Figure]) -> None:
    budget = drawn["budget"].data
    assert "exact_topk" not in set(drawn["levels"].series)
    assert "exact_topk" not in set(budget.loc[budget["panel"] == "recall", "series"])
    assert "exact_topk" in set(budget.loc[budget["panel"] == "mass_kept", "series"])


def test_levels_vary_for_the_pyramid_and_the_others_go_across(drawn: dict[str, Figure]) -> None:
    data = drawn["levels"].data
    assert sorted(data.loc[data["series"] == "pyramid", "x"]) == [1, 2, 4, 6]
    assert data.loc[data["series"] == "flat", "x"].isna().all()


@pytest.mark.parametrize(
    ("change", "missing"),
    [
        (lambda run: run.assign(latency_s=None), {"tradeoff": "time", "scaling": "timing at two lengths"}),
        (lambda run: run[run["kind"] != "dense"], {"tradeoff": "dense"}),
        (lambda run: run[run["seq_len"] == 4096], {"scaling": "two lengths", "levels": "level", "budget": "budgets"}),
        (lambda run: run.assign(recall=None), {"quality": "recall", "levels": "level", "budget": "budgets"}),
    ],
    ids=["untimed", "no dense", "one length", "no quality"],
)
def test_a_figure_without_data_says_why(shown_run: pd.DataFrame, change: object, missing: dict[str, str]) -> None:
    assert callable(change)
    found = {
        figure.name: figure.reason for figure in figures(summarise(change(shown_run))) if isinstance(figure, NoFigure)
    }
    assert found.keys() == missing.keys()
    assert all(word in found[name] for name, word in missing.items())


def test_many_settings_are_cut_and_said_so(shown_run: pd.DataFrame) -> None:
    small = shown_run[(shown_run["seq_len"] == 4096) & (shown_run["query_tile"] != 1)]
    runs = pd.concat([small.assign(device=f"device {i}") for i in range(6)], ignore_index=True)
    left = [
        figure for figure in figures(summarise(runs)) if isinstance(figure, NoFigure) and "settings" in figure.reason
    ]
    assert len(left) == 2


def test_looks_are_distinct_and_stable(summary: pd.DataFrame) -> None:
    looks = series_of(summary)
    rivals = [look for look in looks.values() if not look.muted and look.name not in ("dense", "dense:math")]
    assert len({(look.colour, look.marker) for look in rivals}) == len(rivals)
    some = series_of(summary[summary["label"].isin(["pyramid", "flat", "dense"])])
    assert all(looks[name] == look for name, look in some.items())


def test_spread_labels_keep_their_gap_order_and_bounds() -> None:
    wanted = [50.0, 51.0, 49.0, 10.0, 99.0]
    placed = spread(wanted, 10, 0, 100)
    ordered = sorted(placed)
    assert min(b - a for a, b in itertools.pairwise(ordered)) >= 10 - 1e-9
    assert np.argsort(placed).tolist() == np.argsort(wanted).tolist()
    assert ordered[0] >= 0
    assert ordered[-1] <= 100
    assert spread([], 10, 0, 100) == []


def test_png_and_svg_are_drawn(drawn: dict[str, Figure], tmp_path: Path) -> None:
    figure = drawn["quality"]
    save_png(figure, tmp_path / "quality.png", dpi=50)
    pixels = matplotlib.image.imread(tmp_path / "quality.png")
    assert pixels.shape[1] == 400
    assert len(np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0)) > 50
    svg = to_svg(figure)
    assert svg.startswith("<svg ")
    assert "var(--c0072b2)" in svg
    assert "#0072b2" not in svg
    assert "<script" not in svg
    assert to_svg(figure) == svg
