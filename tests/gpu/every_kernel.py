"""Launches every Triton kernel at small shapes, each against its twin: short enough to run under compute-sanitizer.

    python tests/gpu/every_kernel.py [--under 'compute-sanitizer --tool memcheck'] [GROUP ...]

Every group runs in a process of its own, all at once, so that kernels compile in parallel; `--under` is put before each
command. Without groups all of them run, and a kernel that none of them launched is an error, as is one of a kernel's paths
that reads or adds in another way (PATHS). The twins come from tests/triton, whose cases are the real tests; the sizes here
are small, ragged and of a head dim that fills a product.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "kernels"
NEAR_TIES = 0.1
"""Share of lists that may differ from the twin's: two blocks with the same score to the last bits, in one list of ten."""
MEAN = {"tile_reduce": "mean", "leaf_score": "summary"}
EXACT = {"leaf_candidates": 2}
PATHS = {
    # A constant of the launch, or the dtype of the first tensor, that makes another kernel of it.
    "route_descend._descend": ("EDGED",),
    "attention_portable._attend_fwd": ("USE_TMA", "float32"),
    "attention_dq._attend_dq": ("USE_TMA", "float32"),
    "attention_dkdv._attend_dkdv": ("USE_TMA", "float32", "SEVERAL", "ADDS"),
    "attention_pieces._add_pieces": ("ADDS",),
    "decode_append._append": ("FINISH", "HAS_COUNTS", "IS_PAGED"),
}
HOPPER = ("attention_hopper.", "USE_TMA")
"""What only Hopper and later devices run, by what stands in its name."""
WALK = {"top_k": 3, "sink_blocks": 1, "local_blocks": 2, "start_width": 4, "beam": 1}


def build(device: str) -> None:
    check = load("test_pyramid_build").check
    for sizes in ((1, 2, 700, 64, 16, 2, 6, 0.35), (2, 1, 555, 24, 16, 3, 4, 0.0)):
        check(sizes, half(device), device)


def pooled(device: str) -> None:
    check = load("test_pooled_queries").check
    for sizes in ((1, 2, 300, 64, 128), (2, 3, 50, 24, 20)):
        check(sizes, half(device), device)


def scored(device: str) -> None:
    """Levels scored whole, then descended, the children of open nodes among the others and apart; a flat scan."""
    flat = {**MEAN, "levels": 1}
    for rules in (
        MEAN,
        {**MEAN, "top_k": 4, "beam": 2},
        flat,
        {"leaf_score": "summary", "score_rows": 16, "levels": 1},
    ):
        route(device, {**WALK, **rules})


def walk(device: str) -> None:
    """Levels gathered tile by tile: by children, from the start, and from a level that was scored whole."""
    route(device, {**WALK, **EXACT, "levels": "full", "node_score": "children", "head_reduce": "sum_lse"})
    from pyramidbench.kernels import route as module

    for nodes in (0, 8):
        with mock.patch.multiple(module, SCORED_NODES=nodes):
            route(device, {**WALK, **MEAN})


def leaf(device: str) -> None:
    """Leaves by exact score and by parts, of rows and of a mean query."""
    for rules in (EXACT, {**EXACT, "tile_reduce": "mean"}, {**EXACT, "leaf_score": "sub", "head_reduce": "lse"}):
        route(device, {**WALK, "score_rows": 16, **rules})


def attention_by_key(device: str) -> None:
    tests = load("test_attention_by_key")
    tests.check(attention_case(tests, query_tile=1), half(device), device)


def attention_portable(device: str) -> None:
    """By pointers: in fp32 and at token level."""
    tests = load("test_attention_fwd")
    tests.check(attention_case(tests, query_tile=32), torch.float32, device)
    for query_tile in (1, 64):
        tests.check(attention_case(tests, query_tile=query_tile), half(device), device)


def attention_copied(device: str) -> None:
    """By the copy engine where there is one: a head dim that `hopper` leaves to the portable kernel."""
    tests = load("test_attention_fwd")
    tests.check(attention_case(tests, query_tile=64, block_size=64, head_dim=96), half(device), device)


