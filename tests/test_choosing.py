"""The operator that hides a choice from a compiler: the method's own lists, in a shape that was known before."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pyramidbench import choosing
from pyramidbench.choosing import Chooser
from pyramidbench.errors import UserError
from pyramidbench.method import BlockMethod
from pyramidbench.problem import Problem
from pyramidbench.registry import create, method_class, method_names, preset_names

MakeTensors = Callable[..., tuple[Tensor, Tensor, Tensor]]
SPECS = [
    f"{name}:{preset}"
    for name in method_names()
    if issubclass(method_class(name), BlockMethod)
    for preset in preset_names(name)
    if not getattr(create(f"{name}:{preset}"), "adaptive", False)
]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("tile", [1, 12, 33])
def test_the_lists_are_the_method_s_in_the_shape_that_was_promised(tensors: MakeTensors, spec: str, tile: int) -> None:
    budgets = itertools.product(
        [(0, False), (3, False), (2, True)], [(None, None), (0, 1), (2, 3)], [(70, 70), (60, 25)]
    )
    for (top_k, in_budget), (sinks, locals_), (queries, keys) in budgets:
        q, k, _ = tensors(queries=queries, keys=keys, heads=4, kv_heads=2, dtype=torch.float32)
        parameters = {"top_k": top_k, "block_size": 8, "query_tile": tile, "forced_in_budget": in_budget}
        parameters |= {"sink_blocks": sinks, "local_blocks": locals_}
        problem = Problem.of(q, k, causal=True, scale=0.3)
        if create(spec, parameters).unsupported(problem) is not None:
            continue
        text = Chooser.of(spec, parameters).text
        indices, counts = choosing._chosen_lists(q, k, text, True, 0.3)
        promised = choosing._list_shapes(q, k, text, True, 0.3)
        assert [(x.shape, x.dtype, x.stride()) for x in promised] == [
            (x.shape, x.dtype, x.stride()) for x in (indices, counts)
        ]
        expected = create(spec, parameters).select(q, k, problem)
        assert expected is not None
        width = expected.indices.shape[-1]
        assert torch.equal(indices[..., :width], expected.indices)
        assert (indices[..., width:] == -1).all()
        assert torch.equal(counts, expected.counts)


@pytest.mark.parametrize("spec", ["dense", "xattention", "exact_topp"])
def test_a_method_without_a_budget_is_refused(spec: str, tensors: MakeTensors) -> None:
    q, k, _ = tensors(queries=20)
    chooser = Chooser.of(spec, {})
    selection = chooser.select(q, k, Problem.of(q, k, causal=True, scale=None))
    assert (selection is None) == (spec == "dense")
    with pytest.raises(UserError, match="has no budget of blocks"):
        choosing._chosen_lists(q, k, chooser.text, True, 0.3)


def test_a_parameter_survives_the_text() -> None:
    chooser = Chooser.of("pyramid:fast", {"top_k": 5, "beam": 1.5, "levels": "full", "implementation": "reference"})
    assert choosing._method_of(chooser.text) == create("pyramid:fast", {"top_k": 5, "beam": 1.5, "levels": "full",
        "implementation": "reference"})  # fmt: skip
    assert (chooser.block_size, chooser.query_tile, chooser.implementation) == (64, 128, "reference")
