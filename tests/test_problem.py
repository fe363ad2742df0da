"""What forms an attention call, and what is said when tensors do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pyramidbench.problem import Problem, check_tensors

MakeTensors = Callable[..., tuple[Tensor, Tensor, Tensor]]


def test_a_problem_holds_the_sizes_of_its_tensors(tensors: MakeTensors) -> None:
    q, k, v = tensors(queries=7, keys=9, batch=2, heads=6, kv_heads=3, dim=4, dim_v=5, dtype=torch.bfloat16)
    problem = Problem.of(q, k, v, causal=True, scale=None)
    assert problem == Problem(2, 6, 3, 7, 9, 4, 5, "bfloat16", True, 0.5)
    assert problem.group == 2
    assert problem.itemsize == 2
    output_bytes = 2 * 2 * 6 * 7 * 5
    assert problem.io_bytes == sum(x.numel() * 2 for x in (q, k, v)) + output_bytes
    assert Problem.of(q, k, causal=False, scale=0.3).scale == 0.3


def make(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("q", "k", "v", "message"),
    [
        (make((2, 8, 4)), make((1, 2, 8, 4)), None, r"q has shape \(2, 8, 4\); accepted: \[batch, heads, sequence"),
        (make((1, 2, 8, 4)), make((1, 2, 0, 4)), None, r"k has shape \(1, 2, 0, 4\); every size must be at least 1"),
        (
            make((1, 2, 8, 4)),
            make((1, 2, 8, 4), torch.float16),
            None,
            "k is torch.float16 on cpu and q is torch.float32",
        ),
        (make((1, 2, 4, 8)).mT, make((1, 2, 8, 4)), None, r"q is not contiguous in its last dimension; call .contig"),
        (make((1, 2, 8, 4), torch.int64), make((1, 2, 8, 4), torch.int64), None, "dtype torch.int64 is not supported"),
        (make((1, 2, 8, 4)), make((2, 2, 8, 4)), None, "differ in batch or head_dim"),
        (make((1, 2, 8, 4)), make((1, 2, 8, 5)), None, "differ in batch or head_dim"),
        (make((1, 3, 8, 4)), make((1, 2, 8, 4)), None, "3 query heads cannot be shared by 2 key/value heads"),
        (make((1, 2, 8, 4)), make((1, 4, 8, 4)), None, "2 query heads cannot be shared by 4 key/value heads"),
        (make((1, 2, 8, 4)), make((1, 2, 8, 4)), make((1, 2, 9, 4)), "differ in batch, heads or sequence"),
        (make((1, 2, 8, 4)), make((1, 2, 8, 4)), make((1, 1, 8, 4)), "differ in batch, heads or sequence"),
    ],
    ids=[
        "3d",
        "empty",
        "dtype",
        "strided-dim",
        "integers",
        "batch",
        "head-dim",
        "group",
        "fewer-q",
        "v-len",
        "v-heads",
    ],
)
def test_tensors_that_do_not_fit_are_refused(q: Tensor, k: Tensor, v: Tensor | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Problem.of(q, k, v, causal=True, scale=None)


def test_views_with_any_outer_strides_are_accepted(tensors: MakeTensors) -> None:
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors(queries=8, heads=4, kv_heads=2))
    check_tensors(q, k, v)
    check_tensors(q[:, :, ::2], k, v)
