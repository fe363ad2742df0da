"""`pyramidbench verify`: whether methods are right here, at small awkward shapes or at those of a suite."""

from __future__ import annotations

from typing import Annotated

import typer
from typer import Argument, Option

from pyramidbench.flags import AsJson, DeviceName, Text

Shapes = Annotated[
    Text, Argument(metavar="[SUITE]", help="a suite's name, or a TOML file, for its shapes; without it, awkward ones")
]
Which = Annotated[
    list[str] | None,
    Option("--method", help="name, name:preset or file.py, comma-separated; without it, all that there are"),
]
Passes = Annotated[Text, Option("--pass", help="some passes only: forward, backward, train, decode")]
Capture = Annotated[Text, Option(help="the capture (FILE.safetensors) that a suite asks for")]


def verify(
    suite: Shapes = None, method: Which = None, pass_: Passes = None, input: Capture = None, device: DeviceName = "auto",
    json: AsJson = False,
) -> None:  # fmt: skip
    """Check that methods are right here, without timing: against fp64 with and without gradients, and for look-ahead."""
    import shutil
    import tempfile
    from pathlib import Path

    from pyramidbench.commands.measuring import exit_code, tell_broken
    from pyramidbench.device import fingerprint, pick_device
    from pyramidbench.errors import UserError
    from pyramidbench.grid import parse_passes
    from pyramidbench.outcome import Settings
    from pyramidbench.output import console, print_json, say
    from pyramidbench.progress import VerifyProgress
    from pyramidbench.render_tools import show_verdicts
    from pyramidbench.suite import load_suite
    from pyramidbench.verifying import SUITE, cells_of, every_spec, verdicts
    from pyramidbench.verifying import verify as verify_cells
    from pyramidbench.worker import working

    methods = [part.strip() for text in method or [] for part in text.split(",")] or None
    passes = None if pass_ is None else parse_passes(pass_, "--pass")
    asked = methods or (every_spec() if suite is None else None)
    cells = cells_of(load_suite(suite or SUITE), asked, passes, input)
    if not cells:
        raise UserError(f"suite '{suite or SUITE}' has no cell in --pass {pass_}; leave --pass out, or name another.")
    tell_broken(cells)
    found = fingerprint(pick_device(device), peaks=False)
    logs = Path(tempfile.mkdtemp(prefix="pyramidbench-verify-"))
    settings = Settings(found.kind, found.name, logs, timing_s=0.0, quality_elements=1)
    try:
        with VerifyProgress(console(error=json), len(cells)) as progress, working(settings) as worker:
            records = verify_cells(cells, worker, settings, progress.finished)
    finally:
        kept = (logs / "logs").is_dir()
        if not kept:
            shutil.rmtree(logs, ignore_errors=True)
    if json:
        print_json([record.model_dump(by_alias=True) for record in records])
    else:
        show_verdicts(console(), verdicts(records), found.name)
    if kept:
        say(console(error=True), f"Logs of what ended badly: {logs / 'logs'}")
    raise typer.Exit(exit_code(records))
