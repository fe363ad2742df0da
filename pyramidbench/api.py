"""The functions that Python users call: choose blocks, attend to them, or both at once."""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import Literal

from torch import Tensor

from pyramidbench.kernels.attention import sparse_attention
from pyramidbench.method import Method
from pyramidbench.problem import Problem
from pyramidbench.registry import create
from pyramidbench.selection import BlockSelection

__all__ = ["pyramid_attention", "select_blocks", "sparse_attention"]


class _Preset(Enum):
    """The default of a parameter that the preset decides."""

    VALUE = "as the preset has it"


PRESET = _Preset.VALUE


def pyramid_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    top_k: int = 16,
    block_size: int = 64,
    causal: bool = True,
    scale: float | None = None,
    preset: str = "default",
    query_tile: int | _Preset = PRESET,
    sink_blocks: int | _Preset | None = PRESET,
    local_blocks: int | _Preset | None = PRESET,
    forced_in_budget: bool | _Preset = PRESET,
    branching: int | _Preset = PRESET,
    levels: int | Literal["auto", "full"] | _Preset = PRESET,
    start_width: int | _Preset = PRESET,
    beam: float | _Preset = PRESET,
    bound_weight: float | Literal["auto"] | _Preset = PRESET,
    leaf_candidates: int | _Preset | None = PRESET,
    node_score: Literal["summary", "children"] | _Preset = PRESET,
    leaf_score: Literal["exact", "sub", "summary"] | _Preset = PRESET,
    sub_blocks: int | _Preset = PRESET,
    head_reduce: Literal["sum_prob", "sum_lse", "lse", "none"] | _Preset = PRESET,
    tile_reduce: Literal["lse", "mean"] | _Preset = PRESET,
    score_rows: int | _Preset | None = PRESET,
) -> Tensor:
    """Attention of each query to the `top_k` key blocks that the pyramid walk chooses for its tile: [B, H, M, Dv].

    q: [B, H, M, D]; k: [B, G, N, D]; v: [B, G, N, Dv], with H a multiple of G; any stride with a contiguous last
    dimension. Returns q's dtype; differentiable in q, k and v, with the chosen blocks as constants. Query i sits at
    position i + N - M, so the last query sees all keys. A query without a key gets 0. `scale` multiplies the logits
    (default 1/√D). docs/selection.md defines every other parameter and the presets "default", "paper", "fast", "fastest".

    Raises:
        ValueError: tensors that do not fit together, or a parameter outside its range; the message says what is accepted.

    Source: "Block Sparse Attention with Log-Linear Complexity", arXiv 2609.31093.
    """
    given: dict[str, object] = {
        "top_k": top_k, "block_size": block_size, "query_tile": query_tile, "sink_blocks": sink_blocks,
        "local_blocks": local_blocks, "forced_in_budget": forced_in_budget, "branching": branching, "levels": levels,
        "start_width": start_width, "beam": beam, "bound_weight": bound_weight, "leaf_candidates": leaf_candidates,
        "node_score": node_score, "leaf_score": leaf_score, "sub_blocks": sub_blocks, "head_reduce": head_reduce,
        "tile_reduce": tile_reduce, "score_rows": score_rows,
    }  # fmt: skip
    set_here = {name: value for name, value in given.items() if value is not PRESET}
    method = create(f"pyramid:{preset}", set_here)
    problem = Problem.of(q, k, v, causal=causal, scale=scale)
    _demand(method, problem)
    return method(q, k, v, problem)


def select_blocks(
    q: Tensor,
    k: Tensor,
    *,
    method: str = "pyramid",
    causal: bool = True,
    scale: float | None = None,
    **parameters: object,
) -> BlockSelection:
    """The key blocks that a method keeps for each query tile.

    q: [B, H, M, D]; k: [B, G, N, D]. `method` is "name" or "name:preset" (`pyramidbench list methods`), and `parameters`
    are those of the method.

    Raises:
        ValueError: an unknown method or parameter, a value outside its range, tensors that do not fit together, or a
            method that attends to everything and so selects nothing.
    """
    made = create(method, parameters)
    problem = Problem.of(q, k, causal=causal, scale=scale)
    _demand(made, problem)
    selection = made.select(q, k, problem)
    if selection is None:
        raise ValueError(f"method '{method}' attends to all keys: it has no selection; accepted: a block method.")
    return selection


def _demand(method: Method, problem: Problem) -> None:
    reason = method.unavailable() or method.unsupported(problem)
    if reason is not None:
        raise ValueError(f"method '{method.name}' with {dataclasses.asdict(method)} cannot do this: {reason}")
