"""Suite: a named sweep. It comes from a TOML file or from flags, and turns into a list of cells."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from pyramidbench.axes import parse_axis
from pyramidbench.cell import Cell
from pyramidbench.errors import UserError, unknown
from pyramidbench.expand import DescribeInput, arrange, grid_cells
from pyramidbench.grid import CAPTURE, Grid
from pyramidbench.inputs import describe_input
from pyramidbench.units import tokens

PACKAGE = "pyramidbench.suites"
DEFAULT_METHODS = ("dense", "pyramid", "flat")
EXAMPLES = {
    "seq": "; give the lengths to measure, such as 4k..64k",
    "methods": '; give a list such as ["dense", "pyramid"]',
    "grid": "; give at least one [[grid]]",
    "name": '; give the suite a name, such as name = "demo"',
}


class Suite(BaseModel):
    """Grids that are swept together into one run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    description: str = ""
    grids: tuple[Grid, ...] = Field(alias="grid", min_length=1)

    def cells(self, describe: DescribeInput = describe_input, *, capture: str | None = None) -> list[Cell]:
        """Every cell of the suite once; cells that share their tensors side by side, dense ones first.

        `describe` gives the description of a capture, and None for a synthetic input; `capture` is the file that the
        input "capture" stands for.

        Raises:
            UserError: "capture" without a file, a file that no grid asks for, a layer that the file lacks, or a damaged
                file.
        """
        asked = [name for grid in self.grids for name in grid.input]
        if capture is not None and capture not in asked and CAPTURE not in asked:
            names = ", ".join(dict.fromkeys(asked))
            raise UserError(f"suite '{self.name}' asks for no capture: its input is {names}; leave '{capture}' out.")
        return arrange(cell for grid in self.grids for cell in grid_cells(grid, describe, capture))

    def at_lengths(self, lengths: Sequence[int]) -> Suite:
        """The same suite at some of its lengths only (`seq`, in tokens); a grid that has none of them is left out.

        Raises:
            UserError: a length that no grid has.
        """
        held = sorted({length for grid in self.grids for length in grid.seq})
        if missing := [length for length in lengths if length not in held]:
            raise UserError(
                f"suite '{self.name}' has no length of {', '.join(map(tokens, missing))}; "
                f"accepted with --seq: {', '.join(map(tokens, held))}."
            )
        kept = (grid.at_lengths(lengths) for grid in self.grids)
        return self.model_copy(update={"grids": tuple(grid for grid in kept if grid.seq)})


