"""Derived tables and figures: what is compared with what, what is left out and why, and that each figure can be drawn."""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd
import pytest

from pyramidbench.frame import frontier, measured, settings, speedup_reasons, summarise, with_speedups
from pyramidbench.problem import Problem
from pyramidbench.record import columns
from pyramidbench.registry import create
from pyramidbench.reporting.evidence import Evidence, Source
from pyramidbench.reporting.figure import COLUMNS, END, Figure, NoFigure
from pyramidbench.reporting.figures import figures
from pyramidbench.reporting.labels import spread
from pyramidbench.reporting.palette import series_of


@pytest.fixture(scope="module")
def summary(shown_run: pd.DataFrame) -> pd.DataFrame:
    return summarise(shown_run)


def defined(run: pd.DataFrame, **device: object) -> list[Figure | NoFigure]:
    """The figures of one run's rows."""
    return figures(Evidence([Source(run, {"name": "demo"}, device)]))


@pytest.fixture(scope="module")
def drawn(shown_run: pd.DataFrame) -> dict[str, Figure]:
    found = defined(shown_run, kind="cpu", peak_flops_per_s=2e11, peak_bytes_per_s=4e10)
    return {figure.name: figure for figure in found if isinstance(figure, Figure)}


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
    assert list(drawn) == [
        "tradeoff", "scaling", "stages", "stages-levels", "memory", "quality", "recall-length", "budget", "levels", "heads",
        "roofline",
    ]  # fmt: skip
    for figure in drawn.values():
        assert list(figure.data.columns) == COLUMNS
        assert set(figure.data["series"]) == set(figure.series)
        assert {panel.name for panel in figure.panels} == set(figure.data["panel"])
        assert "8k tokens" in figure.subtitle + " ".join(panel.name for panel in figure.panels) or figure.x is not None
        assert figure.title in figure.alt
        assert "nan" not in figure.alt


def test_every_mark_knows_its_row_of_the_summary(drawn: dict[str, Figure], summary: pd.DataFrame) -> None:
    for figure in drawn.values():
        rows = summary.loc[figure.data["cell"]]
        assert rows["label"].tolist() == figure.data["series"].tolist(), figure.name
        missing = figure.data["status"] != rows["status"].to_numpy()
        assert not missing.any(), figure.name


def test_one_point_per_series_panel_and_place(drawn: dict[str, Figure]) -> None:
    for name in ("scaling", "recall-length", "levels", "budget", "roofline"):
        data = drawn[name].data
        points = data[data["part"] != END].dropna(subset=["x"])
        assert not points.duplicated(["panel", "shown", "x"]).any(), name


def test_scaling_shows_where_a_method_ended(drawn: dict[str, Figure]) -> None:
    data = drawn["scaling"].data
    dense = data[(data["series"] == "dense") & data["panel"].str.startswith("tile")]
    line, end = dense[dense["part"] != END], dense[dense["part"] == END]
    assert list(line["x"]) == [2048, 4096, 8192, 16384]
    assert list(line["y"].isna()) == [False, False, False, True]
    assert (end["x"].item(), end["y"].item()) == (line["x"].iloc[2], line["y"].iloc[2])
    assert end["note"].item() == "skipped at 16k"
    assert "predicted 3.1 min" in end["reason"].item()
    untimed = data[data["panel"].str.startswith("token")]
    assert "exact_topk" not in set(untimed["series"])


def test_a_length_that_failed_between_two_that_did_not_breaks_the_line(shown_run: pd.DataFrame) -> None:
    lost = (shown_run["method"] == "flat") & (shown_run["seq_len"] == 4096)
    run = shown_run.assign(status=shown_run["status"].where(~lost, "oom"))
    run.loc[lost, ["latency_s", "recall"]] = None
    found = {figure.name: figure for figure in defined(run) if isinstance(figure, Figure)}
    for name in ("scaling", "recall-length"):
        data = found[name].data
        flat = data[(data["series"] == "flat") & data["panel"].str.startswith("tile")]
        assert list(flat.loc[flat["part"] != END, "y"].isna()) == [False, True, False, False][: len(flat) - 1], name
        assert flat.loc[flat["part"] == END, "note"].tolist() == ["oom at 4k"]


def test_a_method_without_any_number_is_named_with_its_reason(shown_run: pd.DataFrame) -> None:
    lost = shown_run["method"] == "flat"
    run = shown_run.assign(
        status=shown_run["status"].where(~lost, "oom"), reason=shown_run["reason"].where(~lost, "no room")
    )
    run.loc[lost, ["latency_s", "recall", "mass_kept"]] = None
    scaling = next(figure for figure in defined(run) if figure.name == "scaling")
    assert isinstance(scaling, Figure)
    assert "flat (oom: no room)" in scaling.notes[1]


