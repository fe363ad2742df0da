"""The verdict: what a run says in two sentences, made from its numbers, and what the reader must bear in mind."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pandas as pd

from pyramidbench.comparable import IN_TORCH, chosen_in_torch, fullest_length, usual_budget
from pyramidbench.frame import Setting, failed, measured, settings
from pyramidbench.inputs import CAPTURED
from pyramidbench.replays import as_replayed
from pyramidbench.units import integer, is_missing, milliseconds, percent, ratio, share, tokens

GOOD = 0.99
"""Share of the exact Top-K's attention mass that a selection must keep to count as good."""
SUBJECT = "pyramid"


@dataclass(frozen=True)
class Verdict:
    """Two sentences, and the caveats that belong to them."""

    sentences: tuple[str, ...]
    caveats: tuple[str, ...]

    @property
    def text(self) -> str:
        return " ".join(self.sentences)


def verdict(summary: pd.DataFrame) -> Verdict:
    """What a summary (`frame.summarise`) says: about its largest setting, at the longest length that most methods
    reached."""
    rivals = measured(summary)
    rivals = rivals[rivals["kind"] == "selection"]
    if rivals.empty:
        return Verdict((_nothing(summary),), caveats(summary))
    setting = next(part for part in settings(summary) if part.rows.index.isin(rivals.index).any())
    setting = replace(setting, rows=as_replayed(setting.rows))
    rows = setting.rows.loc[setting.rows.index.isin(rivals.index)]
    timed = rows.dropna(subset=["speedup", "mass_ratio"])
    others = len(settings(summary)) - 1
    scope = (
        (f"The sentences above are about {setting.text}; {others} more settings are in the table.",) if others else ()
    )
    if len(timed):
        sentences: tuple[str, ...] = _by_speed(timed, setting)
    elif rows["mass_ratio"].isna().all() and rows["speedup"].notna().any():
        sentences = _by_speed_alone(rows.dropna(subset=["speedup"]))
    else:
        sentences = _by_quality(rows, summary)
    return Verdict(sentences, (*caveats(summary), *scope))


def _nothing(summary: pd.DataFrame) -> str:
    if summary.empty:
        return "This run is empty: it holds no cell, so there is nothing to compare."
    if len(measured(summary)):
        return "No selection method was measured in this run, so there is nothing to compare with dense attention."
    statuses = ", ".join(f"{status} {count}" for status, count in summary["status"].value_counts().items())
    return f"No cell of this run gave a number ({statuses}); the reasons are below."


def _by_speed(timed: pd.DataFrame, setting: Setting) -> tuple[str, str]:
    here = timed[timed["seq_len_kv"] == fullest_length(timed)]
    good = here[here["mass_ratio"] >= GOOD]
    pool = good if len(good) else here[here["mass_ratio"] == here["mass_ratio"].max()]
    best = pool.sort_values("speedup", ascending=False).iloc[0]
    dense = measured(setting.rows)
    dense = dense[(dense["method"] == best["dense_method"]) & (dense["seq_len_kv"] == best["seq_len_kv"])].iloc[0]
    keeps = f"{percent(best['mass_ratio'])} of the attention mass that exact Top-K keeps"
    reference = f"{best['dense_method']} ({dense['backend']}, {milliseconds(dense['latency_s'])} ms)"
    pace = f"{ratio(best['speedup'])} the speed of {reference}"
    where = _where(best)
    if not len(good):
        nearest = f"{_name(best)}, keeps {percent(best['mass_ratio'])}, at {pace}"
        first = f"{where} no selection keeps {GOOD:.0%} of what exact Top-K keeps: the nearest, {nearest}."
    elif best["speedup"] > 1:
        first = f"{where}, {_name(best)} is the fastest selection that keeps {keeps}: {pace}."
    else:
        good_ones = f"no selection that keeps {GOOD:.0%} of what exact Top-K keeps"
        first = f"{where} {good_ones} beats dense attention: the nearest is {_name(best)}, {pace}."
    ahead = here[here["speedup"] > 1]
    if best["speedup"] <= 1 and len(ahead):
        less = ahead.sort_values("mass_ratio", ascending=False).iloc[0]
        return (
            first,
            f"What is faster keeps less: {_name(less)} keeps {percent(less['mass_ratio'])} at {ratio(less['speedup'])}.",
        )
    since, other = _from_where(best, timed), _of_subject(best, here)
    return first, f"{since}; {other}" if since else other[:1].upper() + other[1:]


def _by_speed_alone(rows: pd.DataFrame) -> tuple[str, str]:
    """Speed where nothing was judged for quality: the fastest selection and the fastest pyramid, at the longest length."""
    here = rows[rows["seq_len_kv"] == fullest_length(rows)].sort_values("speedup", ascending=False)
    best = here.iloc[0]
    where = _where(best)
    first = (
        f"{where}, {_name(best)} is the fastest selection: {ratio(best['speedup'])} the speed of {best['dense_method']}"
    )
    own = here[here["method"].str.split(":").str[0] == SUBJECT]
    if len(own) and own.index[0] != here.index[0]:
        first += f"; of the pyramids, {_name(own.iloc[0])}: {ratio(own.iloc[0]['speedup'])}"
    since = _from_where(best, rows)
    silence = "uality was not measured in this run, so it does not say what they miss."
    return f"{first}.", f"{since}; q{silence}" if since else f"Q{silence}"


