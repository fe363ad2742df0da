"""Attention over listed blocks with gradients: one operator forward, one backward, on either backend.

With P = exp(s·QKᵀ - lse) over the listed keys and Δ = rowsum(dO ∘ O): dV = PᵀdO, dS = P ∘ (dO·Vᵀ - Δ), dQ = s·dS·K,
dK = s·dSᵀ·Q. The lists are constants. A row with no key (log-sum-exp -inf) gives and gets no gradient.
Saved for the backward: q, k, v, output, log-sum-exp and the lists; no logits. Cost backward: 2.5 times the forward's products.
Both are custom operators, so torch.compile, checkpointing and autograd see one opaque call with known shapes; inside, autocast
is off and sums are fp32 (fp64 for fp64 inputs), whatever stands around the call. There is no second derivative.
Source: FlashAttention-2 (arXiv 2307.08691), which recomputes P from the log-sum-exp.
"""

from __future__ import annotations

from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from pyramidbench.kernels.attention import sparse_attention, sparse_log_sum_exp
from pyramidbench.kernels.attention_twin_bwd import sparse_attention_backward
from pyramidbench.selection import BlockSelection, frozen

_SIZES = "Tensor indices, Tensor counts, SymInt block_size, SymInt query_tile, bool causal, float scale, str backend"


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    counts: Tensor,
    block_size: int,
    query_tile: int,
    causal: bool,
    scale: float,
    backend: str,
    needs_lse: bool,
) -> tuple[Tensor, Tensor]:
    """Output [B, H, M, Dv] and log-sum-exp [B, H, M]; without `needs_lse` the reference leaves the latter empty, [0]."""
    lists = _trimmed(indices, counts) if backend == "reference" else indices
    selection = BlockSelection(lists, counts, block_size, query_tile, q.shape[2], k.shape[2], causal)
    with frozen(q.device):
        if backend == "reference":
            lse = sparse_log_sum_exp(q, k, selection, scale=scale) if needs_lse else _no_lse(q)
            return sparse_attention(q, k, v, selection, scale=scale), lse
        from pyramidbench.kernels import attention_fwd

        out, lse = attention_fwd.attend(q, k, v, selection, scale)
        return out, lse if needs_lse else _no_lse(q)


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    indices: Tensor,
    counts: Tensor,
    block_size: int,
    query_tile: int,
    causal: bool,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, contiguous, in the dtypes of q, k and v."""
    lists = _trimmed(indices, counts) if backend == "reference" else indices
    selection = BlockSelection(lists, counts, block_size, query_tile, q.shape[2], k.shape[2], causal)
    with frozen(q.device):
        if backend == "reference":
            return sparse_attention_backward(q, k, v, out, lse, d_out, selection, scale)
        from pyramidbench.kernels import attention_bwd

        d_q, d_k, d_v = attention_bwd.attend_backward(q, k, v, out, lse, d_out, selection, scale)
        return d_q.contiguous(), d_k.contiguous(), d_v.contiguous()


def _trimmed(indices: Tensor, counts: Tensor) -> Tensor:
    """Lists without the padding that all have: the twin gathers a block for each place."""
    return indices[..., : int(counts.max())]


def _no_lse(q: Tensor) -> Tensor:
    return q.new_empty(0, dtype=torch.promote_types(q.dtype, torch.float32))


_attend = torch.library.custom_op(
    "pyramidbench::attend",
    _forward,
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_SIZES}, bool needs_lse) -> (Tensor, Tensor)",
)
_attend_backward = torch.library.custom_op(
    "pyramidbench::attend_backward",
    _backward,
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor d_out, {_SIZES}) -> (Tensor, Tensor, Tensor)",
)


def _forward_shapes(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    wide = torch.promote_types(q.dtype, torch.float32)
    lse = q.new_empty(q.shape[:3], dtype=wide) if rest[-1] else _no_lse(q)
    return q.new_empty((*q.shape[:3], v.shape[3])), lse


def _backward_shapes(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, indices, counts, *ctx.sizes, needs_lse = inputs
    assert needs_lse
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, out, lse, indices, counts)


def _differentiate(ctx: Any, d_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, indices, counts = ctx.saved_tensors
    return *_attend_backward(q, k, v, out, lse, d_out, indices, counts, *ctx.sizes), *(None,) * 8


def _no_second_derivative(*_: Any) -> NoReturn:
    raise NotImplementedError(
        "attention over listed blocks has no second derivative; differentiate it once, or use dense attention"
    )


torch.library.register_fake(_attend, _forward_shapes)
torch.library.register_fake(_attend_backward, _backward_shapes)
torch.library.register_autograd(_attend, _differentiate, setup_context=_save)
torch.library.register_autograd(_attend_backward, _no_second_derivative)


def attention(
    q: Tensor, k: Tensor, v: Tensor, selection: BlockSelection, scale: float, backend: Literal["triton", "reference"]
) -> Tensor:
    """Exact attention over the listed blocks, [B, H, M, Dv] in q's dtype, differentiable in q, k and v.

    Shapes as for `kernels.attention.sparse_attention`; the arguments were checked by the caller (`check_call`).

    Raises:
        NotImplementedError: from a second derivative, when that is asked for.
    """
    lists = (selection.indices, selection.counts, selection.block_size, selection.query_tile, selection.causal)
    needs_lse = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    # An operator's call costs the host some ten microseconds, for nothing where no one looks on.
    call = _attend if needs_lse or torch.compiler.is_compiling() else _forward
    return call(q, k, v, *lists, scale, backend, needs_lse)[0]