def test_stages_add_up_and_keep_a_place_for_what_failed(drawn: dict[str, Figure], summary: pd.DataFrame) -> None:
    data = drawn["stages"].data
    assert [panel.name for panel in drawn["stages"].panels] == ["2k tokens", "4k tokens", "8k tokens", "16k tokens"]
    fast = data[(data["series"] == "pyramid:fast") & (data["panel"] == "8k tokens")]
    own = row(summary, "pyramid:fast", 8192, query_tile=64, top_k=8)
    assert fast["part"].tolist() == ["build", "route", "attend"]
    assert fast["x"].tolist() == pytest.approx([1e3 * own[f"{stage}_s"] for stage in ("build", "route", "attend")])
    assert fast["y"].tolist() == pytest.approx([1e3 * own["latency_s"]] * 3)
    assert "dense" not in set(data["series"])


def test_a_stage_figure_of_a_backward_pass_has_that_stage_alone(shown_run: pd.DataFrame) -> None:
    run = shown_run.assign(**{"pass": "backward", "backward_s": shown_run["latency_s"]})
    stages = next(figure for figure in defined(run) if figure.name == "stages")
    assert isinstance(stages, Figure)
    assert set(stages.data["part"]) == {"backward"}


def test_levels_stand_side_by_side_in_the_stages(drawn: dict[str, Figure]) -> None:
    shown = list(dict.fromkeys(drawn["stages-levels"].data["shown"]))
    assert shown == ["pyramid, 1 level", "pyramid, 2 levels", "pyramid, 4 levels", "pyramid, 6 levels"]


def test_memory_is_beside_its_formula_and_flagged_above_it(shown_run: pd.DataFrame, drawn: dict[str, Figure]) -> None:
    data = drawn["memory"].data
    flat = data[(data["series"] == "flat") & (data["panel"] == "8k tokens")]
    assert (flat["x"].item(), flat["y"].item()) == pytest.approx((2400 * 8192 / 2**20, 2000 * 8192 / 2**20))
    lost = data[(data["series"] == "dense") & (data["panel"] == "16k tokens")]
    assert lost["x"].isna().all()
    assert lost["status"].tolist() == ["skipped"]
    heavy = shown_run["method"] == "flat"
    run = shown_run.assign(peak_memory_bytes=shown_run["peak_memory_bytes"].where(~heavy, 8000 * shown_run["seq_len"]))
    for flagged, notes in ((heavy, ("Over 1.5× its formula: flat (up to 4.0×).",)), (False, ())):
        figures = defined(run.assign(memory_flagged=flagged))
        memory = next(figure for figure in figures if figure.name == "memory")
        assert isinstance(memory, Figure)
        assert memory.notes[1:] == notes


def test_heat_maps_hold_every_head_of_every_layer(drawn: dict[str, Figure], shown_run: pd.DataFrame) -> None:
    figure = drawn["heads"]
    pyramid = figure.data[figure.data["panel"] == "pyramid"].set_index(["y", "x"])["value"]
    assert list(pyramid.index) == list(itertools.product((0, 20), (0, 1, 2)))
    cell = shown_run[
        (shown_run["method"] == "pyramid") & (shown_run["seq_len"] == 8192) & (shown_run["layer"] == 20)
        & (shown_run["query_tile"] == 64) & (shown_run["top_k"] == 8) & (shown_run["levels"] == 6)
    ]  # fmt: skip
    assert pyramid[20].tolist() == pytest.approx(cell["recall_by_head"].iloc[0])
    assert len(figure.panels) == 6
    assert "sliding_window" in figure.notes[0]


def test_the_roofline_puts_points_at_the_recorded_rate_under_the_measured_roofs(shown_run: pd.DataFrame) -> None:
    run = shown_run.assign(useful_flops_per_s=5e10)
    found = defined(run, kind="cpu", peak_flops_per_s=2e11, peak_bytes_per_s=4e10)
    figure = next(figure for figure in found if figure.name == "roofline")
    assert isinstance(figure, Figure)
    assert (figure.data["y"] == 50).all()
    slope, flat = (guide.corners for guide in figure.guides)
    assert slope[-1] == flat[0] == (5.0, 200.0)
    assert slope[0][1] == pytest.approx(slope[0][0] * 40)
    dense = figure.data[figure.data["series"] == "dense"]
    problem = Problem(1, 9, 3, 2048, 2048, 64, 64, "float32", True, 1.0)
    seconds = 1.6e-3 * 4 * 1.01
    assert dense["x"].iloc[0] == pytest.approx(5e10 * seconds / create("dense").cost(problem).bytes)
    assert "<script>alert(1)</script>" in figure.notes[1]