def suite_names() -> tuple[str, ...]:
    """Names of the suites that come with pyramidbench, sorted."""
    names = (entry.name for entry in files(PACKAGE).iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml")))


def load_suite(name_or_path: str) -> Suite:
    """The suite of that name, or the one in a file whose path ends in ".toml".

    Raises:
        UserError: no such suite or file, or a file that is no suite; the message names the file, the key, the value and
            what is accepted.
    """
    if not name_or_path.endswith(".toml"):
        if name_or_path not in suite_names():
            raise unknown("suite", name_or_path, (*suite_names(), "FILE.toml"))
        return _parse((files(PACKAGE) / f"{name_or_path}.toml").read_bytes(), f"{name_or_path}.toml")
    try:
        return _parse(Path(name_or_path).read_bytes(), name_or_path)
    except OSError as error:
        known = ", ".join(suite_names())
        raise UserError(
            f"suite file '{name_or_path}' cannot be read: {error.strerror}; accepted: a TOML file, or one of {known}."
        ) from None


def suite_from_flags(
    *,
    seq: str | None = None,
    seq_kv: str | None = None,
    top_k: str | None = None,
    sparsity: str | None = None,
    keep: str | None = None,
    levels: str | None = None,
    block_size: str | None = None,
    query_tile: str | None = None,
    heads: str | None = None,
    head_dim: str | None = None,
    batch: str | None = None,
    dtype: str | None = None,
    pass_: str | None = None,
    method: Sequence[str] = (),
    input: Sequence[str] = (),
    layers: str | None = None,
    causal: bool = True,
    seed: int = 0,
    timed: bool = True,
    name: str = "sweep",
) -> Suite:
    """A suite of one grid from the values of command-line flags; None and () leave a key at its default.

    Raises:
        UserError: a value that is not accepted; the message calls it by its flag.
    """
    given = {
        "seq": seq,
        "seq_kv": seq_kv,
        "top_k": top_k,
        "sparsity": sparsity,
        "keep": keep,
        "levels": levels,
        "block_size": block_size,
        "query_tile": query_tile,
        "heads": heads,
        "head_dim": head_dim,
        "batch": batch,
        "dtype": dtype,
        "pass": pass_,
        "methods": _split(method) or DEFAULT_METHODS,
        "input": _split(input) or None,
        "layers": layers,
        "causal": causal,
        "seed": seed,
        "timed": timed,
    }
    grid = {key: value for key, value in given.items() if value is not None}
    try:
        return Suite.model_validate({"name": name, "grid": [grid]}, context={"flags": True})
    except ValidationError as error:
        raise UserError(_explain(error, "")) from None


def _split(values: Sequence[str]) -> list[str]:
    """Text at its commas, or each text of a list at its commas."""
    return [part.strip() for text in ([values] if isinstance(values, str) else values) for part in text.split(",")]


def choose_suite(
    suite: str | Suite | None,
    axes: Mapping[str, Any],
    *,
    input: str | None,
    causal: bool,
    seed: int,
    timed: bool,
) -> Suite:
    """The suite that was named or given, or one of `axes` (keywords of `suite_from_flags`, None where not given).

    Of a suite, `seq` picks some of its lengths; all other axes are its own.

    Raises:
        UserError: both or neither were given, a length that the suite lacks, or what `load_suite` and
            `suite_from_flags` refuse.
    """
    given = {key: value for key, value in axes.items() if value not in (None, [], ())}
    if suite is None:
        if "seq" not in given:
            raise UserError("no suite and no lengths; give a suite (`pyramidbench list suites`), or --seq 4k..64k.")
        inputs = [] if input is None else [input]
        return suite_from_flags(**given, input=inputs, causal=causal, seed=seed, timed=timed)
    chosen = load_suite(suite) if isinstance(suite, str) else suite
    lengths = given.pop("seq", None)
    if given:
        flags = ", ".join(f"--{key.strip('_').replace('_', '-')}" for key in given)
        raise UserError(f"suite '{chosen.name}' has its own axes; leave out {flags}, or leave out the suite.")
    return chosen if lengths is None else chosen.at_lengths(parse_axis(lengths, "--seq"))


def _parse(content: bytes, source: str) -> Suite:
    try:
        table = tomllib.loads(content.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"suite {source} is not valid TOML: {error}.") from None
    try:
        return Suite.model_validate(table)
    except ValidationError as error:
        raise UserError(_explain(error, f"suite {source}")) from None


def _explain(error: ValidationError, source: str) -> str:
    """The most telling of pydantic's errors as one line: where it is, what was given and what is accepted.

    An unknown key comes first, since a key that then is missing follows from it. `source` is the suite's file, or empty
    for flags, where keys are called by their flag.
    """
    item = min(error.errors(), key=lambda item: item["type"] != "extra_forbidden")
    loc = item["loc"]
    place = [source] if source else []
    if source and len(loc) > 1 and isinstance(loc[1], int):
        place.append(f"grid {loc[1] + 1}")
    return f"{', '.join(place)}{': ' if place else ''}{_what(item, flags=not source)}"


def _what(item: ErrorDetails, *, flags: bool) -> str:
    cause = item.get("ctx", {}).get("error")
    if isinstance(cause, UserError):
        return str(cause)
    key = next((step for step in reversed(item["loc"]) if isinstance(step, str)), "suite")
    if item["type"] == "extra_forbidden":
        fields = (Grid if len(item["loc"]) > 1 else Suite).model_fields
        return str(unknown("key", key, (field.alias or name for name, field in fields.items())))
    label = f"--{key.replace('_', '-')}" if flags else key
    if item["type"] == "missing":
        return f"{label} is missing{EXAMPLES.get(key, '')}."
    if item["type"] in ("tuple_type", "too_short"):
        return f"{label} = {item['input']!r}: not a list with something in it{EXAMPLES.get(key, '')}."
    return f"{label} = {item['input']!r}: {item['msg'][:1].lower()}{item['msg'][1:]}."
