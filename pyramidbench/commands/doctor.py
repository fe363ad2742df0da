"""`pyramidbench doctor`: what this machine can do."""

from __future__ import annotations

import typer

from pyramidbench.flags import AsJson, DeviceName

NOTHING_MEASURABLE = 6


def doctor(device: DeviceName = "auto", json: AsJson = False) -> None:
    """Look at this machine: device, versions, methods, disk. Exit code 0 only if a sweep can run."""
    from pyramidbench.doctor import can_sweep, examine
    from pyramidbench.output import console, print_json
    from pyramidbench.render_tools import show_findings

    findings = examine(device)
    if json:
        print_json([finding.model_dump() for finding in findings])
    else:
        show_findings(console(), findings)
    raise typer.Exit(0 if can_sweep(findings) else NOTHING_MEASURABLE)
