"""What the suites launch, as far as a compiler sees it: every cell's pass on tensors without data, with no kernel run.

Each launch compiles for Ampere, Hopper and Blackwell and fits their shared memory, and none changes with the length alone.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from pyramidbench.cell import Cell
from pyramidbench.expand import grid_cells
from pyramidbench.suite import load_suite
from pyramidbench.verifying import cells_of

SUITES = ("prefill", "training", "training_tokens")
"""The suites with cells on a GPU that need no file. Steps of decoding have their shapes in test_kernels.py."""
PARTS = 4
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64"}
OPTIONS = ("num_warps", "num_stages", "maxnreg")


@dataclass(frozen=True)
class Launch:
    """A kernel, its constants with the compiler's options by name, and its other arguments."""

    kernel: Any
    constants: dict[str, Any]
    arguments: tuple[Any, ...]

    @property
    def ones(self) -> set[str]:
        """Names of the integers that are 1, which a compiler takes for constants."""
        named = zip(self.kernel.arg_names, self.arguments)
        return {name for name, x in named if type(x) is int and x == 1}

    @property
    def shape(self) -> tuple[object, ...]:
        """What makes it another binary, but for integers: the kernel, its constants, and the types of its arguments."""
        return self.kernel, tuple(sorted(self.constants.items())), tuple(map(kind, self.arguments))


def kind(argument: Any) -> str:
    """The compiler's type of an argument."""
    if isinstance(argument, torch.Tensor):
        return f"*{TYPES[argument.dtype]}"
    if hasattr(argument, "block_shape"):
        return f"tensordesc<{TYPES[argument.base.dtype]}{str(list(argument.block_shape)).replace(' ', '')}>"
    return {float: "fp32", int: "i32"}.get(type(argument), type(argument).__name__)


def launches(cells: Iterable[Cell], capability: int) -> list[Launch]:
    """The launches of the cells whose methods are walks, without repeats, on a device of this capability."""
    from triton.runtime.jit import KernelInterface

    from pyramidbench.kernels import attention_bwd, attention_fwd

    found: dict[tuple[object, ...], Launch] = {}

    def noted(kernel: Any, grid: Any) -> Any:  # noqa: ARG001 - how a launch is written
        def call(*arguments: Any, **constants: Any) -> None:
            launch = Launch(kernel, constants, arguments)
            found.setdefault(launch.shape, launch)

        return call

    multiprocessors = SimpleNamespace(multi_processor_count=132)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(KernelInterface, "__getitem__", noted))
        stack.enter_context(mock.patch("torch.cuda.get_device_capability", return_value=divmod(capability, 10)))
        stack.enter_context(mock.patch("torch.cuda.get_device_properties", return_value=multiprocessors))
        for module in (attention_fwd, attention_bwd):
            stack.enter_context(mock.patch.object(module, "has_tile_copies", return_value=capability >= 90))
        for cell in cells:
            run(cell)
    return list(found.values())


def run(cell: Cell) -> None:
    """The cell's pass, if its method is a walk."""
    from pyramidbench.kernels import attention_bwd, attention_fwd, backends
    from pyramidbench.kernels.attending import WalkMethod

    method, problem = cell.make_method(), cell.problem("cuda")
    if not isinstance(method, WalkMethod):
        return
    sizes = ((cell.heads, cell.seq_len, cell.head_dim), (cell.kv_heads, cell.seq_len_kv, cell.head_dim),
             (cell.kv_heads, cell.seq_len_kv, cell.head_dim_v))  # fmt: skip
    q, k, v = (torch.empty(cell.batch, *size, dtype=getattr(torch, cell.dtype), device="meta") for size in sizes)
    tiling, rules = method.tiling(problem), method.rules(problem)
    pyramid = backends.build(k, tiling, rules, "triton")
    selection = backends.route(q, k, pyramid, tiling, rules, problem.scale, "triton")
    out, lse = attention_fwd.attend(q, k, v, selection, problem.scale)
    if problem.needs_gradients:
        attention_bwd.attend_backward(q, k, v, out, lse, torch.empty_like(out), selection, problem.scale)


def suite_cells() -> Iterator[Cell]:
    for name in SUITES:
        for grid in load_suite(name).grids:
            yield from grid_cells(grid, lambda _: None, None)


