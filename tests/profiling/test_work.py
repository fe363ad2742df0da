"""Work of kernels: bytes of tensors counted once, operations of products, and launches of Triton kernels."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pyramidbench.profiling.spans import Spans
from pyramidbench.profiling.work import Work, kernel_work

A, B = torch.zeros(4, 8, 16), torch.zeros(4, 16, 32)


def worked(call: Callable[[], object]) -> dict[str, Work]:
    def spanned(spans: Spans) -> None:
        with spans("attend"):
            call()

    found = kernel_work(spanned)
    assert {path for _, path in found} <= {"attend"}
    return {name: work for (name, _), work in found.items()}


@pytest.mark.parametrize(
    ("call", "name", "flops", "elements"),
    [
        (lambda: A.bmm(B), "aten::bmm", 2 * 4 * 8 * 16 * 32, A.numel() + B.numel() + 4 * 8 * 32),
        (lambda: A @ B, "aten::bmm", 2 * 4 * 8 * 16 * 32, A.numel() + B.numel() + 4 * 8 * 32),
        (lambda: A + A, "aten::add", None, 3 * A.numel()),
        (lambda: A[:, :1].expand(4, 8, 16) + 1, "aten::add", None, 4 * 16 + A.numel()),
        (lambda: A.exp_(), "aten::exp_", None, 2 * A.numel()),
        (lambda: A.transpose(1, 2), "aten::transpose", None, 0),
        (lambda: A.sum(-1), "aten::sum", None, A.numel() + 32),
        (lambda: [A.exp(), A.exp()], "aten::exp", None, 4 * A.numel()),
    ],
    ids=["bmm", "matmul", "add", "expanded", "in place", "view", "sum", "twice"],
)
def test_operators(call: Callable[[], object], name: str, flops: float | None, elements: int) -> None:
    assert worked(call)[name] == Work(flops, 4.0 * elements, "shapes")


def test_attention_has_bytes_and_no_operations_from_its_shape() -> None:
    """Its shape does not say that half the pairs are masked."""
    q = torch.randn(1, 1, 32, 16)
    found = worked(lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True))
    (attention,) = [work for name, work in found.items() if "attention" in name]
    assert attention.flops is None
    assert attention.bytes is not None
    assert attention.bytes >= 4 * 4 * q.numel()


def test_a_triton_launch_is_noted_with_its_tensors_and_still_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    jit = pytest.importorskip("triton.runtime.jit", reason="triton is for Linux")
    ran: list[tuple[Any, ...]] = []

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        ran.append((self.__name__, *args, kwargs["grid"]))

    monkeypatch.setattr(jit.JITFunction, "run", run)
    fake = SimpleNamespace(__name__="_walk")
    found = worked(lambda: jit.JITFunction.run(fake, A, SimpleNamespace(base=B), 7, grid=(1,)))
    assert found["_walk"] == Work(None, 4.0 * (A.numel() + B.numel()), "arguments")
    assert [call[0] for call in ran] == ["_walk"]
    assert jit.JITFunction.run is run
