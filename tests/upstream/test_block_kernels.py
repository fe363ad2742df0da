"""Adapters of block-sparse kernels with stand-ins that have the packages' signatures and read the lists as the packages do.

Signatures and layouts: fla/ops/nsa/parallel.py of fla-core 0.6.0; flash_attn/cute/interface.py and block_sparsity.py of
flash-attn-4 4.0.0b36; fastvideo_kernel/block_sparse_attn.py of fastvideo-kernel 0.3.5; flash_moba_interface.py of
mit-han-lab/flash-moba 39d9ac0; block_sparse_attn_interface.py of mit-han-lab/Block-Sparse-Attention 49d6c39.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import pyramidbench
from pyramidbench.errors import UserError
from pyramidbench.method import BlockMethod
from pyramidbench.problem import Problem
from pyramidbench.registry import create
from pyramidbench.selection import BlockSelection

MakeTensors = Callable[..., tuple[Tensor, Tensor, Tensor]]
MaskedDense = Callable[..., tuple[Tensor, Tensor]]
Install = Callable[..., None]

NSA = (
    "q, k, v, g_cmp=None, g_slc=None, g_swa=None, block_indices=None, block_counts=16, block_size=64, window_size=0, "
    "scale=None, cu_seqlens=None"
)
FA4 = (
    "q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False, window_size=(None, None), "
    "learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, score_mod=None, "
    "score_mod_bwd=None, mask_mod=None, aux_tensors=None, aux_scalars=None, block_sparse_tensors=None, "
    "block_sparse_tensors_bwd=None, return_lse=False, gather_bwd_recompute_p=False, gather_bwd_token_chunk=None"
)
VSA = "q, k, v, q2k_idx, q2k_num, variable_block_sizes"
MOBA = (
    "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, moba_col_offsets, moba_col_nnz, moba_row_indices, "
    "lg_block_m=64, lg_block_n=64, dropout_p=0.0, softmax_scale=None, causal=False, softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False"
)
BSA = (
    "q, k, v, cu_seqlens_q, cu_seqlens_k, head_mask_type, streaming_info, base_blockmask, max_seqlen_q_, max_seqlen_k_, "
    "p_dropout, deterministic=False, softmax_scale=None, is_causal=False, exact_streaming=False, return_attn_probs=False"
)


class BlockSparseTensorsTorch(NamedTuple):
    """As in flash_attn.cute.block_sparsity."""

    mask_block_cnt: Tensor
    mask_block_idx: Tensor
    full_block_cnt: Tensor | None = None
    full_block_idx: Tensor | None = None
    cu_total_m_blocks: Tensor | None = None
    cu_block_idx_offsets: Tensor | None = None
    block_size: tuple[int, int] | None = None
    dq_write_order: Tensor | None = None
    dq_write_order_full: Tensor | None = None
    spt: bool | None = None


def listed(counts: Tensor, lists: Tensor, columns: int) -> Tensor:
    """bool [..., rows, columns]: True where one of the first `counts` numbers of a row's list says so."""
    mask = torch.zeros(*counts.shape, columns, dtype=torch.bool)
    for place in counts.nonzero().tolist():
        *row, count = *place, int(counts[tuple(place)])
        wanted = lists[tuple(row)][:count].long()
        mask[(*row, wanted[wanted >= 0])] = True
    return mask


def elements(blocks: Tensor, tile: int, size: int, queries: int, keys: int, causal: bool) -> Tensor:
    """bool [B, H, M, N] of a block mask [B, H, tiles, blocks]."""
    mask = blocks.repeat_interleave(tile, 2)[:, :, :queries].repeat_interleave(size, 3)[..., :keys]
    return mask.tril(keys - queries) if causal else mask