@cache
def uncovered(capability: int) -> list[Any]:
    """Cases of test_kernels.py's kind for what the suites launch and that file does not compile already.

    An integer that is 1 folds code away and adds none: where the same kernel is compiled there for any integer, it is covered.
    """
    compiling = compile_tests()
    known = {coverage(case) for case in (make(name) for name, make in compiling.CASES.items())}
    cases = []
    for launch in launches(suite_cells(), capability):
        if launch.kernel.fn.__name__ == "_attend_hopper":
            continue
        case = case_of(launch, compiling)
        general = replace(case, constants={name: x for name, x in case.constants.items() if name not in launch.ones})
        if not {coverage(case), coverage(general)} & known:
            cases.append(case)
    return cases


def coverage(case: Any) -> tuple[object, ...]:
    """What makes a case another one than those of test_kernels.py: the kernel, its constants but missing tensors, its warps."""
    constants = tuple(sorted((x, y) for x, y in case.constants.items() if y is not None))
    return case.kernel(), constants, case.warps


def case_of(launch: Launch, compiling: ModuleType) -> Any:
    """Missing tensors are constants; so are integers that are 1."""
    named = dict(zip(launch.kernel.arg_names, launch.arguments))
    options = {name: launch.constants[name] for name in OPTIONS if name in launch.constants}
    constants = {name: x for name, x in launch.constants.items() if name not in OPTIONS}
    constants |= {name: x for name, x in named.items() if x is None or name in launch.ones}
    types = {name: kind(x) for name, x in named.items() if name not in constants and type(x) is not tuple}
    name = f"{launch.kernel.fn.__module__.rpartition('.')[2]}.{launch.kernel.fn.__name__}"
    return compiling.Case(
        name, lambda: launch.kernel, types, constants, options.get("num_warps", 4), options.get("num_stages", 3),
        registers=options.get("maxnreg"),
    )  # fmt: skip


def compile_tests() -> ModuleType:
    """test_kernels.py, whose way of compiling this file uses."""
    name = "compile_tests"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("test_kernels.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("share", range(PARTS))
def test_every_shape_of_the_suites_compiles_and_fits(share: int, capability: int) -> None:
    compiling, mine = compile_tests(), uncovered(capability)[share::PARTS]
    assert mine
    too_much = []
    for case in mine:
        registers, stack, shared = compiling.resources(case, capability)
        told = f"sm_{capability} {case.name}: {registers} registers, {stack} bytes of stack, {shared} bytes of shared memory"
        print(f"\n{told}")
        if shared > compiling.SHARED_BYTES[capability]:
            too_much.append(f"{told}; {case.constants}")
    assert not too_much


def test_what_verify_asks_of_the_widest_heads_fits_the_least_shared_memory() -> None:
    """In fp32 with all rows of a tile: the launches that are nearest to the limit. On a GPU one of them was beyond it."""
    compiling, capability = compile_tests(), 80
    methods = ("pyramid", "pyramid:paper", "pyramid:fast", "pyramid:fastest", "flat:exact")
    cells = [cell for cell in cells_of(load_suite("verify"), methods, None) if cell.head_dim == 256]
    found = launches(cells, capability)
    assert {"_walk", "_mass", "_attend_fwd"} <= {launch.kernel.fn.__name__ for launch in found}
    for launch in found:
        case = case_of(launch, compiling)
        registers, stack, shared = compiling.resources(case, capability)
        print(
            f"\nsm_{capability} {case.name}: {registers} registers, {stack} bytes of stack, {shared} bytes of shared memory"
        )
        assert shared <= compiling.SHARED_BYTES[capability], case.constants


def test_what_hopper_s_own_kernel_is_launched_with_is_compiled() -> None:
    compiling = compile_tests()
    sizes = ("HEAD_DIM", "HEAD_DIM_V", "BLOCK_SIZE", "QUERY_TILE")
    compiled = {shape[:4] for shape in compiling.HOPPER.values()}
    asked = [x.constants for x in launches(suite_cells(), 90) if x.kernel.fn.__name__ == "_attend_hopper"]
    assert asked
    assert {tuple(constants[name] for name in sizes) for constants in asked} <= compiled


@pytest.mark.parametrize("query_tile", [128, 1])
@pytest.mark.parametrize(
    "method", ["pyramid:fastest", "pyramid:fast", "pyramid", "pyramid:paper", "flat", "flat:exact"]
)
def test_the_length_alone_changes_no_launch(method: str, query_tile: int) -> None:
    """Lengths of as many levels, which are no multiples of anything."""
    found = []
    for length in (70_001, 101_003, 129_999):
        cell = Cell(method=method, parameters={"query_tile": query_tile, "top_k": 8}, heads=8, kv_heads=2, seq_len=length,
                    seq_len_kv=length, head_dim=128, head_dim_v=128, dtype="bfloat16", direction="train")  # fmt: skip
        found.append({launch.shape for launch in launches([cell], 90)})
    assert found[0] == found[1] == found[2]
