"""Arms: the attentions that are compared, at one budget."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyramidbench.errors import UserError, unknown
from pyramidbench.method import BlockMethod, Method
from pyramidbench.problem import Pass, Problem
from pyramidbench.registry import create

BUDGET: dict[str, object] = {"top_k": 6, "block_size": 64, "query_tile": 64}
"""At 4 096 tokens 6 of 64 blocks by rank, about a tenth, besides the first one and the last two."""
PARAMETERS: dict[str, dict[str, object]] = {
    "dense": {},
    "flat": BUDGET,
    "pyramid": {**BUDGET, "start_width": 16},
    "sliding_window": BUDGET,
}
"""The pyramid starts at 16 nodes, two levels above the 64 blocks; the default of 64 would leave a single level."""


@dataclass(frozen=True)
class Arm:
    """A method of PARAMETERS and the seed of weights and batches."""

    method: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.method}-{self.seed}"


class Attention:
    """A method as the attention of a decoder, through its Triton kernels on a GPU: an error where these cannot run."""

    def __init__(self, method: str, device: torch.device, scaled_to: int = 1, dense: str = "dense") -> None:
        """scaled_to divides the block size, for tiny tests; dense: which method stands for "dense", such as "dense:flash"."""
        parameters = dict(PARAMETERS[method])
        if device.type == "cuda" and parameters:
            parameters["implementation"] = "triton"
        if parameters and scaled_to > 1:
            parameters.update(block_size=64 // scaled_to, query_tile=64 // scaled_to)
        self.method: Method = create(dense if method == "dense" else method, parameters)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, H, N, D]; k, v [B, G, N, D]. Returns [B, H, N, D]."""
        return self.method(q, k, v, self._problem(q, k, v))

    def backend(self, q: Tensor, k: Tensor, v: Tensor) -> str:
        """What runs."""
        return self.method.backend(self._problem(q, k, v))

    def choice_share(self, length: int) -> float:
        """Share of the queries of a window with more eligible blocks than K; 0 for dense attention."""
        if not isinstance(self.method, BlockMethod):
            return 0.0
        problem = Problem(1, 1, 1, length, length, 64, 64, "float32", True, 0.125)
        tiling = self.method.tiling(problem)
        tile = torch.arange(tiling.tiles)
        forced = tiling.forced(tile, self.method.sinks(problem), self.method.locals(problem))
        rows = tiling.last_position(tile) - tiling.first_position(tile) + 1
        return float(rows[tiling.eligible(tile, forced) > self.method.top_k].sum()) / length

    def _problem(self, q: Tensor, k: Tensor, v: Tensor) -> Problem:
        direction: Pass = "train" if torch.is_grad_enabled() else "forward"
        return replace(Problem.of(q, k, v, causal=True, scale=None), direction=direction)


def parse_arms(text: str) -> tuple[Arm, ...]:
    """Arms as "dense:0,flat:0,pyramid:0,pyramid:1".

    Raises:
        UserError: an unknown method, or a seed that is no number.
    """
    arms = []
    for item in text.split(","):
        method, _, seed = item.strip().partition(":")
        if method not in PARAMETERS:
            raise unknown("arm", method, PARAMETERS)
        if not (seed or "0").isdigit():
            raise UserError(f"arm '{item}': the seed is no whole number; accepted: method:seed, such as dense:0.")
        arms.append(Arm(method, int(seed or 0)))
    return tuple(dict.fromkeys(arms))
