"""The functions that Python users call: choose blocks, attend to them, both at once, or measure methods."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from pyramidbench.choosing import Chooser
from pyramidbench.clock import check_cache
from pyramidbench.kernels import backends
from pyramidbench.parts import parse_part
from pyramidbench.problem import Problem
from pyramidbench.selection import BlockSelection
from pyramidbench.store import Run
from pyramidbench.suite import Suite, choose_suite
from pyramidbench.sweeping import CELL_BUDGET_S, TIMING_S, make_plan, run_plan

__all__ = ["pyramid_attention", "select_blocks", "sparse_attention", "sweep"]


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
    implementation: Literal["auto", "triton", "reference"] | _Preset = PRESET,
) -> Tensor:
    """Attention of each query to the `top_k` key blocks that the pyramid walk chooses for its tile: [B, H, M, Dv].

    q: [B, H, M, D]; k: [B, G, N, D]; v: [B, G, N, Dv], with H a multiple of G; any stride with a contiguous last
    dimension. Returns q's dtype. Differentiable in q, k and v on either implementation, with the chosen blocks as constants;
    there is no second derivative. torch.autocast casts the tensors as for scaled_dot_product_attention; torch.compile sees
    two operators. Query i sits at position i + N - M, so the last query sees all keys. A query without a key gets 0 and
    passes no gradient. `scale` multiplies the logits (default 1/√D). docs/selection.md defines every other parameter and the
    presets "default", "paper", "fast", "fastest".

    Raises:
        ValueError: tensors that do not fit together, or a parameter outside its range; the message says what is accepted.

    Source: "Block Sparse Attention with Log-Linear Complexity", arXiv 2609.31093.
    """
    given: dict[str, object] = {
        "top_k": top_k, "block_size": block_size, "query_tile": query_tile, "sink_blocks": sink_blocks,
        "local_blocks": local_blocks, "forced_in_budget": forced_in_budget, "branching": branching, "levels": levels,
        "start_width": start_width, "beam": beam, "bound_weight": bound_weight, "leaf_candidates": leaf_candidates,
        "node_score": node_score, "leaf_score": leaf_score, "sub_blocks": sub_blocks, "head_reduce": head_reduce,
        "tile_reduce": tile_reduce, "score_rows": score_rows, "implementation": implementation,
    }  # fmt: skip
    set_here = {name: value for name, value in given.items() if value is not PRESET}
    chooses = Chooser.of(f"pyramid:{preset}", set_here)
    q, k, v = _as_autocast(q, k, v)
    problem = Problem.of(q, k, v, causal=causal, scale=scale)
    selection = chooses.select(q, k, problem)
    assert selection is not None
    return backends.attend(q, k, v, selection, problem, chooses.implementation)


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: BlockSelection,
    *,
    scale: float | None = None,
    implementation: Literal["auto", "triton", "reference"] = "auto",
) -> Tensor:
    """Attention of each query to the keys of its tile's selected blocks: [B, H, M, Dv] in q's dtype.

    q: [B, H, M, D]; k: [B, G, N, D]; v: [B, G, N, Dv]; the selection's heads are G, or H when each query head has its
    own set. Differentiable in q, k and v, with the blocks as constants; there is no second derivative. A query without a key
    gets 0 and passes no gradient. scale multiplies the logits (default 1/√D). Sums run in fp32 (fp64 for fp64 inputs);
    under torch.autocast the tensors are cast as for scaled_dot_product_attention.

    Raises:
        ValueError: tensors that do not fit together, a selection made for other lengths or heads, or an `implementation`
            that cannot run here.
    """
    q, k, v = _as_autocast(q, k, v)
    problem = Problem.of(q, k, v, causal=selection.causal, scale=scale)
    return backends.attend(q, k, v, selection, problem, implementation)


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
    chooses = Chooser.of(method, parameters)
    q, k = _as_autocast(q, k)
    selection = chooses.select(q, k, Problem.of(q, k, causal=causal, scale=scale))
    if selection is None:
        raise ValueError(f"method '{method}' attends to all keys: it has no selection; accepted: a block method.")
    return selection


def sweep(
    suite: str | Suite | None = None,
    *,
    seq: str | None = None,
    seq_kv: str | None = None,
    method: Sequence[str] = (),
    input: str | None = None,
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
    layers: str | None = None,
    pass_: str | None = None,
    causal: bool = True,
    seed: int = 0,
    timed: bool = True,
    device: str = "auto",
    out: str | Path | None = None,
    fresh: bool = False,
    timing_s: float = TIMING_S,
    cell_budget_s: float = CELL_BUDGET_S,
    cache: Literal["cold", "warm"] = "cold",
    part: str | None = None,
) -> Run:
    """Measure methods against each other and return the run, whose `.frame` is one row per cell.

    Give a suite (a name, the path of a TOML file, or a Suite; then `input` is the capture that it asks for, and `seq` picks
    some of its lengths), or axes as on the command line: `seq="4k..64k"`, `method=["dense", "pyramid"]`, `top_k="8,16"`,
    `keep="5%"`, `pass_="train"`. A call with the same arguments goes on where an interrupted one stopped. `cache` is what the
    L2 is before each timed call. `part="2/8"` measures the second of eight shares, whose runs `pyramidbench merge` joins.
    Cells run in a child process, which imports your script: call this under `if __name__ == "__main__":`.

    Raises:
        UserError: an argument that is not accepted, or a folder that cannot be used; nothing measured is lost.
    """
    axes: dict[str, Any] = {
        "seq": seq, "seq_kv": seq_kv, "method": method, "top_k": top_k, "sparsity": sparsity, "keep": keep,
        "levels": levels, "block_size": block_size, "query_tile": query_tile, "heads": heads, "head_dim": head_dim,
        "batch": batch, "dtype": dtype, "layers": layers, "pass_": pass_,
    }  # fmt: skip
    chosen = choose_suite(suite, axes, input=input, causal=causal, seed=seed, timed=timed)
    capture = None if suite is None else input
    plan = make_plan(
        chosen, capture=capture, device=device, timing_s=timing_s, cell_budget_s=cell_budget_s, cache=check_cache(cache),
        part=None if part is None else parse_part(part),
    )  # fmt: skip
    return run_plan(plan, out=None if out is None else Path(out), fresh=fresh)


def _as_autocast(*tensors: Tensor) -> list[Tensor]:
    """The tensors as torch.autocast hands them to scaled_dot_product_attention: fp32 and lower to its dtype."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors]