def test_tradeoff_puts_dense_at_one_and_leaves_the_floor_out(drawn: dict[str, Figure]) -> None:
    figure = drawn["tradeoff"]
    dense = figure.data[figure.data["series"] == "dense"]
    assert (dense[["x", "y"]].to_numpy() == 1).all()
    assert "random_blocks" not in figure.series
    assert "random_blocks" in figure.notes[1]
    assert set(figure.data.loc[figure.data["frontier"], "series"]) >= {"dense", "sliding_window"}


def test_recall_figures_leave_out_bounds(drawn: dict[str, Figure]) -> None:
    budget = drawn["budget"].data
    assert "exact_topk" not in set(drawn["levels"].series)
    assert "exact_topk" not in set(budget.loc[budget["panel"].str.startswith("recall"), "series"])
    assert "exact_topk" in set(budget.loc[budget["panel"].str.startswith("attention"), "series"])


def test_levels_vary_for_the_pyramid_and_the_others_go_across(drawn: dict[str, Figure]) -> None:
    data = drawn["levels"].data
    assert sorted(data.loc[data["series"] == "pyramid", "x"]) == [1, 2, 4, 6]
    assert data.loc[data["series"] == "flat", "x"].isna().all()


@pytest.mark.parametrize(
    ("change", "missing"),
    [
        (
            lambda run: run.assign(latency_s=None),
            {"tradeoff": "time", "scaling": "two lengths", "stages": "timed", "stages-levels": "level", "roofline": "rate"},
        ),
        (lambda run: run[run["kind"] != "dense"], {"tradeoff": "dense", "roofline": "rate"}),
        (
            lambda run: run[run["seq_len"] == 4096],
            {"scaling": "two lengths", "stages-levels": "level", "recall-length": "two lengths", "levels": "level",
             "budget": "budgets", "roofline": "rate"},
        ),
        (
            lambda run: run.assign(recall=None, recall_by_head=None, peak_memory_bytes=None),
            {"quality": "recall", "recall-length": "recall", "levels": "level", "budget": "budgets", "heads": "head by head",
             "memory": "peak of memory", "roofline": "rate"},
        ),
    ],
    ids=["untimed", "no dense", "one length", "no quality"],
)  # fmt: skip
def test_a_figure_without_data_says_why(shown_run: pd.DataFrame, change: object, missing: dict[str, str]) -> None:
    assert callable(change)
    run = change(shown_run).assign(useful_flops_per_s=None)
    figures_of = defined(run, peak_flops_per_s=2e11, peak_bytes_per_s=4e10)
    found = {figure.name: figure.reason for figure in figures_of if isinstance(figure, NoFigure)}
    assert found.keys() == missing.keys()
    assert all(word in found[name] for name, word in missing.items())


def test_a_run_without_peaks_has_no_roofline(shown_run: pd.DataFrame) -> None:
    roofline = next(figure for figure in defined(shown_run.assign(useful_flops_per_s=1e9)) if figure.name == "roofline")
    assert isinstance(roofline, NoFigure)
    assert "no measured peaks" in roofline.reason


def test_many_settings_are_cut_and_said_so(shown_run: pd.DataFrame) -> None:
    small = shown_run[(shown_run["seq_len"] == 4096) & (shown_run["query_tile"] != 1)]
    runs = pd.concat([small.assign(device=f"device {i}") for i in range(6)], ignore_index=True)
    left = [figure for figure in defined(runs) if isinstance(figure, NoFigure) and "settings" in figure.reason]
    assert len(left) == 2


def test_several_runs_never_meet_in_one_line_average_or_ratio(shown_run: pd.DataFrame) -> None:
    faster = shown_run.assign(latency_s=shown_run["latency_s"].astype(float) / 2)
    device = {"name": "Xeon"}
    evidence = Evidence([
        Source(shown_run, {"name": "demo", "version": "0.1"}, device),
        Source(faster, {"name": "demo", "version": "0.2"}, device),
    ])  # fmt: skip
    assert list(evidence.runs) == ["demo, version 0.1", "demo, version 0.2"]
    alone = summarise(shown_run)
    for name in evidence.runs:
        own = evidence.summary[evidence.summary["run"] == name]
        assert len(own) == len(alone)
        assert own["speedup"].tolist() == pytest.approx(alone["speedup"].tolist(), nan_ok=True)
    drawn = [figure for figure in figures(evidence) if isinstance(figure, Figure)]
    assert [figure.name for figure in drawn][:4] == ["tradeoff", "tradeoff-2", "scaling", "scaling-2"]
    for figure in drawn:
        assert evidence.summary.loc[figure.data["cell"], "run"].nunique() == 1
        assert "run demo, version 0." in figure.subtitle
        assert ": demo, version 0." in figure.title


