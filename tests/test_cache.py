"""PyramidCache as its users see it: what it takes, what it refuses, and that it continues what a prefill began."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import pyramidbench as pb

Tensors = Callable[..., tuple[Tensor, Tensor, Tensor]]
SIZES: dict[str, Any] = {
    "dtype": torch.float64,
    "device": "cpu",
    "block_size": 16,
    "top_k": 2,
    "beam": 1,
    "start_width": 4,
}


def made(**changes: Any) -> pb.PyramidCache:
    return pb.PyramidCache(2, 2, 16, 300, **{**SIZES, **changes})


@pytest.fixture
def qkv(tensors: Tensors) -> tuple[Tensor, Tensor, Tensor]:
    return tensors(queries=300, heads=4, kv_heads=2, dim=16, batch=2)


@pytest.mark.parametrize("preset", ["default", "paper", "fast", "fastest"])
def test_it_continues_what_pyramid_attention_began(preset: str, qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v = qkv
    rules: dict[str, Any] = {"top_k": 2, "block_size": 16, "query_tile": 1, "preset": preset}
    cache = made(preset=preset, beam=2, start_width=8)
    cache.append(k[:, :, :250], v[:, :, :250])
    for token in range(250, 300, 5):
        new = slice(token, token + 5)
        cache.append(k[:, :, new], v[:, :, new])
        parts = (x[:, :, : token + 5] for x in (k, v))
        expected = pb.pyramid_attention(q[:, :, new], *parts, **rules, beam=2, start_width=8)
        torch.testing.assert_close(cache.attend(q[:, :, new]), expected, rtol=0, atol=1e-12)


def test_a_budget_of_all_blocks_is_dense_attention(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v = qkv
    cache = made(top_k=20)
    cache.append(k, v)
    dense = torch.nn.functional.scaled_dot_product_attention(q[:, :, -1:], k, v, enable_gqa=True)
    torch.testing.assert_close(cache.attend(q[:, :, -1:]), dense)
    assert cache.select(q[:, :, -1:])[..., :19].tolist() == [[[list(range(19))]] * 2] * 2


def test_a_rejected_draft_leaves_no_trace(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v = qkv
    cache, other = made(paged=True), made()
    for one in (cache, other):
        one.append(k[:, :, :158], v[:, :, :158])
    cache.append(-k[:, :, 100:108], 9 * v[:, :, 100:108])
    cache.truncate([159, 158])
    cache.truncate(158)
    for one in (cache, other):
        one.append(k[:, :, 158:160], v[:, :, 158:160])
    assert torch.equal(cache.attend(q[:, :, 158:160]), other.attend(q[:, :, 158:160]))
    cache.reset()
    assert cache.lengths.tolist() == [0, 0]
    cache.append(k, v)
    assert cache.lengths.tolist() == [300, 300]


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_beams_go_on_as_caches_of_their_own(paged: bool, qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v = qkv
    beams, other = made(paged=paged, leaf_score="sub"), made(leaf_score="sub")
    beams.append(k[:, :, :100], v[:, :, :100], counts=[100, 70])
    beams.reorder(torch.tensor([1, 1]))
    beams.append(k[:, :, 100:103], v[:, :, 100:103])
    pairs = [torch.cat([x[1:, :, :70].expand(2, -1, -1, -1), x[:, :, 100:103]], 2) for x in (k, v)]
    other.append(*pairs)
    assert beams.lengths.tolist() == [73, 73]
    assert torch.equal(beams.attend(q[:, :, :3]), other.attend(q[:, :, :3]))
    for sequence in range(2):
        assert all(torch.equal(x, y) for x, y in zip(beams.summaries(sequence), other.summaries(sequence), strict=True))


def test_scale_and_value_dims_are_its_own(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v = qkv
    cache = made(top_k=20, head_dim_v=5, scale=0.7)
    cache.append(k, v[..., :5])
    logits = (q[:, :, -1:] @ k.repeat_interleave(2, 1).mT * 0.7).softmax(-1)
    torch.testing.assert_close(cache.attend(q[:, :, -1:]), logits @ v[..., :5].repeat_interleave(2, 1))


def test_bytes_are_what_the_docstring_says() -> None:
    sizes = {"dtype": torch.bfloat16, "device": "cpu"}
    cache = pb.PyramidCache(1, 2, 128, 8192, **sizes)  # type: ignore[arg-type]
    tokens = 2 * 8192 * 256 * 2
    assert 1.05 < cache.bytes / tokens < 1.13


REFUSED = {
    "no-such-parameter": (lambda: made(tpo_k=3), "Did you mean 'top_k'"),
    "no-such-preset": (lambda: made(preset="quick"), "quick"),
    "a-tile": (lambda: made(query_tile=4), "a new token always has a set of its own"),
    "triton-on-a-cpu": (lambda: made(implementation="triton"), "'auto', 'reference'"),
    "empty": (lambda: pb.PyramidCache(1, 1, 16, 0), "max_len = 0"),
    "no-pages": (lambda: made(paged=True, pages=0), "pages = 0: accepted: a whole number from 1 on"),
    "pages-of-no-use": (lambda: made(pages=9), "without paged=True"),
    "no-values": (lambda: made(head_dim_v=0), "head_dim_v = 0"),
    "integers": (lambda: made(dtype=torch.int64), "accepted: float32"),
    "no-tokens": (lambda: made().truncate(1), r"truncate to 1: accepted: .* from 0 to \[0, 0\]"),
    "halves": (lambda: made().truncate([0.5, 0]), r"truncate to \[0.5, 0\]: accepted: .* a whole number"),  # type: ignore[list-item]
    "half": (lambda: made().truncate(0.5), r"truncate to 0.5: accepted: .* a whole number"),  # type: ignore[arg-type]
    "no-such-beam": (lambda: made().reorder([0, 2]), r"reorder to \[0, 2\]: accepted: .* from 0 to \[1, 1\]"),
    "beams-too-few": (lambda: made().reorder(torch.tensor([0])), r"reorder to \[0\]: accepted: for each sequence"),
    "counts": (lambda: made().append(*[torch.zeros(2, 2, 3, 16).double()] * 2, counts=[4, 0]), r"counts \[4, 0\]"),
    "other-dtype": (lambda: made().append(*[torch.zeros(2, 2, 3, 16)] * 2), "k is .* torch.float32"),
    "other-values": (
        lambda: made().append(torch.zeros(2, 2, 3, 16).double(), torch.zeros(2, 2, 2, 16).double()), "v is .*as many",
    ),
    "many-queries": (lambda: made().attend(torch.zeros(2, 4, 17, 16).double()), "1 to 16 queries"),
    "no-query": (lambda: made().attend(torch.zeros(2, 4, 0, 16).double()), "1 to 16 queries"),
    "no-head": (lambda: made().attend(torch.zeros(2, 0, 1, 16).double()), "a multiple of 2"),
    "elsewhere": (lambda: made().attend(torch.zeros(2, 4, 1, 16, device="meta").double()), "on meta; accepted: .* on cpu"),
    "odd-heads": (lambda: made().attend(torch.zeros(2, 3, 1, 16).double()), "a multiple of 2"),
    "reserve-less": (lambda: made().reserve(-1), "reserve -1 tokens: accepted"),
    "reserve": (lambda: made().reserve(301), "the cache is full"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_what_it_refuses_it_explains(call: Callable[[], object], message: str) -> None:
    with pytest.raises(pb.UserError, match=message):
        call()


def test_the_page_shows_what_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parent.parent / "docs" / "decode.md").read_text(encoding="utf-8")
    exec(page.split("```python\n")[1].split("```")[0], {})
    assert capsys.readouterr().out == "torch.Size([2, 8, 1, 64]) [3003, 1203]\n"


def test_gradients_do_not_pass(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v = (x.requires_grad_() for x in qkv)
    cache = made()
    cache.append(k, v)
    output = cache.attend(q[:, :, -1:])
    assert not output.requires_grad
    assert math.isfinite(float(output.sum()))


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_a_decoder_gives_back_its_tokens(paged: bool) -> None:
    cache = pb.PyramidCache(2, 2, 16, 100, dtype=torch.float32, device="cpu", block_size=16, top_k=2, paged=paged)
    k, v = torch.randn(2, 2, 2, 37, 16, generator=torch.Generator().manual_seed(0))
    cache.append(k[:, :, :20], v[:, :, :20])
    cache.append(k[:, :, 20:], v[:, :, 20:])
    held_k, held_v = cache._cache.tokens()
    assert torch.equal(held_k, k)
    assert torch.equal(held_v, v)
    cache.append(k, v, counts=[1, 2])
    with pytest.raises(
        pb.UserError, match=r"sequences of \[38, 39\] tokens have no one tensor of keys; accepted: equal"
    ):
        cache._cache.tokens()
    with pytest.raises(pb.UserError, match="have no one selection; accepted: equal lengths, or `lists`"):
        cache._cache.select(k[:, :, :1])
