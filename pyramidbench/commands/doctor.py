"""`pyramidbench doctor`: what this machine can do."""

from __future__ import annotations

import typer

from pyramidbench.flags import AsJson, DeviceName


def doctor(device: DeviceName = "auto", json: AsJson = False) -> None:
    """Look at this machine: device, packages, methods, disk. Exit code 0 only if a sweep can run."""
    from pyramidbench.doctor import examine
    from pyramidbench.output import console, print_json
    from pyramidbench.render import show_table

    findings = examine(device)
    if json:
        print_json([finding.model_dump() for finding in findings])
    else:
        rows = [[f.subject, "ok" if f.fine else "NO", f.found, f.advice] for f in findings]
        show_table(console(), "Doctor", rows, ["what", "state", "found", "reason"])
    raise typer.Exit(0 if all(finding.fine for finding in findings) else 6)