def test_looks_are_distinct_and_stable(summary: pd.DataFrame) -> None:
    looks = series_of(summary)
    rivals = [look for look in looks.values() if not look.muted and look.name not in ("dense", "dense:math")]
    assert len({(look.colour, look.marker) for look in rivals}) == len(rivals)
    assert looks["dense"].marker != looks["dense:math"].marker
    some = series_of(summary[summary["label"].isin(["pyramid", "flat", "dense"])])
    assert all(looks[name] == look for name, look in some.items())


def test_a_family_shares_its_colour_and_no_other_family_has_the_subjects() -> None:
    labels = ["pyramid", "pyramid beam=1", "flat", "flat tile_reduce=mean", "quest", "quest:paper", "xattention top_p=0.8",
              "xattention top_p=0.95", "./mine.py", "./mine.py width=2"]  # fmt: skip
    looks = series_of(pd.DataFrame({"label": labels, "kind": "selection"}))
    for one, other in zip(labels[::2], labels[1::2]):
        assert looks[one].colour == looks[other].colour, one
        assert looks[one].marker != looks[other].marker, one
    subject = {looks[label].colour for label in labels[:4]}
    assert not subject & {looks[label].colour for label in labels[4:]}
    alone = series_of(pd.DataFrame({"label": ["quest", "moba"], "kind": "selection"}))
    assert alone["quest"] == looks["quest"]


def test_a_decoding_step_is_shown_by_its_replay(shown_run: pd.DataFrame) -> None:
    """By the host's clock no method beats dense here; by their replays, of microseconds, all do."""
    timed = shown_run["latency_s"].notna()
    replay_s = (1e-8 * shown_run["seq_len"].astype(float) * (1 + 3.0 * (shown_run["kind"] == "dense"))).where(timed)
    run = shown_run.assign(
        **{"pass": "decode", "latency_s": timed.map({True: 1e-2, False: None}), "useful_flops_per_s": 1e9},
        graph_latency_s=replay_s,
        graph_latency_low_s=None, graph_latency_high_s=None, graph_dense_method="dense",
        graph_speedup=4e-8 * shown_run["seq_len"].astype(float) / replay_s,
    )  # fmt: skip
    found = {figure.name: figure for figure in defined(run, peak_flops_per_s=2e11, peak_bytes_per_s=4e10)}
    scaling, stages, roofline = found["scaling"], found["stages"], found["roofline"]
    assert isinstance(scaling, Figure)
    assert isinstance(stages, Figure)
    assert isinstance(roofline, Figure)
    assert "decoding step" in scaling.title
    assert scaling.panels[0].axis.unit == "µs"
    assert scaling.data["y"].max() == pytest.approx(1e6 * 4e-8 * 8192)
    assert scaling.table is not None
    assert not any("slower at the longest" in text for line in scaling.table.rows for text in line)
    assert any("host's launching" in note for note in stages.notes)
    assert stages.panels[0].axis.unit == "ms"
    assert roofline.data["y"].min() > 20, "GFLOP/s; by the calls it would be 1"


def test_methods_far_slower_than_the_fastest_have_a_scale_of_their_own(shown_run: pd.DataFrame) -> None:
    slow = shown_run["method"] == "flat:exact"
    times = {
        name: shown_run[name].where(~slow, 40 * shown_run[name].astype(float)) for name in ("latency_s", "route_s")
    }
    stages = next(figure for figure in defined(shown_run.assign(**times)) if figure.name == "stages")
    assert isinstance(stages, Figure)
    first = stages.data[stages.data["row"] == stages.data["row"].iloc[0]]
    assert {"sliding_window", "pyramid", "flat"} <= set(first["series"])
    assert "flat:exact" not in set(first["series"])
    assert stages.data["shown"].iloc[0] == "sliding_window", "the fastest comes first"


def test_spread_labels_keep_their_gap_order_and_bounds() -> None:
    wanted = [50.0, 51.0, 49.0, 10.0, 99.0]
    placed = spread(wanted, 10, 0, 100)
    ordered = sorted(placed)
    assert min(b - a for a, b in itertools.pairwise(ordered)) >= 10 - 1e-9
    assert np.argsort(placed).tolist() == np.argsort(wanted).tolist()
    assert ordered[0] >= 0
    assert ordered[-1] <= 100
    assert spread([], 10, 0, 100) == []
