"""Logits of 16-bit operands: widened on a CPU, and on a GPU one product of what is there, with fp32 sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from pyramidbench.kernels.products import logits, operand

SHAPES = [((5, 8), (7, 8)), ((2, 3, 5, 8), (2, 3, 7, 8))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_logits_are_those_of_the_wide_operands(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], dtype: torch.dtype
) -> None:
    rows, keys = (torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype) for shape in shapes)
    found = logits(operand(rows), operand(keys), 0.3)
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(found.double(), rows.double() @ keys.double().mT * 0.3, rtol=1e-5, atol=1e-5)


class Products(TorchDispatchMode):
    """Dtypes of the operands and of the result of every matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[tuple[torch.dtype, ...]] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.bmm, torch.ops.aten.mm):
            self.dtypes.append((args[0].dtype, args[1].dtype, result.dtype))
        return result


@pytest.mark.parametrize(
    ("dtype", "dtypes"),
    [
        (torch.bfloat16, (torch.bfloat16, torch.bfloat16, torch.float32)),
        (torch.float16, (torch.float16, torch.float16, torch.float32)),
        (torch.float32, (torch.float32, torch.float32, torch.float32)),
    ],
)
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_on_a_gpu_16_bit_operands_are_not_widened(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], dtype: torch.dtype, dtypes: tuple[torch.dtype, ...]
) -> None:
    """With tensors that hold nothing: shapes, dtypes and the operator are checked, and no device is needed."""
    with FakeTensorMode(), Products() as products:
        rows, keys = (torch.empty(shape, dtype=dtype, device="cuda") for shape in shapes)
        found = logits(operand(rows), operand(keys), 0.3)
    assert products.dtypes == [dtypes]
    assert found.shape == (*shapes[0][:-1], shapes[1][-2])
