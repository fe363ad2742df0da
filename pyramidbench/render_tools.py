"""What a person sees of `compare`, `profile`, `tune`, `merge` and `doctor`; laid out by `render`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pyramidbench.comparing.comparison import Comparison
from pyramidbench.comparing.table import columns, sentences
from pyramidbench.doctor import Finding
from pyramidbench.merging import Merging
from pyramidbench.profiling.profile import Profile
from pyramidbench.profiling.table import about, kernel_table, stage_table
from pyramidbench.profiling.table import sentences as profile_sentences
from pyramidbench.render import explain, print_line, show_columns, show_table
from pyramidbench.tuning import Choice, setting_text
from pyramidbench.units import milliseconds, one_line, ratio, share, tokens

STATES = {"ok": "green", "note": "dim", "warning": "bold yellow", "error": "bold red"}


def show_comparison(console: Console, comparison: Comparison) -> None:
    """Print what differs between two runs or two methods: a row per pair of cells, and what it comes to."""
    shown = columns(comparison)
    show_columns(console, "Comparison, B against A", shown, [comparison.frame.to_dict("records")], "--json")
    for line in sentences(comparison):
        print_line(console, line)
    explain(console, [column for column in shown if column.meaning])


def show_profile(console: Console, profile: Profile) -> None:
    """Print a profile: its stages, its kernels, and what the whole call comes to."""
    print_line(console, about(profile), "bold")
    for shown in (stage_table(profile), kernel_table(profile)):
        show_columns(console, shown.title, shown.columns, [shown.rows], "stages.csv and kernels.csv")
        for note in shown.notes:
            print_line(console, note, "dim")
    for line in profile_sentences(profile):
        print_line(console, line)


def show_merge(console: Console, merging: Merging) -> None:
    """Print what is merged: each run with what is taken from it, the conflicts, and what else differs."""
    rows = []
    for run in merging.runs:
        taken = sum(source is run for _, source in merging.kept)
        rows.append([run.path.name, one_line(run.device.name), str(len(run.records)), str(taken)])
    show_table(console, "Merge", rows, ["run", "device", "cells", "taken"])
    if merging.conflicts:
        twice = [
            [f"{found.first.method} at {tokens(found.first.seq_len_kv)}", found.first.cell, *(
                f"{milliseconds(record.latency_s)} ({run})"
                for record, run in ((found.first, found.first_run), (found.last, found.last_run))
            )]
            for found in merging.conflicts
        ]  # fmt: skip
        show_table(console, "Measured twice on one device, ms", twice, ["cell", "identity", "first", "last"])
    for note in merging.notes:
        print_line(console, f"! {note}.", "yellow")


def show_choices(console: Console, choices: Iterable[Choice], mass: float, varied: Sequence[str]) -> None:
    """Print the setting that was chosen for each length, and where none keeps the wanted mass, the one that keeps most."""
    rows = []
    for choice in choices:
        row = choice.row or choice.most
        note = "" if choice.row else f"none keeps {mass:g}; this one keeps most"
        rows.append(
            [
                tokens(choice.seq_len_kv), setting_text(row, varied), milliseconds(row["latency_s"]), ratio(row["speedup"]),
                share(row["mass_kept"]), share(row["output_error"]), str(choice.settings), note,
            ]
        )  # fmt: skip
    names = ["N", "setting", "ms", "speed-up", "mass kept", "error", "tried", "reason"]
    show_table(console, f"Fastest setting that keeps {mass:g} of the attention", rows, names)
    print_line(
        console, "On this input and device alone. Speed-up is over the fastest dense method of the same run.", "dim"
    )


def show_findings(console: Console, findings: Iterable[Finding]) -> None:
    """Print what the doctor found: a line each, with what to do about it below."""
    if not console.is_terminal:
        rows = [[finding.state, finding.subject, finding.found, finding.advice] for finding in findings]
        show_table(console, "Doctor", rows, ["state", "what", "found", "what to do"])
        return
    table = Table.grid(padding=(0, 2))
    for _ in range(2):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        told = Text(one_line(finding.found))
        if finding.advice:
            told.append(f"\n→ {one_line(finding.advice)}", "dim" if finding.state in ("ok", "note") else "")
        table.add_row(Text(finding.state, STATES[finding.state]), Text(one_line(finding.subject)), told)
    console.print(table)
