"""What torch rules share: parts of tiles whose size changes nothing, and sets that a group of heads shares or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from pyramidbench.kernels import attending
from pyramidbench.kernels.attending import TorchMethod
from pyramidbench.problem import Problem
from pyramidbench.rates import expected_memory
from pyramidbench.registry import create, method_class, method_names, preset_names
from pyramidbench.selection import ranked_count

MakeTensors = Callable[..., tuple[Tensor, Tensor, Tensor]]
SIZES: dict[str, object] = {"top_k": 3, "block_size": 8, "query_tile": 8}
RULES = [
    spec
    for name in method_names()
    if issubclass(method_class(name), TorchMethod) and name != "random_blocks"
    for spec in (f"{name}:{preset}" for preset in preset_names(name))
]
PROBES = {"probe_rows": 4, "probe_every": 16}


def made(spec: str) -> TorchMethod:
    probed = PROBES if spec.startswith(("vertical_slash", "flexprefill")) else {}
    least = {"min_budget": 0} if spec.startswith("flexprefill") else {}
    return cast(TorchMethod, create(spec, SIZES | probed | least))


@pytest.mark.parametrize("spec", RULES)
def test_tiles_are_taken_in_parts_and_chosen_alike(
    spec: str, tensors: MakeTensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, _ = tensors(queries=150, batch=2, heads=4, kv_heads=2)
    problem = Problem.of(q, k, causal=True, scale=None)
    method = made(spec)
    at_once = method.select(q, k, problem)
    assert at_once is not None
    for elements in (1, 700):
        monkeypatch.setattr(attending, "CHUNK_ELEMENTS", {"cpu": elements})
        in_parts = method.select(q, k, problem)
        assert in_parts is not None
        assert torch.equal(in_parts.mask(), at_once.mask())


@pytest.mark.parametrize("spec", RULES)
def test_memory_that_a_cost_names_has_a_bound(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of scores, only a chunk counts; the rest grows with the lists and the keys."""
    method = made(spec)
    problem = Problem(1, 8, 2, 65536, 65536, 64, 64, "float32", True, 0.125)
    whole = method.cost(problem).workspace_bytes
    monkeypatch.setattr(attending, "CHUNK_ELEMENTS", {"cpu": 1})
    least = method.cost(problem).workspace_bytes
    assert 0 <= whole - least <= 24.0 * (1 << 22)


@pytest.mark.parametrize(
    ("direction", "heads", "kv_heads", "length", "tile", "top_k", "measured"),
    [
        ("forward", 32, 8, 65536, 1, 16, 1_022_595_584),
        ("forward", 16, 16, 65536, 128, 64, 274_890_752),
        ("forward", 16, 1, 65536, 1, 16, 277_872_640),
        ("train", 16, 16, 16384, 128, 64, 417_134_080),
    ],
    ids=["token-level", "tile-level", "one-kv-head", "train"],
)
def test_memory_is_that_of_the_kernels_on_a_gpu(
    direction: str, heads: int, kv_heads: int, length: int, tile: int, top_k: int, measured: int
) -> None:
    """Peaks of the window on an H200, of which most beside the output is the scratch of the attention by key, or of the
    backward; lists alone would be less than half."""
    pytest.importorskip("triton")
    plain = Problem(1, heads, kv_heads, length, length, 128, 128, "bfloat16", True, 0.09, device="cuda")
    problem = replace(plain, direction=cast(Any, direction))
    window = create("sliding_window", {"query_tile": tile, "top_k": top_k})
    assert measured / expected_memory(window, problem)["expected_memory_bytes"] == pytest.approx(1, abs=0.15)


def test_sets_are_those_of_the_heads_that_share_one() -> None:
    problem = Problem(1, 8, 2, 64, 64, 8, 8, "float32", True, 1.0)
    assert made("xattention").sets(problem) == 8
    assert cast(TorchMethod, create("xattention", {"head_reduce": "sum_prob"})).sets(problem) == 2
    assert made("nsa").sets(problem) == 2
    # Heads that read blocks of their own read as many times more.
    shared, own = (
        cast(TorchMethod, create("xattention:top_k", {"head_reduce": how})).attend_cost(problem)
        for how in ("sum_prob", "none")
    )
    assert own.flops == shared.flops
    assert own.bytes > shared.bytes


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("in_budget", [False, True])
@pytest.mark.parametrize(("block_size", "tile"), [(8, 1), (8, 12), (8, 16), (5, 3)])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (40, 65), (300, 300)])
def test_the_longest_list_is_that_of_one_of_the_last_tiles(
    queries: int, keys: int, block_size: int, tile: int, in_budget: bool, causal: bool
) -> None:
    problem = Problem(1, 1, 1, queries, keys, 8, 8, "float32", causal, 1.0)
    for top_k in (0, 2, 50):
        parameters = {"top_k": top_k, "block_size": block_size, "query_tile": tile, "forced_in_budget": in_budget}
        method = cast(TorchMethod, create("random_blocks", parameters))
        q, k = (torch.zeros(1, 1, length, 8) for length in (queries, keys))
        assert int(method.select(q, k, problem).counts.max()) <= method.longest_list(problem)
        tiling, all_tiles = method.tiling(problem), torch.arange(method.tiling(problem).tiles)
        forced = tiling.forced(all_tiles, method.sinks(problem), method.locals(problem))
        most = (forced.count() + ranked_count(top_k, forced, in_budget)).clamp(max=tiling.blocks)
        assert int(most.max()) == method.longest_list(problem)
