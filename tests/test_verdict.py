"""The verdict: what a run says in two sentences, and what it admits."""

from __future__ import annotations

import pandas as pd

from pyramidbench.frame import summarise
from pyramidbench.verdict import Verdict, verdict


def judged(frame: pd.DataFrame) -> Verdict:
    return verdict(summarise(frame))


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
    assert second == (
        "It is ahead at every length measured, from 2k on; quality was not measured in this run, so it does not say what they "
        "miss."
    )


def test_the_verdict_says_when_no_selection_is_good(shown_run: pd.DataFrame) -> None:
    text = judged(shown_run.assign(mass_ratio=shown_run["mass_ratio"].astype(float) * 0.9)).text
    assert "no selection keeps 99% of what exact Top-K keeps: the nearest, flat:exact" in text


def test_the_verdict_without_time_speaks_of_quality_only(shown_run: pd.DataFrame) -> None:
    first, second = judged(shown_run.assign(latency_s=None)).sentences
    assert first == "No cell was timed, so this run says nothing about speed."
    assert "pyramid (K 8, tile 64) finds 0.914" in second
    assert "no speed-up" in judged(shown_run[shown_run["kind"] != "dense"]).sentences[0]


def test_caveats_name_weak_numbers_and_inputs(shown_run: pd.DataFrame) -> None:
    notes = " ".join(judged(shown_run.assign(quality_source="structured")).caveats)
    assert "structured" in notes
    assert "fewer than 20 samples" in notes
    assert "6 cells gave no number" in notes
    assert "predicted 3.1 min" in notes
    assert "captured model" not in " ".join(judged(shown_run).caveats)


def test_flash_attention_3_is_missed_on_hopper_only_where_it_was_not_measured(shown_run: pd.DataFrame) -> None:
    on_gpu = shown_run.assign(device="NVIDIA H200")
    assert any("FlashAttention-3" in note for note in judged(on_gpu).caveats)
    for kernel in ("fa3", "fa4"):
        with_it = on_gpu.assign(backend=on_gpu["backend"].where(on_gpu["method"] != "dense", kernel))
        assert not any("FlashAttention-3" in note for note in judged(with_it).caveats)
    assert not any("FlashAttention-3" in note for note in judged(shown_run).caveats)


def test_plain_dense_that_took_several_kernels_is_one_row(shown_run: pd.DataFrame) -> None:
    """Another layer may have another fastest kernel."""
    other = (shown_run["method"] == "dense") & (shown_run["layer"] == 20)
    mixed = summarise(shown_run.assign(backend=shown_run["backend"].where(~other, "sdpa-math")))
    dense = mixed[(mixed["method"] == "dense") & (mixed["status"] == "ok")]
    assert set(dense["backend"]) == {"sdpa-flash or sdpa-math"}
    assert set(dense["cells"]) == {2}
    assert len(mixed) == len(summarise(shown_run))


def test_the_caveats_name_rules_that_are_slow_since_they_choose_in_torch(shown_run: pd.DataFrame) -> None:
    """Not what attends for most of its time, what chooses by kernels, or a run where everything is torch."""
    latency = shown_run["latency_s"].astype(float)
    window, flat = (shown_run["method"].str.startswith(name) for name in ("sliding_window", "flat"))
    mixed = shown_run.assign(
        attend_s=latency * (0.1 + 0.8 * window), backward_s=latency * 0.8 * flat, backend="reference+triton"
    )
    note = next(note for note in judged(mixed).caveats if "plain torch" in note)
    assert "pyramid" in note
    assert "flat" not in note
    assert "sliding_window" not in note
    for backend in ("triton", "reference"):
        assert not any("plain torch" in note for note in judged(mixed.assign(backend=backend)).caveats)