def attention_hopper(device: str) -> None:
    """One group of warps a program, and two."""
    if torch.cuda.get_device_capability(device)[0] != 9:
        print("attention_hopper: nothing to run, this device is no Hopper")
        return
    tests = load("test_attention_fwd")
    for query_tile in (64, 128):
        case = attention_case(tests, query_tile=query_tile, block_size=64, queries=500, keys=700)
        tests.check(case, half(device), device)


def attention_bwd(device: str) -> None:
    """Rows by pointers; blocks of several chunks and of one; queries list by list and by key; a set for each head; long lists
    in runs that add up."""
    from pyramidbench.kernels import attention_bwd as module

    tests = load("test_attention_bwd")
    case, plan = partial(attention_case, tests), module.plan
    with mock.patch.object(module, "plan", lambda *sizes: plan(*sizes[:4], chunk_rows=64)):
        tests.check(case(query_tile=1, queries=24), half(device), device)
        tests.check(case(query_tile=16, sets=4), torch.float32, device)
        with pytest.MonkeyPatch.context() as patch:
            tests.by_key(patch, chunk_rows=64, window=33)
            tests.check(case(query_tile=1, queries=40), half(device), device)
        with mock.patch.multiple(module, TABLE_BYTES=1, PIECE_BYTES=2**16):
            tests.check(case(query_tile=1, queries=40), half(device), device)


def attention_bwd_copied(device: str) -> None:
    """Rows and blocks by the copy engine where there is one."""
    from pyramidbench.kernels import attention_bwd as module

    tests, plan = load("test_attention_bwd"), module.plan
    with mock.patch.object(module, "plan", lambda *sizes: plan(*sizes[:4], chunk_rows=64)):
        tests.check(attention_case(tests, query_tile=64, block_size=64), half(device), device)


def mass(device: str) -> None:
    tests = load("test_mass")
    sizes: dict[str, Any] = {"heads": 4, "kv_heads": 2, "queries": 150, "keys": 205, "head_dim": 64, "block_size": 32}
    for query_tile in (1, 128):
        tests.check(tests.Case("", query_tile=query_tile, **sizes), half(device), device)
    tests.check(tests.Case("", query_tile=20, **sizes), torch.float32, device)


def decode(device: str) -> None:
    """Tokens, a prompt and a cut; a step scored whole, by children and parts too, and one gathered that splits."""
    from pyramidbench.kernels import decode_call, decode_step

    tests = load("test_decode")
    for rules in (tests.FULL, {**tests.FULL, "leaf_score": "sub"}):
        tests.check_append(tests.Case("", rules, (70,), paged=True), half(device), device, (50, 1, 19), 48)
    tests.check_counts((50, 16, 1), device)
    sizes: dict[str, Any] = {"queries": 2, "head_dim": 64, "head_dim_v": 64, "paged": True}
    for rules in (WALK, {**WALK, "node_score": "children", "leaf_score": "sub"}):
        case = tests.Case("", {**rules, "top_k": 2}, (90, 20), **sizes)
        assert tests.check_step(case, half(device), device) <= NEAR_TIES
    with (
        mock.patch.object(decode_call, "SCAN_BYTES", 0),
        mock.patch.object(decode_step, "pays_each", return_value=False),
    ):
        case = tests.Case("", {**WALK, "top_k": 2}, (90, 20), **sizes)
        assert tests.check_step(case, half(device), device) <= NEAR_TIES


