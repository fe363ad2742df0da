"""RoPE scaling: rotary positions stretched so that a model runs on more tokens than it was trained on.

Three ways, under transformers' names. "linear" divides every frequency by the factor. "yarn" divides the slow ones and keeps
the fast ones, and sharpens the softmax by its attention factor, which lies in q and k (YaRN, arXiv 2309.00071, section 3).
"dynamic" enlarges the base by the length of the context (NTK-aware; the same paper, section 3.3). Untrained, all of them: what
comes out are tensors of a working model, and no claim about what it can do at that length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from pyramidbench.errors import UserError, unknown

Kind = Literal["yarn", "dynamic", "linear"]
KINDS: tuple[Kind, ...] = get_args(Kind)
OPTION = "--rope-scaling"


@dataclass(frozen=True)
class RopeScaling:
    """How a model's positions were scaled. `trained_tokens`: the positions that it was made for."""

    kind: Kind
    factor: float
    trained_tokens: int

    @property
    def name(self) -> str:
        """Kind and factor, such as "yarn-x32": part of an input's name."""
        return f"{self.kind}-x{self.factor:g}"

    @property
    def told(self) -> str:
        """What tensors under it are, in words."""
        return f"positions scaled by {self.kind} {self.factor:g}, trained on {self.trained_tokens}"

    @property
    def prefixes_stand(self) -> bool:
        """Whether the first tokens of a longer context have the same q, k and v as they would have alone."""
        return self.kind != "dynamic"

    def apply(self, config: Any) -> None:
        """Set it in a model's text configuration, before the model is made from that."""
        parameters = {**config.rope_parameters, "rope_type": self.kind, "factor": self.factor}
        if self.kind == "yarn":
            parameters["original_max_position_embeddings"] = self.trained_tokens
        config.rope_parameters = parameters
        if self.prefixes_stand:  # for "dynamic" this is the length from which on the base grows
            config.max_position_embeddings = round(self.factor * self.trained_tokens)


def scale_positions(asked: str | None, tokens: int, config: Any) -> RopeScaling | None:
    """Set the scaling for a context of `tokens` in a model's text configuration; what was set, None where none is asked for.

    Raises:
        UserError: as `choose_scaling`.
    """
    scaling = choose_scaling(asked, tokens, config)
    if scaling is not None:
        scaling.apply(config)
    return scaling


def choose_scaling(asked: str | None, tokens: int, config: Any) -> RopeScaling | None:
    """The scaling for a context of `tokens`, None where none is asked for.

    asked: "yarn", "dynamic" or "linear", or with a factor, as "yarn:32". Without one the factor is tokens ÷ positions; of
    "dynamic", which looks at the length itself, it is 1. config: a model's text configuration.

    Raises:
        UserError: more tokens than the model has positions and no scaling, or one that does not reach or does not fit it.
    """
    longest = getattr(config, "max_position_embeddings", None)
    if asked is None:
        if longest is not None and tokens > longest:
            raise UserError(
                f"{tokens} tokens are more than the model's {longest} positions; ask for at most {longest}, "
                f"or go beyond what it was trained on with {OPTION} {KINDS[0]}."
            )
        return None
    kind, factor = _parse(asked)
    rope = getattr(config, "rope_parameters", None) or {}
    if longest is None or rope.get("rope_type") != "default":
        has = rope.get("rope_type", "none of one kind for all layers")
        raise UserError(f"{OPTION} needs a model with plain rotary positions; this one has: {has}. Leave it out.")
    if factor is None:
        factor = 1.0 if kind == "dynamic" else tokens / longest
    if kind != "dynamic" and (factor <= 1 or tokens > factor * longest):
        raise UserError(
            f"{OPTION} {asked}: {tokens} tokens on {longest} positions give the factor {tokens / longest:g}; "
            f"give one above 1 that is at least that, or leave {OPTION} out where the tokens fit."
        )
    if kind == "dynamic" and tokens <= longest:
        raise UserError(f"{OPTION} {asked}: {tokens} tokens fit in the {longest} positions; leave {OPTION} out.")
    return RopeScaling(kind, factor, longest)


def _parse(asked: str) -> tuple[Kind, float | None]:
    name, colon, text = asked.partition(":")
    kind = next((known for known in KINDS if known == name), None)
    if kind is None:
        raise unknown(OPTION, name, KINDS)
    if not colon:
        return kind, None
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not 1 <= factor < float("inf"):
        raise UserError(f"{OPTION} '{asked}': accepted is a factor of at least 1 after the colon, as {kind}:8.")
    return kind, factor
