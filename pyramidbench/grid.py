"""Grid: one block of a suite. Its keys are axes, parsed and checked here; `pyramidbench.expand` makes cells of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import product
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, model_serializer, model_validator

from pyramidbench.axes import (
    Levels,
    parse_axis,
    parse_heads,
    parse_keep,
    parse_levels,
    parse_sparsity,
    split_list,
)
from pyramidbench.budget import Budget
from pyramidbench.errors import UserError, unknown
from pyramidbench.inputs import synthetic_names
from pyramidbench.method import BlockMethod
from pyramidbench.problem import DTYPES, PASSES, Pass
from pyramidbench.registry import create, parameter_names, split_spec

SYNTHETIC = synthetic_names()
CAPTURE = "capture"
DEFAULT_TOP_K = 16
PARAMETER_AXES = ("block_size", "query_tile", "levels")


def flag_or_key(name: str, info: ValidationInfo) -> str:
    """What messages call a key: "--query-tile" where the grid comes from flags, "query_tile" in a file."""
    flags = bool(info.context and info.context.get("flags"))
    return f"--{name.replace('_', '-')}" if flags else name


def _parsed(parse: Callable[[Any, str], Any]) -> BeforeValidator:
    """Parse a key's value with `parse(value, name)`; None stays None, and a parsed tuple goes through unchanged."""

    def validate(value: object, info: ValidationInfo) -> object:
        return None if value is None else parse(value, flag_or_key(info.field_name or "", info))

    return BeforeValidator(validate)


def _from_zero(value: object, name: str) -> tuple[int, ...]:
    return parse_axis(value, name, minimum=0)


def _heads(value: object, name: str) -> tuple[str, ...]:
    accepted = "a list of heads such as 32:8,16"
    pairs = (parse_heads(item, name) for item in split_list(value, name, accepted))
    return tuple(dict.fromkeys(f"{heads}:{kv_heads}" for heads, kv_heads in pairs))


def _keeps(value: object, name: str) -> tuple[str, ...]:
    accepted = "a list of budgets such as 2048tok,64blk,5%"
    return tuple(dict.fromkeys(str(parse_keep(item, name)) for item in split_list(value, name, accepted)))


def _names(accepted: tuple[str, ...], file_ending: str | None = None) -> Callable[[object, str], tuple[str, ...]]:
    def parse(value: object, name: str) -> tuple[str, ...]:
        items = split_list(value, name, ", ".join(accepted))
        for item in items:
            if item not in accepted and not (file_ending and item.endswith(file_ending)):
                raise unknown(f"{name}", item, accepted if not file_ending else (*accepted, f"FILE{file_ending}"))
        return tuple(dict.fromkeys(items))

    return parse


def parse_passes(value: object, name: str) -> tuple[str, ...]:
    """The passes of a list; `name` is what a message calls it.

    Raises:
        UserError: one that does not exist.
    """
    return _names(PASSES)(value, name.replace("direction", "pass"))


Axis = Annotated[tuple[int, ...], _parsed(parse_axis)]
AxisFromZero = Annotated[tuple[int, ...], _parsed(_from_zero)]


