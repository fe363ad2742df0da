"""Which cell is profiled: the one that axes describe, or one of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pyramidbench.cell import Cell
from pyramidbench.errors import UserError
from pyramidbench.inputs import CAPTURE_SUFFIX
from pyramidbench.store import load_run
from pyramidbench.suite import Suite, choose_suite

AXES = {"seq_len": "--seq", "seq_len_kv": "--seq-kv", "method": "--method", "layer": "--layers", "direction": "--pass",
        "budget": "--top-k", "heads": "--heads", "batch": "--batch", "head_dim": "--head-dim", "dtype": "--dtype"}  # fmt: skip


def cell_of_flags(axes: Mapping[str, Any], *, input: str | None, causal: bool, seed: int) -> Cell:
    """The one cell that these axes (keywords of `suite_from_flags`) describe.

    Raises:
        UserError: no length, several cells, or what a sweep over them would refuse.
    """
    cells = choose_suite(None, axes, input=input, causal=causal, seed=seed, timed=True).cells()
    if len(cells) == 1:
        return cells[0]
    varied = [flag for name, flag in AXES.items() if len({getattr(cell, name) for cell in cells}) > 1]
    if len({str(cell.parameters) for cell in cells}) > 1 and "--method" not in varied:
        varied.append("--levels, --block-size or --query-tile")
    raise UserError(
        f"these axes make {len(cells)} cells, and a profile is of one; give one value of {', '.join(varied) or 'each axis'}."
    )


def cell_of_run(folder: Path, name: str, given: Mapping[str, Any]) -> Cell:
    """The cell of a run whose identity begins with `name`; `given` are axes, of which none may be set.

    Raises:
        UserError: no such run, no such cell or several, an axis besides, or a run whose sweep cannot be made again.
    """
    flags = [f"--{key.strip('_').replace('_', '-')}" for key, value in given.items() if value]
    if flags:
        raise UserError(f"a cell of a run has its own axes; leave out {', '.join(flags)}, or leave out the run.")
    manifest = load_run(folder).manifest
    captures = [path for path in manifest.settings.get("files", {}) if path.endswith(CAPTURE_SUFFIX)]
    try:
        suite = Suite.model_validate(manifest.suite)
        cells = suite.cells(capture=captures[0] if len(captures) == 1 else None)
    except ValidationError as error:
        raise UserError(f"the sweep of '{folder}' cannot be made again: {str(error).splitlines()[0]}") from None
    found = [cell for cell in cells if cell.identity.startswith(name)]
    if len(found) != 1:
        what = "several cells" if found else "no cell"
        raise UserError(f"'{name}' begins the identity of {what} of '{folder}'; give one as in the column `cell`.")
    return found[0]
