"""From grids to cells: the product of axes and methods, without repeats, cells of the same tensors side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import product
from typing import Any

from pyramidbench.axes import parse_heads
from pyramidbench.budget import Budget
from pyramidbench.capture_file import InputDescription
from pyramidbench.cell import Cell
from pyramidbench.errors import UserError
from pyramidbench.grid import CAPTURE, Grid, MethodSpec
from pyramidbench.method import BlockMethod
from pyramidbench.registry import create, parameter_names, split_spec

DescribeInput = Callable[[str], InputDescription | None]


def grid_cells(grid: Grid, describe: DescribeInput, capture: str | None) -> Iterator[Cell]:
    """The cells of a grid in the order of its axes. An axis that a method has no parameter for adds no cells.

    `describe` gives a capture's description, and None for a synthetic input; `capture` is the file behind "capture".

    Raises:
        UserError: "capture" without a file, a layer that the file lacks, or a damaged file.
    """
    for name in grid.input:
        if name == CAPTURE and capture is None:
            raise UserError("input 'capture' stands for a file, and none was named; give --input FILE.safetensors.")
        source = capture if name == CAPTURE and capture is not None else name
        sizes_of = _sizes(grid, source, describe(source))
        for sizes, (seq, seq_kv), dtype, direction in product(sizes_of, grid.lengths(), grid.dtype, grid.direction):
            # A length is that of the context in a step of decoding, which has one new token unless both lengths are given.
            queries = 1 if direction == "decode" and grid.seq_kv is None else seq
            tensors = {**sizes, "seq_len": queries, "seq_len_kv": seq_kv, "dtype": dtype, "causal": grid.causal}
            for spec in grid.methods:
                cell = Cell(
                    method=spec.method,
                    input=source,
                    direction=direction,
                    seed=grid.seed,
                    timed=grid.timed,
                    **tensors,
                )
                yield from _method_cells(grid, spec, cell)


def arrange(cells: Iterable[Cell]) -> list[Cell]:
    """Cells without repeats, those that share their tensors side by side.

    Among them dense methods come first, then cells that share a tiling: the exact attention that quality is judged by is
    computed once for neighbours. A cell that only measures quality is left out where a timed one of the same content
    does so anyway.
    """
    unique = {cell.identity: cell for cell in cells}
    groups: dict[str, list[Cell]] = {}
    for cell in unique.values():
        if cell.timed or cell.model_copy(update={"timed": True}).identity not in unique:
            groups.setdefault(cell.group, []).append(cell)
    return [cell for group in groups.values() for cell in sorted(group, key=_rank)]


def _rank(cell: Cell) -> tuple[bool, int, int]:
    method = cell.make_method()
    if not isinstance(method, BlockMethod):
        return method.kind != "dense", 0, 0
    return True, method.block_size, -method.query_tile


def _sizes(grid: Grid, source: str, held: InputDescription | None) -> Iterator[dict[str, Any]]:
    """Batch, heads and dims of each set of tensors that an input gives."""
    if held is None:
        for batch, text, dim in product(grid.batch, grid.heads, grid.head_dim):
            heads, kv_heads = parse_heads(text)
            yield {"batch": batch, "heads": heads, "kv_heads": kv_heads, "head_dim": dim, "head_dim_v": dim}
        return
    for layer in held.layers if grid.layers is None else grid.layers:
        if layer not in held.layers:
            raise UserError(f"layers '{layer}': not in '{source}'; accepted: {', '.join(map(str, held.layers))}.")
        yield {
            "batch": held.batch,
            "heads": held.heads,
            "kv_heads": held.kv_heads,
            "head_dim": held.head_dim,
            "head_dim_v": held.head_dim_v,
            "layer": layer,
        }


def _method_cells(grid: Grid, spec: MethodSpec, cell: Cell) -> Iterator[Cell]:
    """The cells of one method on one set of tensors."""
    problem = cell.problem("cpu")
    for parameters in grid.variants(spec):
        if cell.direction == "decode" and "query_tile" in parameter_names(split_spec(spec.method)[0]):
            # Every new token has a set of its own.
            parameters = {**parameters, "query_tile": 1}
        method = create(spec.method, parameters)
        if not isinstance(method, BlockMethod) or method.adaptive:
            yield cell.model_copy(update={"parameters": parameters})
            continue
        for budget in (Budget(method.top_k),) if "top_k" in spec.parameters else grid.budgets():
            top_k = budget.top_k(method, problem)
            # A density is met by the method's own rules already, and a K of the suite's own is the method's.
            if "top_k" not in spec.parameters and not isinstance(budget.asked, float):
                top_k = method.own_top_k(top_k, problem)
            kept = {**parameters, "top_k": top_k}
            yield cell.model_copy(update={"parameters": kept, "budget": budget.text})