class MethodSpec(BaseModel):
    """A method in a suite: "name", "name:preset", or a table {method = "name", and any parameter of it}."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: str
    parameters: dict[str, Any] = {}

    @model_serializer
    def _as_table(self) -> dict[str, Any]:
        return {"method": self.method, **self.parameters}

    @model_validator(mode="before")
    @classmethod
    def _from_text_or_table(cls, value: object) -> object:
        if isinstance(value, str):
            value = {"method": value}
        if not isinstance(value, Mapping) or not isinstance(value.get("method"), str):
            raise UserError(
                f'methods {value!r}: accepted: "name", "name:preset" or {{method = "name", parameter = …}}.'
            )
        parameters = {key: item for key, item in value.items() if key != "method"}
        return {"method": value["method"], "parameters": plain(value["method"], parameters)}


def plain(method: str, parameters: Mapping[str, object]) -> dict[str, object]:
    """The parameters as the method holds them: validated, and plain JSON values.

    Raises:
        UserError: unknown method, preset or parameter, or a value that it does not accept.
    """
    made = create(method, parameters)
    for name, value in parameters.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"method '{method}': {name} = {value}: not a finite number.")
    return {name: getattr(made, name, value) for name, value in parameters.items()}


class Grid(BaseModel):
    """Axes (each a tuple of points), and the methods that are measured on their product.

    A synthetic input takes its shape from `heads`, `head_dim` and `batch`; a capture brings its own, and `layers` picks
    among its layers (None: all). Of top_k, sparsity and keep one is given, or none (K 16). An axis that is None leaves
    the method's own default or preset in force.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    seq: Axis
    seq_kv: Axis | None = None
    input: Annotated[tuple[str, ...], _parsed(_names((*SYNTHETIC, CAPTURE), ".safetensors"))] = ("topics",)
    layers: AxisFromZero | None = None
    heads: Annotated[tuple[str, ...], _parsed(_heads)] = ("1:1",)
    head_dim: Axis = (64,)
    batch: Axis = (1,)
    dtype: Annotated[tuple[str, ...], _parsed(_names(tuple(DTYPES)))] = ("float32",)
    causal: bool = True
    direction: Annotated[tuple[Pass, ...], _parsed(parse_passes)] = Field(default=("forward",), alias="pass")
    block_size: Axis | None = None
    query_tile: Axis | None = None
    levels: Annotated[tuple[Levels, ...] | None, _parsed(parse_levels)] = None
    top_k: AxisFromZero | None = None
    sparsity: Annotated[tuple[float, ...] | None, _parsed(parse_sparsity)] = None
    keep: Annotated[tuple[str, ...] | None, _parsed(_keeps)] = None
    methods: tuple[MethodSpec, ...] = Field(min_length=1)
    seed: int = Field(default=0, ge=0)
    timed: bool = True

    @model_validator(mode="after")
    def _fits_together(self, info: ValidationInfo) -> Grid:
        called = {name: flag_or_key(name, info) for name in Grid.model_fields}
        given = [called[name] for name in ("top_k", "sparsity", "keep") if getattr(self, name) is not None]
        if len(given) > 1:
            raise UserError(f"{' and '.join(given)} each set the budget; accepted: one of them.")
        self._check_lengths(called["seq"], called["seq_kv"])
        synthetic = [name for name in self.input if name in SYNTHETIC]
        shape = [called[name] for name in ("heads", "head_dim", "batch") if name in self.model_fields_set]
        if shape and not synthetic:
            raise UserError(f"{shape[0]}: a capture brings its own heads, head_dim and batch; leave {shape[0]} out.")
        if self.layers is not None and len(synthetic) == len(self.input):
            raise UserError(f"{called['layers']}: {', '.join(synthetic)} has no layers; only a capture has them.")
        for spec in self.methods:
            for parameters in self.variants(spec):
                self._check_keep(create(spec.method, parameters))
        return self

    def _check_lengths(self, seq: str, seq_kv: str) -> None:
        if self.seq_kv and 1 not in (len(self.seq), len(self.seq_kv)) and len(self.seq) != len(self.seq_kv):
            raise UserError(
                f"{seq} has {len(self.seq)} lengths and {seq_kv} has {len(self.seq_kv)}: they are paired one to one; "
                "accepted: as many of both, or one of either."
            )

    def _check_keep(self, made: object) -> None:
        for budget in self.budgets():
            if isinstance(made, BlockMethod) and not isinstance(budget.asked, int | float):
                budget.asked.blocks(made.block_size, 1)

    def lengths(self) -> tuple[tuple[int, int], ...]:
        """Pairs of queries and keys, tokens."""
        keys = self.seq_kv or self.seq
        count = max(len(self.seq), len(keys))
        return tuple((self.seq[min(at, len(self.seq) - 1)], keys[min(at, len(keys) - 1)]) for at in range(count))

    def at_lengths(self, wanted: Collection[int]) -> Grid:
        """The same grid at those of its `seq` that are wanted, with the key lengths that belong to them; maybe at none."""
        seq, seq_kv = self.seq, self.seq_kv
        places = [at for at, length in enumerate(seq) if length in wanted]
        if seq_kv is not None and len(seq_kv) == len(seq):
            seq_kv = tuple(seq_kv[at] for at in places)
        return self.model_copy(update={"seq": tuple(seq[at] for at in places), "seq_kv": seq_kv})

    def variants(self, spec: MethodSpec) -> Iterator[dict[str, Any]]:
        """Parameters of a method along the axes that it has; its own in the suite win over an axis."""
        has = parameter_names(split_spec(spec.method)[0])
        axes = {name: getattr(self, name) for name in PARAMETER_AXES if name in has and name not in spec.parameters}
        axes = {name: points for name, points in axes.items() if points is not None}
        for chosen in product(*axes.values()):
            yield plain(spec.method, {**dict(zip(axes, chosen)), **spec.parameters})

    def budgets(self) -> tuple[Budget, ...]:
        if self.keep is not None:
            return tuple(Budget(parse_keep(text)) for text in self.keep)
        points = self.sparsity if self.sparsity is not None else self.top_k
        return tuple(Budget(point) for point in (points if points is not None else (DEFAULT_TOP_K,)))
