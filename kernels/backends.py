"""Which implementation runs: "triton" on CUDA where the kernels can do the call, "reference" (the torch twins) elsewhere.

A method asks `chosen` before it runs and shows the answer in its row. A request for "triton" that cannot run is an
error with the reason; only "auto" falls back, and the row says so. Triton is imported only when its kernels may run.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from pyramidbench import oracle
from pyramidbench.decoder import CacheLayout
from pyramidbench.errors import UserError
from pyramidbench.kernels import walk, walk_cost
from pyramidbench.kernels.attention import check_call
from pyramidbench.kernels.attention_grad import attention
from pyramidbench.kernels.cache import CacheSizes, CacheStore
from pyramidbench.kernels.pyramid import Pyramid, walked_levels
from pyramidbench.kernels.walk import route_reference
from pyramidbench.kernels.walk_rules import WalkRules
from pyramidbench.problem import DTYPES, Problem
from pyramidbench.selection import BlockSelection
from pyramidbench.tiling import Tiling

if TYPE_CHECKING:
    from pyramidbench.kernels.decoder import BlockDecoder

Implementation = Literal["auto", "triton", "reference"]
Backend = Literal["triton", "reference"]
# A constant: a compiler cannot trace the search, and marking a function as constant would load the compiler at import.
HAS_TRITON = find_spec("triton") is not None


def chosen(implementation: Implementation, gap: str | None) -> Backend:
    """The backend that runs, given why Triton cannot (None: it can).

    Raises:
        UserError: "triton" was asked for and cannot run; the message is the reason.
    """
    if implementation == "reference":
        return "reference"
    if gap is None:
        return "triton"
    if implementation == "triton":
        raise UserError(f"implementation='triton' cannot run: {gap}; accepted here: 'auto', 'reference'")
    return "reference"


def shown(route: Backend, attend: Backend) -> str:
    """One name for the `backend` column: that of both stages, or "route+attend" where they differ."""
    return route if route == attend else f"{route}+{attend}"


def attention_gap(problem: Problem, block_size: int) -> str | None:
    """Why the Triton attention cannot do this problem, or None."""
    missing = _no_triton(problem.device)
    if missing is not None:
        return missing
    from pyramidbench.kernels import attention_fwd

    return attention_fwd.attention_gap(problem.head_dim, problem.head_dim_v, block_size, problem.dtype, problem.scale)


def walk_gap(problem: Problem, tiling: Tiling, rules: WalkRules) -> str | None:
    """Why the Triton walk cannot do this problem under these rules, or None."""
    missing = _no_triton(problem.device)
    if missing is not None:
        return missing
    from pyramidbench.kernels.route import route_gap

    group = 1 if rules.head_reduce == "none" else problem.group
    return route_gap(rules, tiling, problem.head_dim, problem.dtype, group)


def mass_gap(problem: Problem, tiling: Tiling) -> str | None:
    """Why the Triton block mass cannot do this problem, or None."""
    missing = _no_triton(problem.device)
    if missing is not None:
        return missing
    from pyramidbench.kernels import mass

    return mass.mass_gap(tiling, problem.head_dim, problem.dtype, problem.scale)


def workspace_bytes(
    problem: Problem, tiling: Tiling, rules: WalkRules, route_backend: Backend, attend_backend: Backend
) -> float:
    """Bytes held besides inputs and output, by the kernels that run."""
    sets = problem.heads if rules.head_reduce == "none" else problem.kv_heads
    attend = attend_bytes(problem, tiling, sets, walk_cost.longest_list(tiling, rules), attend_backend)
    if route_backend == "reference":
        held = walk_cost.walk_workspace(problem, tiling, rules)
        return held if attend_backend == "reference" else max(held, attend)
    from pyramidbench.kernels import route_memory

    lists = route_memory.lists_bytes(problem, tiling, rules)
    return max(route_memory.route_bytes(problem, tiling, rules), lists + attend)


def attend_bytes(problem: Problem, tiling: Tiling, sets: int, longest: int, backend: Backend) -> float:
    """Bytes that attention to `sets` sets a batch of lists up to `longest` holds besides them, its output and log-sum-exp."""
    if backend == "reference":
        return walk_cost.attention_scratch(problem)
    from pyramidbench.kernels import attention_bwd, attention_by_key, key_windows

    rows = problem.heads // sets * tiling.query_tile
    by_key = attention_by_key.pays_by_key(
        rows, problem.batch * sets * tiling.tiles, problem.head_dim, problem.head_dim_v, problem.itemsize
    )
    held = float(key_windows.PARTIAL_BYTES + key_windows.TABLE_BYTES) if by_key else 0.0
    if not problem.needs_gradients:
        return held
    return max(held, attention_bwd.scratch_bytes(problem, tiling, sets, longest))


def parts_bytes(problem: Problem, tiling: Tiling, rules: WalkRules, route_backend: Backend) -> tuple[float, float]:
    """Bytes of the pyramid and of the lists, which `workspace_bytes` contains."""
    pyramid = walk_cost.pyramid_bytes(problem, tiling, rules)
    if route_backend == "reference":
        return pyramid, walk_cost.lists_bytes(problem, tiling, rules)
    from pyramidbench.kernels import route_memory

    return pyramid, route_memory.lists_bytes(problem, tiling, rules)


def _no_triton(device: str) -> str | None:
    if device != "cuda":
        return f"the Triton kernels need a CUDA device, and the tensors are on {device}"
    return None if HAS_TRITON else "the package triton is not installed"


def attend(
    q: Tensor, k: Tensor, v: Tensor, selection: BlockSelection, problem: Problem, implementation: Implementation
) -> Tensor:
    """Exact attention over the listed blocks, [B, H, M, Dv]: `kernels.attention_grad.attention` on the backend that runs.

    Raises:
        ValueError: tensors or a selection that do not fit together, or "triton" asked for what its kernels cannot do.
    """
    check_call(q, k, v, selection)
    backend = chosen(implementation, attention_gap(problem, selection.block_size))
    return attention(q, k, v, selection, problem.scale, backend)


def build(k: Tensor, tiling: Tiling, rules: WalkRules, backend: Backend) -> Pyramid:
    """The pyramid that a walk under these rules reads; k: [B, G, N, D]."""
    if backend == "reference":
        return walk.build(k, tiling, rules)
    from pyramidbench.kernels import pyramid_build
    from pyramidbench.kernels.route_call import scored_levels

    walked = walked_levels(rules.levels, tiling.blocks, rules.branching, rules.start_width)
    return pyramid_build.build(
        k,
        block_size=tiling.block_size,
        branching=rules.branching,
        # Levels above, which keep all their nodes, nobody reads.
        levels=scored_levels(rules, tiling),
        bound_weight=rules.bounds(k.shape[-1]) if rules.needs_summaries(walked) else 0.0,
    )


def route(
    q: Tensor, k: Tensor, pyramid: Pyramid, tiling: Tiling, rules: WalkRules, scale: float, backend: Backend
) -> BlockSelection:
    """Blocks of every tile of every set, the same on either backend."""
    if backend == "reference":
        return BlockSelection.from_indices(route_reference(q, k, pyramid, tiling, rules, scale), tiling)
    from pyramidbench.kernels import route as kernels

    return kernels.route(q, k, pyramid, tiling, rules, scale)


def block_mass(q: Tensor, k: Tensor, tiling: Tiling, scale: float, tiles: Tensor, backend: Backend) -> Tensor:
    """Exact share of attention of each block on some tiles: fp32 [B, H, T, blocks]; "reference" is the oracle itself."""
    if backend == "reference":
        sizes = {"block_size": tiling.block_size, "query_tile": tiling.query_tile}
        return oracle.block_mass(q, k, **sizes, causal=tiling.causal, scale=scale, tiles=tiles)
    from pyramidbench.kernels import mass

    return mass.block_mass(q, k, tiling, scale, tiles)


def decode_gap(problem: Problem, rules: WalkRules, block_size: int) -> str | None:
    """Why the Triton kernels cannot do a decoding step of this problem under these rules, or None."""
    missing = _no_triton(problem.device)
    if missing is not None:
        return missing
    from pyramidbench.kernels import decode_call

    return decode_call.decode_gap(cache_sizes(problem, rules, block_size), rules, problem.dtype)


def cache_sizes(problem: Problem, rules: WalkRules, block_size: int, pages: int | None = None) -> CacheSizes:
    """Sizes of a cache for the problem's seq_len_kv tokens."""
    dims = (problem.head_dim, problem.head_dim_v)
    return CacheSizes.of(problem.batch, problem.kv_heads, dims, problem.seq_len_kv, block_size, rules, pages)


