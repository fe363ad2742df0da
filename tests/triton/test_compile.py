"""Every kernel compiles for Ampere, Hopper and Blackwell without a GPU, and fits their shared memory.

`pytest -s` prints registers, stack (spills) and shared memory of each.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}


@dataclass(frozen=True)
class Case:
    """A kernel, the pointer types that are not int32, its constants and its launch shape."""

    name: str
    kernel: Callable[[], Any]
    pointers: dict[str, str]
    constants: dict[str, object]
    warps: int
    stages: int
    newest_only: bool = False


def attention(
    name: str, *, dim: int, query_tile: int, block: int, rows: int, dtype: str = "bf16", tma: bool = False
) -> Case:
    from pyramidbench.kernels.attention_fwd import _attend_fwd, attend_tile

    tile = attend_tile(rows, block, dim, dim, 4 if dtype == "fp32" else 2, tma=tma)
    padded = 1 << (dim - 1).bit_length()
    blocks = f"tensordesc<{dtype}[1,1,{tile.BLOCK_N},{padded}]>" if tma else "constexpr"
    constants: dict[str, object] = {} if tma else {"k_blocks": None, "v_blocks": None}
    constants |= {"QUERY_TILE": query_tile, "BLOCK_SIZE": block, "HEAD_DIM": dim, "HEAD_DIM_V": dim}
    constants |= {"BLOCK_M": tile.BLOCK_M, "BLOCK_N": tile.BLOCK_N, "BLOCK_D": padded, "BLOCK_DV": padded}
    constants |= {"IS_CAUSAL": True, "USE_TMA": tma}
    pointers = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), f"*{dtype}")
    pointers |= {"lse_ptr": "*fp32", "k_blocks": blocks, "v_blocks": blocks, "scale_log2": "fp32"}
    return Case(name, lambda: _attend_fwd, pointers, constants, tile.num_warps, tile.num_stages, newest_only=tma)


def walk(
    name: str, *, slots: int, mean: bool, heads: int = 1, rows: int = 16, query_tile: int = 128, children: bool = False
) -> Case:
    from pyramidbench.kernels import route_walk

    constants = {"GROUP": heads, "QUERY_TILE": query_tile, "BLOCK_SIZE": 64, "HEAD_DIM": 128, "BLOCK_D": 128}
    constants |= {"BRANCHING": 2, "SLOTS": slots, "CHUNK": route_walk.WALK_CHUNK, "HEADS": heads, "ROWS": rows}
    constants |= {
        "SCORE_ROWS": rows,
        "HAS_BOUNDS": True,
        "IS_CAUSAL": True,
        "IS_MEAN": mean,
        "WITH_FORCED": mean,
        "CHILDREN": children,
    }
    constants |= {"FORCED_IN_BUDGET": False}
    pointers = {"q_ptr": "*bf16", "nodes_ptr": "*bf16", "score_ptr": "*fp32", "scale": "fp32"}
    return Case(name, lambda: route_walk._walk, pointers, constants, 1, route_walk.WALK_STAGES)


def leaf(name: str, *, reduce: str, heads: int = 1, rows: int = 16) -> Case:
    from pyramidbench.kernels import route_leaf

    constants = {"GROUP": heads, "QUERY_TILE": 128, "BLOCK_SIZE": 64, "BLOCK_N": 64, "HEAD_DIM": 128, "BLOCK_D": 128}
    constants |= {"SLOTS": 128, "CHUNK": 16, "HEADS": heads, "ROWS": rows, "SCORE_ROWS": rows, "IS_CAUSAL": True}
    constants |= {"REDUCE": reduce, "FORCED_IN_BUDGET": False}
    pointers = {"q_ptr": "*bf16", "k_ptr": "*bf16", "mass_ptr": "*fp32", "score_ptr": "*fp32", "scale": "fp32"}
    return Case(name, lambda: route_leaf._leaf, pointers, constants, route_leaf.LEAF_WARPS, route_leaf.LEAF_STAGES)


def build(name: str, *, rest: bool) -> Case:
    from pyramidbench.kernels import pyramid_build

    shared = {"BLOCK_SIZE": 64, "HEAD_DIM": 128, "BRANCHING": 2, "BASE": 4, "SPAN": 16, "HAS_BOUNDS": True}
    pointers = {"k_ptr": "*bf16", "nodes_ptr": "*bf16", "stats_ptr": "*fp32", "weight": "fp32"}
    if rest:
        return Case(name, lambda: pyramid_build._build_rest, pointers, {**shared, "BLOCK_D": 32, "ROWS": 32}, 4, 1)
    own = {"BLOCK_N": 64, "BLOCK_D": 128, "HAS_REST": True, "STAGES": pyramid_build.BASE_STAGES}
    return Case(name, lambda: pyramid_build._build_base, pointers, {**shared, **own}, pyramid_build.BASE_WARPS, 1)


CASES = {
    "attention-tile-128": partial(attention, dim=128, query_tile=128, block=64, rows=128),
    "attention-tile-128-tma": partial(attention, dim=128, query_tile=128, block=64, rows=128, tma=True),
    "attention-token-level": partial(attention, dim=128, query_tile=1, block=64, rows=16),
    "attention-head-dim-256": partial(attention, dim=256, query_tile=64, block=64, rows=64),
    "attention-head-dim-96-tma": partial(attention, dim=96, query_tile=64, block=128, rows=128, tma=True),
    "attention-fp32": partial(attention, dim=128, query_tile=64, block=64, rows=64, dtype="fp32"),
    "walk-fastest-k64": partial(walk, slots=1024, mean=True),
    "walk-fast-k64": partial(walk, slots=512, mean=False),
    "walk-token-level": partial(walk, slots=256, mean=False, heads=16, rows=1, query_tile=1),
    "walk-paper": partial(walk, slots=256, mean=False, children=True),
    "leaf-sum-prob": partial(leaf, reduce="sum_prob"),
    "leaf-sum-lse-group-4": partial(leaf, reduce="sum_lse", heads=4),
    "build-base": partial(build, rest=False),
    "build-rest": partial(build, rest=True),
}


@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize("name", CASES)
def test_compiles_and_fits(name: str, capability: int) -> None:
    case = CASES[name](name)
    if case.newest_only and capability < 90:
        pytest.skip("the copy engine for tiles came with Hopper; the launcher takes pointers before it")
    registers, stack, shared = resources(case, capability)
    print(f"\nsm_{capability} {name}: {registers} registers, {stack} bytes of stack, {shared} bytes of shared memory")
    assert shared <= SHARED_BYTES[capability]


def resources(case: Case, capability: int) -> tuple[int, int, int]:
    """Registers a thread, bytes of stack a thread, bytes of shared memory."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = case.kernel()
    signature: dict[str, object] = {}
    aligned = {}
    for place, argument in enumerate(kernel.arg_names):
        if argument in case.constants:
            signature[argument] = "constexpr"
        elif argument.endswith("_strides"):
            signature[argument] = ("i32",) * 3
            aligned |= {(place, part): [["tt.divisibility", 16]] for part in range(3)}
        elif argument.endswith("_ptr"):
            signature[argument] = case.pointers.get(argument, "*i32")
            aligned[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[argument] = case.pointers.get(argument, "i32")
    options = {"num_warps": case.warps, "num_stages": case.stages, "enable_fp_fusion": True}
    source = ASTSource(kernel, signature, case.constants, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return *used(compiled.asm["cubin"], Path(triton.__file__).parent), compiled.metadata.shared


def used(cubin: bytes, triton_folder: Path) -> tuple[int, int]:
    """Registers and stack bytes that the disassembler in Triton's package reports."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton_folder / "backends" / "nvidia" / "bin" / "cuobjdump"
        report = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", report)
    assert found is not None, report
    return int(found[1]), int(found[2])
