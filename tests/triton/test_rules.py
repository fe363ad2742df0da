"""Selection rules where they run on a GPU: walks under rules of their own in the kernels, torch rules on the device."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import Tensor

from pyramidbench.kernels import backends
from pyramidbench.kernels.attending import TorchMethod, WalkMethod
from pyramidbench.method import BlockMethod
from pyramidbench.problem import Problem
from pyramidbench.registry import create, method_class, method_names, preset_names

WALKS = ["moba", "block_mean", "block_mean-shared", "quest", "quest-shared", "hisa", "hip"]
SPECS = [f"{name}:{preset}" for name in method_names() for preset in preset_names(name)]
TORCH = [
    spec for spec in SPECS
    if issubclass(method_class(spec.partition(":")[0]), TorchMethod) and not spec.startswith("random_blocks")
]  # fmt: skip


def tensors(heads: int, kv_heads: int, length: int, dim: int, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, heads, length, dim), (1, kv_heads, length, dim))
    q, k = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    return q, k


def walk_of(named: str, parameters: dict[str, object]) -> WalkMethod:
    """The method; "-shared": a group of heads shares a set."""
    name, _, shared = named.partition("-")
    return cast(WalkMethod, create(name, parameters | ({"head_reduce": "sum_lse"} if shared else {})))


def differing_lists(method: WalkMethod, q: Tensor, k: Tensor) -> tuple[int, int]:
    """How many lists of the kernels are not their twin's, by one block at most, and how many there are."""
    problem = Problem.of(q, k, causal=True, scale=None)
    tiling, rules = method.tiling(problem), method.rules(problem)
    pyramid = method.build(k, problem)
    twin, kernels = (
        backends.route(q, k, pyramid, tiling, rules, problem.scale, backend) for backend in ("reference", "triton")
    )
    assert torch.equal(twin.counts, kernels.counts)
    apart = (twin.mask() != kernels.mask()).sum(-1)
    assert int(apart.max()) <= 2
    return int((apart > 0).sum()), apart.numel()


@pytest.mark.parametrize("named", ["moba", "quest", "hisa", "hip"])
def test_kernels_choose_what_the_twin_chooses_at_token_level(named: str, device: str) -> None:
    q, k = tensors(4, 2, 200, 16, device, torch.float32)
    method = walk_of(named, {"top_k": 3, "block_size": 16, "query_tile": 1})
    assert differing_lists(method, q[:, :, -12:], k)[0] == 0


@pytest.mark.parametrize("named", WALKS)
def test_kernels_choose_what_the_twin_chooses_at_tile_level(named: str, device: str) -> None:
    q, k = tensors(4, 2, 200, 16, device, torch.float32)
    method = walk_of(named, {"top_k": 3, "block_size": 16, "query_tile": 32})
    assert differing_lists(method, q, k)[0] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("named", WALKS)
def test_kernels_choose_what_the_twin_chooses_at_length(named: str, dtype: torch.dtype, device: str) -> None:
    q, k = tensors(8, 2, 8192, 128, device, dtype)
    method = walk_of(named, {"top_k": 8, "query_tile": 1 if named == "moba" else 128})
    assert method.backend(Problem.of(q, k, causal=True, scale=None)) == "triton"
    # A near-tie that the order of a sum decides may swap a block: in one list, or where there are thousands in one of each.
    found, lists = differing_lists(method, q, k)
    assert found <= max(1, lists // 1000)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("spec", TORCH)
def test_torch_rules_choose_on_the_device_what_they_choose_on_a_cpu(spec: str, dtype: torch.dtype, device: str) -> None:
    """And within the memory that the cost names, lists and a chunk of scores; attention runs in the kernel."""
    method = cast(BlockMethod, create(spec, {"query_tile": 64}))
    q, k = tensors(4, 2, 4096, 64, device, dtype)
    problem = Problem.of(q, k, causal=True, scale=None)
    on_device = method.select(q, k, problem)
    on_cpu = method.select(q.cpu(), k.cpu(), Problem.of(q.cpu(), k.cpu(), causal=True, scale=None))
    assert on_device is not None
    assert on_cpu is not None
    on_device.check()
    same = (on_device.mask().cpu() == on_cpu.mask()).all(-1).double().mean()
    assert same >= 0.99
    assert method.backend(problem).endswith("triton")
    assert method(q, k, torch.ones_like(k), problem).isfinite().all()
