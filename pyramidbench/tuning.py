"""Tuning: the settings of one method that keep a wanted share of attention in the least time, length by length.

Every combination of the given values is a cell of an ordinary sweep, gated and timed as any other. What lies between the values
is not known, and the result holds for the input that it was measured on.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import pandas as pd

from pyramidbench.errors import UserError, unknown
from pyramidbench.frame import Row, measured, summarise
from pyramidbench.grid import MethodSpec, plain
from pyramidbench.registry import parameter_names, split_spec
from pyramidbench.suite import Suite, suite_from_flags

USUAL: dict[str, dict[str, tuple[object, ...]]] = {
    "pyramid": {"beam": (1.0, 2.0, 4.0), "leaf_candidates": (2, 3, 4)},
    "flat": {"score": ("mean", "sub", "exact")},
}
"""What is varied where nothing is said, besides K."""
USUAL_TOP_K = "4,8,16,32"
WITH_FLAGS = ("top_k", "levels", "block_size", "query_tile")
Values = Mapping[str, tuple[object, ...]]


@dataclass(frozen=True)
class Choice:
    """What was found at one length.

    row: the summary's row (`frame.summarise`) of the fastest setting that keeps at least the wanted mass; None where no
    setting does. most: the row that keeps most. settings: how many were measured there.
    """

    seq_len_kv: int
    row: Row | None
    most: Row
    settings: int


def parse_values(texts: Iterable[str], method: str) -> dict[str, tuple[object, ...]]:
    """The values of "beam=1,2,4" for each parameter, or the usual ones of the method where there is no text.

    Raises:
        UserError: no name and values, or a parameter that the method does not have.
    """
    name = split_spec(method)[0]
    values: dict[str, tuple[object, ...]] = {}
    for text in texts:
        key, equals, listed = text.partition("=")
        parts = [part.strip() for part in listed.split(",") if part.strip()]
        if not equals or not parts:
            raise UserError(f"--vary '{text}': accepted: a parameter and its values, as beam=1,2,4.")
        if key.strip() in WITH_FLAGS:
            raise UserError(
                f"--vary {key.strip()}: it has a flag of its own; give --{key.strip().replace('_', '-')} {listed}."
            )
        if key.strip() not in parameter_names(name):
            raise unknown(f"parameter of {name} to vary", key.strip(), parameter_names(name))
        values[key.strip()] = tuple(_value(part) for part in parts)
    return values or dict(USUAL.get(name, {}))


def tuning_suite(method: str, values: Values, axes: Mapping[str, Any], **told: Any) -> Suite:
    """The sweep over every combination of values, beside dense attention. `axes` and `told` as for `suite_from_flags`.

    Raises:
        UserError: a value that the method does not accept, or what `suite_from_flags` refuses.
    """
    whole = suite_from_flags(name="tune", method=["dense", method], **axes, **told)
    (grid,) = whole.grids
    settings = [dict(zip(values, chosen)) for chosen in product(*values.values())]
    specs = [MethodSpec.model_validate({"method": method, **plain(method, setting)}) for setting in settings]
    return whole.model_copy(update={"grids": (grid.model_copy(update={"methods": (grid.methods[0], *specs)}),)})


def choose(frame: pd.DataFrame, mass: float) -> list[Choice]:
    """The fastest setting of each length that keeps at least `mass` of the attention, a mean over layers and heads.

    Raises:
        UserError: nothing was measured with a time and a mass.
    """
    rows = measured(summarise(frame))
    rows = rows[(rows["kind"] != "dense")].dropna(subset=["latency_s", "mass_kept"])
    if rows.empty:
        raise UserError("no setting has both a time and a mass kept; see the run's reasons with `pyramidbench report`.")
    choices = []
    for length, here in rows.groupby("seq_len_kv"):
        ordered = here.sort_values("latency_s").to_dict("records")
        good = [row for row in ordered if row["mass_kept"] >= mass]
        most = max(ordered, key=lambda row: row["mass_kept"])
        choices.append(Choice(int(float(str(length))), good[0] if good else None, most, len(ordered)))
    return choices


def setting_text(row: Row, varied: Sequence[str]) -> str:
    """The varied parameters of a row, as they are given on the command line."""
    parameters = json.loads(row["parameters"])
    return " ".join(f"{name}={_plain(parameters[name])}" for name in ("top_k", *varied) if name in parameters)


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None if text == "none" else text


def _plain(value: object) -> str:
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