def _where(row: pd.Series) -> str:
    """Length and device, and the pass where it is not the forward."""
    kind = {"backward": ", gradients alone", "train": ", forward and backward", "decode": ", a step of decoding"}.get(
        row["pass"], ""
    )
    return f"At {tokens(row['seq_len_kv'])} tokens on {row['device']}{kind}"


def _from_where(best: pd.Series, timed: pd.DataFrame) -> str:
    """From which length on the best one is faster than dense, at its budget; nothing where that cannot be said."""
    same = timed[timed["label"] == best["label"]]
    for column in ("top_k", "query_tile"):
        same = same[(same[column] == best[column])]
    same = same.sort_values("seq_len_kv")
    losing = same[same["speedup"] <= 1]
    if losing.empty and len(same) > 1:
        return f"It is ahead at every length measured, from {tokens(same['seq_len_kv'].iloc[0])} on"
    if losing.empty or best["speedup"] <= 1:
        return ""
    after = same[same["seq_len_kv"] > losing["seq_len_kv"].max()]
    return f"It is ahead of dense attention from {tokens(after['seq_len_kv'].min())} tokens on"


def _of_subject(best: pd.Series, here: pd.DataFrame) -> str:
    """How the best compares with the best of the other camp: Pyramid Top-K, or what is not it."""
    is_subject = here["method"].str.split(":").str[0] == SUBJECT
    camp = str(best["method"]).split(":")[0] == SUBJECT
    others = here[~is_subject] if camp else here[is_subject]
    if others.empty:
        return "nothing else was timed beside it." if camp else "Pyramid Top-K was not timed beside it."
    good = others[others["mass_ratio"] >= GOOD]
    pool = good if len(good) else others[others["mass_ratio"] == others["mass_ratio"].max()]
    rival = pool.sort_values("speedup", ascending=False).iloc[0]
    loses = "Pyramid Top-K loses here" if len(good) else "no Pyramid Top-K keeps as much"
    role = "the best that is no pyramid" if camp else loses
    return f"{role}: {_name(rival)} keeps {percent(rival['mass_ratio'])} at {ratio(rival['speedup'])}."


def _by_quality(rows: pd.DataFrame, summary: pd.DataFrame) -> tuple[str, ...]:
    """Without speed-ups: what was found, and why nothing is said about speed."""
    judged = rows.dropna(subset=["recall"])
    timed = measured(summary)["latency_s"].notna().any()
    silence = (
        "No dense method was timed beside the selections, so this run has no speed-up."
        if timed
        else "No cell was timed, so this run says nothing about speed."
    )
    if judged.empty:
        return silence, "No cell was judged for quality either."
    here = usual_budget(judged[judged["seq_len_kv"] == fullest_length(judged)])
    ordered = here.sort_values("recall", ascending=False).drop_duplicates("label")
    best = ordered.iloc[0]
    second = f", ahead of {_name(ordered.iloc[1])} with {share(ordered['recall'].iloc[1])}" if len(ordered) > 1 else ""
    found = f"finds {share(best['recall'])} of the important blocks"
    kept = "" if is_missing(best["mass_ratio"]) else f" and keeps {percent(best['mass_ratio'])} of exact Top-K's mass"
    return silence, f"At {tokens(best['seq_len_kv'])} tokens {_name(best)} {found}{kept}{second}."


def _name(row: pd.Series) -> str:
    return f"{row['label']} (K {integer(row['top_k'])}, tile {integer(row['query_tile'])})"


def _quality_notes(sources: set[str]) -> list[str]:
    """What quality rests on, where that is not a model inside the context that it was trained on."""
    stretched = sorted(text for text in sources if text.startswith(f"{CAPTURED}, "))
    others = sorted(sources - {CAPTURED, *stretched})
    notes = []
    if stretched:
        notes.append(
            f"The model was captured beyond the context that it was trained on ({'; '.join(stretched)}): quality is what a "
            "method keeps of that attention, which no training has fitted to such lengths."
        )
    if others:
        notes.append(f"Quality was not measured on a captured model everywhere: {'; '.join(others)}.")
    return notes


def caveats(summary: pd.DataFrame) -> tuple[str, ...]:
    notes = _quality_notes({str(text) for text in summary["quality_source"].dropna()})
    if (summary["latency_s"].notna() & (summary["status"] == "low_n")).any():
        notes.append("Times marked ~ rest on fewer than 20 samples.")
    if (summary["status"] == "throttled").any():
        notes.append("The device throttled during some cells; their times are marked !.")
    over = measured(summary)
    over = over[over["memory_flagged"] == 1]
    if len(over):
        names = ", ".join(sorted(set(over["label"])))
        notes.append(f"Peak memory is over 1.5 times the formula (marked !): {names}.")
    slowed = chosen_in_torch(measured(summary))
    if slowed:
        notes.append(f"{IN_TORCH}: {', '.join(slowed)}.")
    lost = failed(summary)
    if len(lost) and len(measured(summary)):
        notes.append(f"{int(lost['cells'].sum())} cells gave no number; their reasons are below.")
    problems = measured(summary).dropna(subset=["speedup_reason"])
    if len(problems):
        reasons = sorted(set(problems["speedup_reason"]))
        notes.append(f"Rows with a time but no speed-up: {len(problems)}; {'; '.join(reasons)}.")
    hopper = summary["device"].astype(str).str.contains("H100|H200|H800|GH200").any()
    dense = measured(summary)["backend"].astype(str)
    if hopper and not dense.isin(("fa3", "fa4")).any():
        notes.append(
            "FlashAttention-3, the faster dense kernel on this GPU, was not measured: speed-ups are against torch's own."
        )
    return tuple(notes)