def cache_bytes(problem: Problem, rules: WalkRules, block_size: int) -> float:
    """Bytes of a contiguous cache for the problem's seq_len_kv tokens."""
    sizes = cache_sizes(problem, rules, block_size)
    return float(CacheStore.empty(sizes, DTYPES[problem.dtype], torch.device("meta")).bytes)


def step_bytes(problem: Problem, rules: WalkRules, block_size: int, implementation: Implementation) -> float:
    """Bytes that a decoding step of the Triton kernels holds beside its output; of torch's, whose scratch is no one's: 0."""
    if chosen(implementation, decode_gap(problem, rules, block_size)) != "triton":
        return 0.0
    from pyramidbench.kernels.decode_call import DecodeCall
    from pyramidbench.kernels.decode_step import scratch_bytes

    dtype, nowhere = DTYPES[problem.dtype], torch.device("meta")
    shape = (problem.batch, problem.heads, problem.seq_len_q, problem.head_dim)
    store = CacheStore.empty(cache_sizes(problem, rules, block_size), dtype, nowhere)
    return float(
        scratch_bytes(DecodeCall(torch.empty(shape, dtype=dtype, device=nowhere), store, rules, problem.scale))
    )


def decoder(
    problem: Problem, rules: WalkRules, block_size: int, layout: CacheLayout, implementation: Implementation
) -> BlockDecoder:
    """A cache for the problem's seq_len_kv tokens whose newest tokens choose blocks under these rules.

    Raises:
        UserError: "triton" was asked for and cannot run.
    """
    from pyramidbench.kernels.decoder import BlockDecoder

    backend = chosen(implementation, decode_gap(problem, rules, block_size))
    pages = None
    if layout.paged:
        pages = layout.pages or problem.batch * -(-problem.seq_len_kv // block_size)
    sizes = cache_sizes(problem, rules, block_size, pages)
    return BlockDecoder(sizes, rules, problem.scale, DTYPES[problem.dtype], layout, backend)