@pytest.fixture
def install(stand_in: Callable[..., Any], signed: Callable[..., Any], masked_dense: MaskedDense) -> Install:
    """Makes the stand-in of an adapter importable."""

    def by_head(*tensors: Tensor) -> list[Tensor]:
        return [x.transpose(1, 2) for x in tensors]

    def nsa(
        q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, block_counts: Tensor, block_size: int, scale: float
    ) -> Tensor:
        batch, queries, heads, _ = q.shape
        keys, kv_heads = k.shape[1:3]
        assert block_indices.shape[:3] == (batch, queries, kv_heads) == block_counts.shape
        if q.requires_grad:
            assert block_indices.shape[3].bit_count() == 1, "fla's backward (ops/utils/csr.py) takes a power of two"
        blocks = listed(*by_head(block_counts), *by_head(block_indices), -(-keys // block_size))
        blocks = blocks.repeat_interleave(heads // kv_heads, 1)
        output, _ = masked_dense(*by_head(q, k, v), elements(blocks, 1, block_size, queries, keys, True), scale)
        return output.transpose(1, 2)

    def fa4(
        q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool,
        block_sparse_tensors: BlockSparseTensorsTorch, block_sparse_tensors_bwd: BlockSparseTensorsTorch | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        queries, keys = q.shape[1], k.shape[1]
        given = block_sparse_tensors
        assert given.block_size is not None
        assert given.full_block_cnt is not None
        assert given.full_block_idx is not None
        tile, size = given.block_size
        tiles, blocks = -(-queries // tile), -(-keys // size)
        assert given.mask_block_idx.shape[:3] == (q.shape[0], q.shape[2], tiles)
        partly = listed(given.mask_block_cnt, given.mask_block_idx, blocks)
        whole = listed(given.full_block_cnt, given.full_block_idx, blocks)
        assert not (partly & whole).any()
        # The kernel masks what is listed as partly seen; what is listed as whole it takes as it is.
        mask = elements(partly, tile, size, queries, keys, causal) | elements(whole, tile, size, queries, keys, False)
        assert (mask == elements(partly | whole, tile, size, queries, keys, causal)).all(), "a whole block is not whole"
        if block_sparse_tensors_bwd is not None:
            back = block_sparse_tensors_bwd
            assert (listed(back.mask_block_cnt, back.mask_block_idx, tiles).mT == partly).all()
            assert back.full_block_cnt is not None
            assert back.full_block_idx is not None
            assert (listed(back.full_block_cnt, back.full_block_idx, tiles).mT == whole).all()
        output, lse = masked_dense(*by_head(q, k, v), mask, softmax_scale)
        return output.transpose(1, 2), lse

    def vsa(
        q: Tensor, k: Tensor, v: Tensor, q2k_idx: Tensor, q2k_num: Tensor, variable_block_sizes: Tensor
    ) -> tuple[Tensor, Tensor]:
        assert q.shape[:2] == k.shape[:2] == v.shape[:2], "no grouped heads"
        assert q.shape[2] % 64 == 0
        assert k.shape[2] == 64 * len(variable_block_sizes)
        assert {q2k_idx.dtype, q2k_num.dtype, variable_block_sizes.dtype} == {torch.int32}
        assert q2k_idx.is_contiguous()
        within = torch.arange(64) < variable_block_sizes[:, None]
        mask = elements(listed(q2k_num, q2k_idx, len(within)), 64, 64, q.shape[2], k.shape[2], False) & within.flatten()
        return masked_dense(q, k, v, mask)

    def unpack(x: Tensor, starts: Tensor, longest: int) -> Tensor:
        assert starts.dtype == torch.int32
        assert starts.tolist() == [longest * i for i in range(len(starts))]
        return x.unflatten(0, (-1, longest)).transpose(1, 2)

    def moba(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
        moba_col_offsets: Tensor, moba_col_nnz: Tensor, moba_row_indices: Tensor, lg_block_m: int, lg_block_n: int,
        softmax_scale: float, causal: bool,
    ) -> Tensor:  # fmt: skip
        assert lg_block_m == 512
        assert (moba_col_offsets.dtype, moba_col_nnz.dtype, moba_row_indices.dtype) == (
            torch.int64,
            torch.int32,
            torch.int32,
        )
        batch, heads, blocks = moba_col_offsets.shape
        assert heads == q.shape[1]
        mask = torch.zeros(batch, heads, max_seqlen_q, blocks, dtype=torch.bool)
        for b, h, c in moba_col_nnz.nonzero().tolist():
            start = int(moba_col_offsets[b, h, c])
            rows = moba_row_indices[start : start + int(moba_col_nnz[b, h, c])].long()
            assert (rows.diff() > 0).all()
            mask[b, h, rows, c] = True
        tensors = (unpack(q, cu_seqlens_q, max_seqlen_q), *(unpack(x, cu_seqlens_k, max_seqlen_k) for x in (k, v)))
        seen = elements(mask, 1, lg_block_n, max_seqlen_q, max_seqlen_k, causal)
        return masked_dense(*tensors, seen, softmax_scale)[0].transpose(1, 2).flatten(0, 1)

    def bsa(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, head_mask_type: Tensor,
        streaming_info: None, base_blockmask: Tensor, max_seqlen_q_: int, max_seqlen_k_: int, p_dropout: float,
        softmax_scale: float, is_causal: bool,
    ) -> Tensor:  # fmt: skip
        assert (streaming_info, p_dropout) == (None, 0.0)
        assert head_mask_type.tolist() == [1] * q.shape[1]
        assert base_blockmask.shape[1:] == (q.shape[1], -(-max_seqlen_q_ // 128), -(-max_seqlen_k_ // 128))
        tensors = (unpack(q, cu_seqlens_q, max_seqlen_q_), *(unpack(x, cu_seqlens_k, max_seqlen_k_) for x in (k, v)))
        seen = elements(base_blockmask, 128, 128, max_seqlen_q_, max_seqlen_k_, is_causal)
        return masked_dense(*tensors, seen, softmax_scale)[0].transpose(1, 2).flatten(0, 1)

    def make(adapter: str) -> None:
        if adapter == "fla_nsa":
            used = "q k v block_indices block_counts block_size scale"
            stand_in("fla.ops.nsa.parallel", parallel_nsa=signed(NSA, nsa, used))
        elif adapter == "fa4_blocks":
            used = "q k v softmax_scale causal block_sparse_tensors block_sparse_tensors_bwd"
            stand_in("flash_attn.cute", flash_attn_func=signed(FA4, fa4, used))
            stand_in("flash_attn.cute.block_sparsity", BlockSparseTensorsTorch=BlockSparseTensorsTorch)
        elif adapter == "fastvideo_vsa":
            function = signed(VSA, vsa, VSA.replace(",", ""))
            stand_in("fastvideo_kernel.block_sparse_attn", block_sparse_attn_from_indices=function)
        elif adapter == "flash_moba":
            used = MOBA.partition("dropout_p")[0].replace("=64", "").replace(",", "") + "softmax_scale causal"
            rows = signed("top_k, chunk_size, seqlen, causal=False", lambda **_: 512, "top_k chunk_size seqlen causal")
            stand_in(
                "flash_moba.flash_moba_interface",
                flash_moba_attn_varlen_func=signed(MOBA, moba, used),
                decide_lg_block_m=rows,
            )
        else:
            used = BSA.partition("deterministic")[0].replace(",", "") + "softmax_scale is_causal"
            stand_in("block_sparse_attn", block_sparse_attn_func=signed(BSA, bsa, used))

    return make


class Case(NamedTuple):
    """An adapter with what it can do: queries, keys, heads, key/value heads, and whether it is causal."""

    adapter: str
    queries: int
    keys: int
    heads: int
    kv_heads: int
    causal: bool
    parameters: dict[str, object]
    scale: float | None = 0.3


CASES = [
    Case("fla_nsa", 100, 100, 32, 2, True, {"block_size": 16, "top_k": 2}),
    Case("fla_nsa", 20, 95, 16, 1, True, {"block_size": 16, "top_k": 1}),
    Case("fa4_blocks", 700, 700, 4, 2, True, {"top_k": 1}),
    Case("fa4_blocks", 300, 900, 3, 1, True, {"top_k": 1}),
    Case("fa4_blocks", 300, 700, 2, 2, False, {"top_k": 2}),
    Case("fa4_blocks", 400, 720, 4, 2, True, {"top_k": 2, "block_size": 64, "query_tile": 64}),
    Case("fastvideo_vsa", 256, 256, 2, 2, False, {"top_k": 2}, None),
    Case("fastvideo_vsa", 100, 319, 4, 2, False, {"top_k": 4}),
    Case("flash_moba", 100, 100, 4, 2, True, {"block_size": 16, "top_k": 1}),
    Case("flash_moba", 30, 95, 3, 1, True, {"block_size": 16, "top_k": 1}),
    Case("flash_moba", 40, 75, 2, 2, False, {"block_size": 16, "top_k": 2}),
    Case("block_sparse_attn", 700, 700, 4, 2, True, {"top_k": 1}),
    Case("block_sparse_attn", 300, 600, 3, 1, False, {"top_k": 2}),
]
ADAPTERS = sorted({case.adapter for case in CASES})


def called(
    case: Case, tensors: MakeTensors, direction: str = "forward"
) -> tuple[Tensor, BlockSelection, tuple[Tensor, ...]]:
    """The adapter's output, the lists that it attended to, and its inputs."""
    leaves = tensors(queries=case.queries, keys=case.keys, heads=case.heads, kv_heads=case.kv_heads, batch=2, dim=8)
    q, k, v = (x.requires_grad_(direction != "forward") for x in leaves)
    method = create(case.adapter, case.parameters)
    problem = replace(Problem.of(q, k, v, causal=case.causal, scale=case.scale), direction=direction)
    selection = method.select(q.detach(), k.detach(), problem)
    assert selection is not None
    assert selection.density() < 0.95, "the case leaves nothing out"
    return method.attend(q, k, v, selection, problem), selection, (q, k, v)


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case.adapter}-{case.queries}-{case.keys}-{case.heads}:{case.kv_heads}"
)
def test_the_kernel_attends_to_our_lists(case: Case, install: Install, tensors: MakeTensors) -> None:
    """Lengths and heads all differ, so a swapped dimension shows; the lists are those of the rule, and so is the output."""
    install(case.adapter)
    output, selection, (q, k, v) = called(case, tensors)
    expected = pyramidbench.sparse_attention(q, k, v, selection, scale=case.scale)
    assert output.shape == expected.shape
    torch.testing.assert_close(output, expected)
    method = create(case.adapter, case.parameters)
    assert isinstance(method, BlockMethod)
    own = {name: getattr(method, name) for name in ("top_k", "block_size", "query_tile")}
    rule = pyramidbench.select_blocks(q, k, method="flat", causal=case.causal, scale=case.scale, **own)
    assert torch.equal(selection.indices, rule.indices)


@pytest.mark.parametrize("case", CASES[:3] + CASES[6::2], ids=lambda case: f"{case.adapter}-{case.queries}-{case.keys}")
def test_gradients_flow_through_the_layout(case: Case, install: Install, tensors: MakeTensors) -> None:
    install(case.adapter)
    output, selection, leaves = called(case, tensors, "train")
    expected = pyramidbench.sparse_attention(*leaves, selection, scale=case.scale)
    for one, other in zip(
        torch.autograd.grad(output.square().sum(), leaves),
        torch.autograd.grad(expected.square().sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_without_its_package_it_says_in_one_line_what_to_do(adapter: str, install: Install) -> None:
    said = create(adapter).unavailable()
    assert said is not None
    assert "\n" not in said
    assert "is not here (no module " in said
    assert "pip install" in said or "build it from" in said
    install(adapter)
    assert create(adapter).unavailable() is None


GPU = Problem(1, 16, 1, 4096, 4096, 64, 64, "bfloat16", True, 0.125, device="cuda")
FULL = replace(GPU, causal=False)


@pytest.mark.parametrize(
    ("adapter", "parameters", "problem", "reason"),
    [
        ("fla_nsa", {}, replace(GPU, kv_heads=2), "groups of 16 query heads or a higher power of two, not 8"),
        ("fla_nsa", {}, FULL, "is always causal"),
        ("fla_nsa", {"query_tile": 64}, GPU, "chooses for every token, not for tiles of 64"),
        ("fla_nsa", {"block_size": 48}, GPU, "16 keys or a higher power of two, not 48"),
        (
            "fla_nsa",
            {},
            replace(GPU, seq_len_q=64, direction="train"),
            "cannot do 64 queries on 4096 keys in pass train",
        ),
        ("fla_nsa", {"rule": "quest"}, GPU, "gives a group one set of blocks, and 'quest' one to each query head"),
        ("fla_nsa", {"choose": "fla", "top_k": 30}, GPU, "at most 32 blocks of 64 keys"),
        ("fla_nsa", {"choose": "fla", "sink_blocks": 0}, GPU, "always keeps the first block and the last two"),
        ("fa4_blocks", {"block_size": 32}, GPU, "blocks of 128 keys for 128 queries, not to blocks of 32 for 128"),
        (
            "fa4_blocks",
            {"block_size": 64},
            replace(GPU, direction="train"),
            "blocks of 128 keys for 128 queries, not to blocks of 64 for 128",
        ),
        ("fa4_blocks", {}, replace(GPU, head_dim=192, head_dim_v=192), "head dims up to 128, not 192"),
        ("fastvideo_vsa", {}, GPU, "has no causal mask; give --no-causal"),
        ("fastvideo_vsa", {}, replace(FULL, dtype="float16"), "computes in bfloat16, not in float16"),
        ("fastvideo_vsa", {"query_tile": 128}, FULL, "blocks of 64 keys for 64 queries"),
        ("flash_moba", {"query_tile": 64}, GPU, "chooses for every token"),
        ("block_sparse_attn", {}, replace(GPU, head_dim=96, head_dim_v=96), "one head dim of 32, 64 or 128"),
        ("flex", {"block_size": 64}, GPU, "multiples of 128 on a GPU, not 64 and 128"),
        ("flex", {"mode": "compiled"}, replace(GPU, device="cpu", dtype="float64"), "no float64 when compiled"),
        ("flex", {}, replace(GPU, device="cpu", direction="train"), "no backward on a CPU"),
    ],
)
def test_it_says_what_it_cannot_do(adapter: str, parameters: dict[str, object], problem: Problem, reason: str) -> None:
    assert reason in (create(adapter, parameters).unsupported(problem) or "")


@pytest.mark.parametrize("adapter", [*ADAPTERS, "flex"])
def test_it_can_do_an_ordinary_problem_and_its_row_names_rule_and_kernel(adapter: str) -> None:
    problem = FULL if adapter == "fastvideo_vsa" else GPU
    method = create(adapter)
    assert method.unsupported(problem) is None
    assert method.unsupported(replace(problem, direction="train")) is None
    chosen, _, kernel = method.backend(problem).partition("+")
    assert chosen in ("triton", "reference")
    assert kernel.startswith(method.kernel)  # type: ignore[attr-defined]


@pytest.mark.parametrize("rule", ["pyramid:fast", "exact_topk", "sliding_window"])
def test_any_block_method_can_be_the_rule(rule: str, tensors: MakeTensors) -> None:
    q, k, v = tensors(queries=100, heads=4, kv_heads=2, dim=16)
    sizes = {"top_k": 2, "block_size": 16, "query_tile": 16}
    problem = Problem.of(q, k, v, causal=True, scale=None)
    ours, theirs = create(rule, sizes), create("flex", {**sizes, "rule": rule})
    torch.testing.assert_close(theirs(q, k, v, problem), ours(q, k, v, problem))
    assert theirs.cost(problem).stages == ours.cost(problem).stages


@pytest.mark.parametrize(
    ("rule", "message"),
    [("dense", "gives no lists"), ("flex", "gives no lists"), ("slidng_window", "Did you mean 'sliding_window'")],
)
def test_a_rule_without_lists_is_refused(rule: str, message: str) -> None:
    with pytest.raises(UserError, match=f"rule = .*{message}"):
        create("flex", {"rule": rule})


def test_with_a_rule_that_keeps_as_much_as_it_needs_no_budget_is_asked_of_it() -> None:
    method = create("flex", {"rule": "exact_topp", "block_size": 128, "query_tile": 128})
    assert isinstance(method, BlockMethod)
    assert method.adaptive
    assert method.budget_set() is None
    tiling = method.tiling(GPU)
    assert method.planned(GPU).pairs == tiling.visible_pairs()
    assert not create("flex").adaptive  # type: ignore[attr-defined]


def test_flex_attention_takes_a_single_query_as_a_tile() -> None:
    """In decoding every query has a set of its own, and its kernels want tiles of 128 on a GPU."""
    method, step = create("flex", {"query_tile": 1}), replace(GPU, seq_len_q=1, direction="decode")
    assert method.unsupported(step) is None
    assert "not 128 and 1" in (method.unsupported(replace(step, seq_len_q=2)) or "")


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_flex_attention_compiles_on_a_cpu(tensors: MakeTensors) -> None:
    """The real kernel: forward, grouped heads, fewer queries than keys, a ragged end."""
    q, k, v = tensors(queries=100, keys=170, heads=4, kv_heads=2, dim=32, dtype=torch.float32)
    problem = Problem.of(q, k, v, causal=True, scale=0.3)
    sizes = {"top_k": 2, "block_size": 32, "query_tile": 32}
    method = create("flex", {**sizes, "mode": "compiled"})
    assert method.unsupported(problem) is None
    assert method.backend(problem) == "reference+flex"
    torch.testing.assert_close(method(q, k, v, problem), create("flat", sizes)(q, k, v, problem), rtol=1e-5, atol=1e-5)