GROUPS: dict[str, Callable[[str], None]] = {
    call.__name__: call
    for call in (build, pooled, scored, walk, leaf, attention_by_key, attention_portable, attention_copied, attention_hopper,
                 attention_bwd, attention_bwd_copied, mass, decode)
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(GROUPS)}; default all")
    parser.add_argument("--under", default="", help="what to run each group under, with its options")
    parser.add_argument("--alone", action="store_true", help="run the groups in this process")
    asked = parser.parse_args()
    unknown = set(asked.groups) - set(GROUPS)
    if unknown:
        parser.error(f"no group {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}")
    if asked.alone:
        for kernel in sorted(run(asked.groups, "cuda")):
            print(f"launched {kernel}")
        return
    with ThreadPoolExecutor(len(GROUPS)) as pool:
        outputs = list(pool.map(lambda group: apart(group, asked.under), asked.groups or GROUPS))
    if None in outputs:
        raise SystemExit(1)
    found = set(re.findall(r"^launched (.+)$", "\n".join(map(str, outputs)), re.MULTILINE))
    missed = set() if asked.groups else written() - found
    if torch.cuda.get_device_capability()[0] < 9:
        missed = {kernel for kernel in missed if not any(part in kernel for part in HOPPER)}
    print(f"{len(found)} kernels launched" + (f"; not launched: {', '.join(sorted(missed))}" if missed else ""))
    if missed:
        raise SystemExit(1)


def apart(group: str, under: str) -> str | None:
    """The output of one group in a process of its own; None, with the output printed, where it failed."""
    started = time.perf_counter()
    command = [*shlex.split(under), sys.executable, __file__, "--alone", group]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    print(f"{group}: {'ok' if done.returncode == 0 else 'FAILED'}, {time.perf_counter() - started:.0f} s", flush=True)
    if done.returncode == 0:
        return done.stdout
    lines = done.stdout.splitlines()
    print("\n".join(lines if len(lines) <= 80 else [*lines[:50], "…", *lines[-29:]]), flush=True)
    return None


def run(groups: list[str], device: str) -> set[str]:
    """Run the groups in this process; the kernels that they launched, as file.name, and their PATHS as "file.name path"."""
    from triton.runtime.jit import KernelInterface

    launched = set()
    launch = KernelInterface.__getitem__

    def noted(kernel: Any, grid: Any) -> Any:
        name = f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"

        def call(*arguments: Any, **constants: Any) -> Any:
            first = arguments[0]  # a tensor, or a descriptor of one
            dtype = str(getattr(first, "base", first).dtype).removeprefix("torch.")
            launched.update({name} | {f"{name} {x}" for x in PATHS.get(name, ()) if constants.get(x) or x == dtype})
            return launch(kernel, grid)(*arguments, **constants)

        return call

    with mock.patch.object(KernelInterface, "__getitem__", noted):
        for group in groups:
            GROUPS[group](device)
    if device == "cuda":
        torch.cuda.synchronize()
    return launched


def written() -> set[str]:
    """Every kernel that some launcher in kernels/ launches, as file.name, and its PATHS."""
    kernels, launched = set(), set()
    for path in KERNELS.glob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module is not None]
        home = {name.name: str(node.module).rpartition(".")[2] for node in imports for name in node.names}
        for node in nodes:
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(mark) for mark in node.decorator_list):
                kernels.add(f"{path.stem}.{node.name}")
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                name = ast.unparse(node.func.value)
                launched.add(f"{home.get(name, path.stem)}.{name}")
    whole = kernels & launched
    assert set(PATHS) <= whole
    return whole | {f"{kernel} {path}" for kernel, paths in PATHS.items() for path in paths}


def half(device: str) -> torch.dtype:
    """The interpreter's products of bf16 are wrong."""
    return torch.bfloat16 if device == "cuda" else torch.float16


def route(device: str, rules: dict[str, object]) -> None:
    tests = load("test_route")
    case = tests.Case(
        "", heads=2, kv_heads=1, queries=200, keys=260, head_dim=64, block_size=16, query_tile=64, rules=rules
    )
    assert tests.differing_rows(case, half(device), device) <= NEAR_TIES


def attention_case(tests: ModuleType, **sizes: int) -> Any:
    shape = {"heads": 4, "kv_heads": 2, "queries": 70, "keys": 133, "head_dim": 64, "head_dim_v": 64, "block_size": 32}
    return tests.Case("", **{**shape, "sets": 2, **sizes})


def load(name: str) -> ModuleType:
    """A file of tests/triton as a module."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / "tests" / "triton" / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


if __name__ == "__main__":
    main()
