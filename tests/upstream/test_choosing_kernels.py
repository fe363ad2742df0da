"""Adapters of kernels that choose by themselves, with stand-ins that do so row by row, as their papers describe it.

Signatures: fla/ops/moba/parallel.py of fla-core 0.6.0; src/llsa/kernel/torch_op of SingleZombie/LLSA 7f021df. The plain-torch
sum that the gate compares LLSA with was checked against LLSA's own kernels in Triton's interpreter (fp32, both depths: 4e-7).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pyramidbench.clock import Call
from pyramidbench.cost import planned_blocks
from pyramidbench.gate import GateFailure, check_call, check_causal
from pyramidbench.method import BlockMethod
from pyramidbench.passes import Training
from pyramidbench.problem import Problem
from pyramidbench.registry import create
from pyramidbench.timing import stage_columns, timed_call

MakeTensors = Callable[..., tuple[Tensor, Tensor, Tensor]]
GPU = Problem(1, 16, 4, 4096, 4096, 64, 64, "bfloat16", True, 0.125, device="cuda")
FULL = replace(GPU, causal=False)


def attended(q: Tensor, k: Tensor, v: Tensor, wanted: list[int]) -> Tensor:
    """Softmax attention of one query to some keys, scale 1/√D."""
    return (k[wanted] @ q / len(q) ** 0.5).softmax(-1) @ v[wanted]


def moba(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    chunk_size: int,
    topk: int,
    blunder: bool = False,
) -> Tensor:
    """MoBA one query at a time; topk counts the own chunk. `blunder`: attends to one key too many."""
    assert q.shape == k.shape == v.shape
    assert q.shape[0] == 1, "sequences are packed"
    output = torch.zeros_like(q)
    for start, end in zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:], strict=False):
        assert end - start == max_seqlen
        for head in range(q.shape[2]):
            keys, values = k[0, start:end, head], v[0, start:end, head]
            seen, asks = keys.detach(), q[0, start:end, head].detach()
            for i in range(end - start):
                own = i // chunk_size
                gates = [float(seen[c * chunk_size : (c + 1) * chunk_size].mean(0) @ asks[i]) for c in range(own)]
                best = sorted(range(own), key=lambda c: -gates[c])[: topk - 1]
                wanted = [c * chunk_size + j for c in best for j in range(chunk_size)]
                wanted += list(range(own * chunk_size, min(i + 1 + blunder, end - start)))
                output[0, start + i, head] = attended(q[0, start + i, head], keys, values, wanted)
    return output


MOBA = "q, k, v, cu_seqlens, max_seqlen, chunk_size, topk"


@pytest.fixture
def fla_moba(stand_in: Callable[..., Any], signed: Callable[..., Any]) -> BlockMethod:
    stand_in("fla.ops.moba.parallel", parallel_moba=signed(MOBA, moba, MOBA.replace(",", "")))
    stand_in("flash_attn", flash_attn_varlen_func=lambda: None)
    method = create("fla_moba", {"top_k": 2, "block_size": 8})
    assert isinstance(method, BlockMethod)
    return method


@pytest.mark.parametrize("scale", [None, 0.2], ids=["plain", "scaled"])
def test_moba_passes_the_gate_under_the_lists_that_are_told(
    fla_moba: BlockMethod, scale: float | None, tensors: MakeTensors
) -> None:
    """Batched, grouped, ragged: the output is that of a softmax over the lists, and nothing looks ahead."""
    q, k, v = tensors(queries=45, heads=4, kv_heads=2, batch=2)
    problem = Problem.of(q, k, v, causal=True, scale=scale)
    passed = check_call(fla_moba, q, k, v, problem)
    check_causal(fla_moba, q, k, v, problem, passed)
    assert passed.selection is not None
    assert passed.selection.indices.shape[1] == 4, "each query head chooses for itself"
    assert passed.selection.counts[0, 0].tolist() == [min(3, i // 8 + 1) for i in range(45)]
    torch.testing.assert_close(fla_moba(q, k, v, problem), passed.output)


def test_the_gate_sees_when_moba_attends_to_something_else(
    fla_moba: BlockMethod, stand_in: Callable[..., Any], tensors: MakeTensors
) -> None:
    stand_in("fla.ops.moba.parallel", parallel_moba=lambda *given: moba(*given, blunder=True))
    q, k, v = tensors(queries=45, heads=2, kv_heads=1)
    with pytest.raises(GateFailure, match="output error"):
        check_call(fla_moba, q, k, v, Problem.of(q, k, v, causal=True, scale=None))


def test_the_lists_that_moba_is_described_by_are_in_no_timing(fla_moba: BlockMethod, tensors: MakeTensors) -> None:
    q, k, v = tensors(queries=20, heads=2)
    problem = Problem.of(q, k, v, causal=True, scale=None)

    def never(*_: object) -> None:
        raise AssertionError("the lists were made inside a timed call")

    object.__setattr__(fla_moba, "select", never)
    columns = stage_columns(fla_moba, (q, k, v), problem, None, "warm", 0.01)
    timed_call(fla_moba, (q, k, v), problem, None)()
    assert columns["attend_s"] > 0
    assert [columns[name] for name in ("build_s", "route_s", "index_s")] == [None, None, None]
    training = Training.of(fla_moba, q, k, v, replace(problem, direction="train"))
    call: Call = training.train
    call()


@pytest.mark.parametrize("in_budget", [False, True], ids=["besides", "within"])
def test_moba_attends_to_as_many_keys_as_the_others_at_one_top_k(in_budget: bool) -> None:
    """8 blocks by rank beside a sink and two local ones are 10 beside the own one, or 11 with it."""
    method = create("fla_moba", {"forced_in_budget": in_budget})
    assert isinstance(method, BlockMethod)
    own = replace(method, top_k=method.own_top_k(8, GPU))
    assert (own.top_k, own.shared_top_k(GPU), own.budget_set()) == (10 + in_budget, 8, "topk=11")
    others = planned_blocks(own.tiling(GPU), 8, 1, 2)
    assert (own.planned(GPU).listed, own.planned(GPU).pairs) == (others.listed, others.pairs)


@pytest.mark.parametrize(
    ("name", "parameters", "problem", "reason"),
    [
        ("fla_moba", {"top_k": 0}, GPU, "becomes dense attention where no block is kept besides the own one"),
        ("fla_moba", {"top_k": 1, "forced_in_budget": True}, GPU, "becomes dense attention"),
        ("fla_moba", {"query_tile": 64}, GPU, "chooses for every token"),
        ("fla_moba", {"sink_blocks": 1}, GPU, "forces the own block alone"),
        ("fla_moba", {}, replace(GPU, seq_len_q=64), "as many queries as keys, not 64 and 4096"),
        ("llsa", {}, GPU, "has no causal mask"),
        ("llsa", {}, replace(FULL, seq_len_q=3072, seq_len_kv=3072), "powers of two from 1024 tokens on, not 3072"),
        ("llsa:two", {}, FULL, "depth 2 takes powers of two from 16384 tokens on, not 4096"),
        ("llsa", {"top_k": 12}, FULL, "a K of 4 or a higher power of two, not 12"),
        ("llsa", {"block_size": 64}, FULL, "blocks of 16 keys for 16 queries"),
    ],
)
def test_it_says_what_it_cannot_do(name: str, parameters: dict[str, object], problem: Problem, reason: str) -> None:
    assert reason in (create(name, parameters).unsupported(problem) or "")
    assert create(name.partition(":")[0]).unsupported(FULL if "llsa" in name else GPU) is None


def test_moba_needs_both_packages(stand_in: Callable[..., Any]) -> None:
    assert "parallel_moba is not here" in (create("fla_moba").unavailable() or "")
    stand_in("fla.ops.moba.parallel", parallel_moba=lambda: None)
    assert "needs flash-attn" in (create("fla_moba").unavailable() or "")
    stand_in("flash_attn", flash_attn_varlen_func=lambda: None)
    assert create("fla_moba").unavailable() is None


def llsa(q: Tensor, k: Tensor, v: Tensor, topk: list[int], block_size: int) -> Tensor:
    """LLSA one tile at a time: kept keys, then the means of each level above them, weighted by the keys that they stand for."""
    assert q.shape == k.shape == v.shape
    depth, output = len(topk), torch.zeros_like(q)
    for b, h in torch.cartesian_prod(torch.arange(q.shape[0]), torch.arange(q.shape[1])).tolist():
        pooled = [(q[b, h], k[b, h], v[b, h])]
        for _ in range(depth):
            pooled.append(tuple(x.unflatten(0, (-1, block_size)).mean(1) for x in pooled[-1]))  # type: ignore[arg-type]
        for tile in range(q.shape[2] // block_size):
            candidates = list(range(len(pooled[depth][1])))
            seen = [(depth, candidates)]
            for level in range(depth, 0, -1):
                asks = pooled[level][0][tile // block_size ** (level - 1)]
                logits = {node: float(pooled[level][1][node] @ asks) for node in candidates}
                kept = sorted(candidates, key=lambda node, logits=logits: -logits[node])[: topk[0]]  # type: ignore[misc]
                candidates = [node * block_size + j for node in kept for j in range(block_size)]
                seen.append((level - 1, candidates))
            rows = q[b, h, tile * block_size : (tile + 1) * block_size]
            keys = torch.cat([pooled[level][1][nodes] for level, nodes in seen])
            values = torch.cat([pooled[level][2][nodes] for level, nodes in seen])
            weight = torch.cat(
                [torch.full((len(nodes),), float(block_size**level), dtype=q.dtype) for level, nodes in seen]
            )
            logits = rows @ keys.T / q.shape[-1] ** 0.5 + weight.log()
            output[b, h, tile * block_size : (tile + 1) * block_size] = logits.softmax(-1) @ values
    return output


@pytest.fixture
def llsa_installed(stand_in: Callable[..., Any], signed: Callable[..., Any]) -> None:
    one = signed(
        "q, k, v, topk=8, block_size=16",
        lambda q, k, v, topk, block_size: llsa(q, k, v, [topk], block_size),
        "q k v topk block_size",
    )
    two = signed(
        "q, k, v, topk1=8, topk2=8, block_size=16",
        lambda q, k, v, topk1, topk2, block_size: llsa(q, k, v, [topk1, topk2], block_size),
        "q k v topk1 topk2 block_size",
    )
    stand_in("llsa.kernel.torch_op.flash_sparse_attention_res_1", llsa_l1=one)
    stand_in("llsa.kernel.torch_op.flash_sparse_attention_res_2", llsa_l2=two)


@pytest.mark.usefixtures("llsa_installed")
@pytest.mark.parametrize("spec", ["llsa", "llsa:two"])
@pytest.mark.parametrize("scale", [None, 0.2], ids=["plain", "scaled"])
def test_llsa_passes_the_gate_with_its_own_sum(spec: str, scale: float | None, tensors: MakeTensors) -> None:
    q, k, v = tensors(queries=1024, heads=2, kv_heads=1, dtype=torch.float32)
    method, problem = create(spec, {"top_k": 2}), Problem.of(q, k, v, causal=False, scale=scale)
    assert method.unavailable() is None
    passed = check_call(method, q, k, v, problem)
    assert passed.selection is not None
    assert set(passed.selection.counts.flatten().tolist()) == {2}


def test_the_gate_sees_when_llsa_computes_something_else(stand_in: Callable[..., Any], tensors: MakeTensors) -> None:
    def too_flat(q: Tensor, k: Tensor, v: Tensor, topk: int, block_size: int) -> Tensor:
        return llsa(q * 0.9, k, v, [topk], block_size)

    stand_in("llsa.kernel.torch_op.flash_sparse_attention_res_1", llsa_l1=too_flat)
    q, k, v = tensors(queries=1024, dtype=torch.float32)
    with pytest.raises(GateFailure, match="output error"):
        check_call(create("llsa", {"top_k": 2}), q, k, v, Problem.of(q, k, v, causal=False, scale=None))
