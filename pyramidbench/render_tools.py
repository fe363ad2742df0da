"""What a person sees of `compare`, `profile`, `tune`, `merge`, `verify` and `doctor`; laid out by `render`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pyramidbench.comparing.comparison import Comparison
from pyramidbench.comparing.table import columns, sentences
from pyramidbench.doctor import Finding
from pyramidbench.merging import Merging
from pyramidbench.problem import PASSES
from pyramidbench.profiling.profile import Profile
from pyramidbench.profiling.table import about, kernel_table, stage_table
from pyramidbench.profiling.table import sentences as profile_sentences
from pyramidbench.record import Record
from pyramidbench.render import explain, print_line, show_columns, show_table
from pyramidbench.tuning import Choice, setting_text
from pyramidbench.units import MISSING, milliseconds, one_line, ratio, share, tokens
from pyramidbench.verifying import Verdict

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


def show_verdicts(console: Console, verdicts: Sequence[Verdict], device: str) -> None:
    """Print what verifying came to: a row per method, then each call that was not right, and what was refused and why."""
    ran = [verdict for verdict in verdicts if verdict.right]
    passes = [direction for direction in PASSES if any(direction in verdict.right for verdict in ran)]
    rows = [
        [
            verdict.method,
            *("/".join(map(str, verdict.right[direction])) if direction in verdict.right else MISSING for direction in passes),
            str(verdict.sparse), str(sum(verdict.refusals.values())), share(verdict.nearest),
            ", ".join(verdict.backends) or MISSING,
        ]
        for verdict in ran
    ]  # fmt: skip
    if rows:
        show_table(console, "Verify: right/made", rows, ["method", *passes, "sparse", "refused", "nearest", "backend"])
        print_line(console, "right/made: calls that were right, of those that were made", "dim")
        print_line(
            console, "sparse: right calls that left pairs out; in the others any choice of blocks is right", "dim"
        )
        print_line(console, "refused: problems that the method says it cannot do", "dim")
        print_line(
            console,
            "nearest: its largest error, as a share of the allowed one, which is twice that of plain torch",
            "dim",
        )
    faults = [record for verdict in verdicts for record in verdict.faults]
    for fault in faults:
        print_line(console, f"{fault.method}, {fault.direction}, {_shape(fault)}: {fault.status}", "bold red")
        print_line(console, f"  {one_line(fault.reason or '')}", squeeze=False)
    for verdict in verdicts:
        for reason, count in verdict.refusals.items():
            print_line(console, f"{verdict.method} refuses {count}: {reason}", "dim")
    made = sum(count for verdict in ran for _, count in verdict.right.values())
    outcome = f"{len(faults)} not right" if faults else "all right" if made else "so nothing is known"
    print_line(console, f"{made} calls of {len(ran)} methods on {device}: {outcome}.", "bold red" if faults else "bold")


def _shape(record: Record) -> str:
    """The problem of a record and the settings of its method, in few words."""
    queries = (
        ""
        if record.seq_len == record.seq_len_kv
        else f"{record.seq_len} {'query' if record.seq_len == 1 else 'queries'}, "
    )
    told = [
        f"{record.batch} × " if (record.batch or 1) > 1 else "",
        f"{record.heads}:{record.kv_heads} heads of {record.head_dim}, {queries}{record.seq_len_kv} keys, {record.dtype}",
        "" if record.causal else ", not causal",
        "" if record.query_tile is None else f", tile {record.query_tile}, block {record.block_size}",
        "" if record.top_k is None else f", K {record.top_k}",
    ]
    return "".join(told)


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
