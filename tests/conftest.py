"""Fixtures that several test files share: seeded tensors, and dense attention in float64 to compare with."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

QKV = tuple[Tensor, Tensor, Tensor]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tensors here are tiny: a second thread makes them thirty times slower when the machine is busy."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tensors() -> Callable[..., QKV]:
    """Seeded normal q [B, H, M, D], k [B, G, N, D] and v [B, G, N, Dv]; float64 unless told otherwise, so without ties."""

    def make(
        *,
        queries: int,
        keys: int | None = None,
        batch: int = 1,
        heads: int = 2,
        kv_heads: int = 1,
        dim: int = 8,
        dim_v: int | None = None,
        dtype: torch.dtype = torch.float64,
        seed: int = 0,
    ) -> QKV:
        generator = torch.Generator().manual_seed(seed)
        keys = queries if keys is None else keys
        shapes = (
            (batch, heads, queries, dim),
            (batch, kv_heads, keys, dim),
            (batch, kv_heads, keys, dim if dim_v is None else dim_v),
        )
        q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
        return q, k, v

    return make


@pytest.fixture(scope="session")
def masked_dense() -> Callable[..., tuple[Tensor, Tensor]]:
    """Softmax attention in float64 under an element mask, with its log-sum-exp; an empty row gives 0 and -inf."""

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
        """mask: bool, broadcast to [B, H, M, N]; True where a query sees a key."""
        group = q.shape[1] // k.shape[1]
        k, v = k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
        logits = q.double() @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        logits = logits.masked_fill(~mask, -torch.inf)
        row_sum = logits.logsumexp(-1)
        empty = row_sum == -torch.inf
        weights = (logits - row_sum.masked_fill(empty, 0)[..., None]).exp()
        return weights @ v, row_sum

    return attend


@pytest.fixture(scope="session")
def causal_mask() -> Callable[[int, int], Tensor]:
    """Bottom-right causal mask, bool [M, N]: query i sees the keys up to i + N - M."""

    def make(queries: int, keys: int) -> Tensor:
        return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)

    return make
