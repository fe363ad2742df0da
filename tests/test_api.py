"""The functions that Python users call: they are the methods, nothing more and nothing less, and their names are public."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import pyramidbench
from pyramidbench.api import PRESET, pyramid_attention, select_blocks
from pyramidbench.errors import UserError
from pyramidbench.problem import Problem
from pyramidbench.registry import create, parameter_names, preset_names
from pyramidbench.selection import BlockSelection

Tensors = Callable[..., tuple[Tensor, Tensor, Tensor]]
SMALL: dict[str, Any] = {"top_k": 2, "block_size": 16, "query_tile": 16}


def in_a_fresh_process(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_star_import_brings_the_public_names_and_the_package_alone_does_not_wait_for_torch() -> None:
    code = (
        "import sys, pyramidbench\nassert pyramidbench.__version__ and 'torch' not in sys.modules\n"
        "assert callable(pyramidbench.sweep)\ndel sys, pyramidbench\n"
        "from pyramidbench import *\nprint(*sorted(name for name in dir() if not name.startswith('__')))"
    )
    assert in_a_fresh_process(code).split() == pyramidbench.__all__
    assert sorted(pyramidbench.__all__) == pyramidbench.__all__
    assert set(pyramidbench.__all__) <= set(dir(pyramidbench))


def test_every_public_name_says_what_it_is() -> None:
    for name in pyramidbench.__all__:
        assert (getattr(pyramidbench, name).__doc__ or "").strip(), name


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'pyramidbench' has no attribute 'swep'"):
        getattr(pyramidbench, "swep")  # noqa: B009 - mypy knows the names


def test_every_parameter_of_the_method_is_a_keyword() -> None:
    signature = inspect.signature(pyramid_attention)
    keywords = [p.name for p in signature.parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    assert sorted(set(keywords) - {"causal", "scale", "preset"}) == sorted(parameter_names("pyramid"))
    positional = [p.name for p in signature.parameters.values() if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert positional == ["q", "k", "v"]


def test_what_the_preset_does_not_decide_has_the_default_of_the_method() -> None:
    method = create("pyramid")
    for name, parameter in inspect.signature(pyramid_attention).parameters.items():
        if name in parameter_names("pyramid") and parameter.default is not PRESET:
            assert parameter.default == getattr(method, name), name


@pytest.mark.parametrize("causal", [True, False])
def test_it_equals_the_method(tensors: Tensors, causal: bool) -> None:
    q, k, v = tensors(queries=150, keys=200, heads=4, kv_heads=2, dtype=torch.float32)
    problem = Problem.of(q, k, v, causal=causal, scale=0.3)
    expected = create("pyramid", SMALL)(q, k, v, problem)
    assert torch.equal(pyramid_attention(q, k, v, causal=causal, scale=0.3, **SMALL), expected)


@pytest.mark.parametrize("preset", preset_names("pyramid"))
def test_a_preset_is_the_method_s_and_what_is_given_comes_over_it(tensors: Tensors, preset: str) -> None:
    q, k, v = tensors(queries=400, dtype=torch.float32)
    problem = Problem.of(q, k, v, causal=True, scale=None)
    budget: dict[str, Any] = {"top_k": 2, "block_size": 16}
    assert torch.equal(
        pyramid_attention(q, k, v, preset=preset, **budget), create(f"pyramid:{preset}", budget)(q, k, v, problem)
    )
    more = {**budget, "beam": 3, "levels": 2, "query_tile": 32}
    assert torch.equal(
        pyramid_attention(q, k, v, preset=preset, **more), create(f"pyramid:{preset}", more)(q, k, v, problem)
    )


CHANGED: dict[str, Any] = {
    "top_k": 5, "block_size": 32, "query_tile": 8, "sink_blocks": 0, "local_blocks": 1, "forced_in_budget": True,
    "branching": 4, "levels": "full", "start_width": 2, "beam": 1.0, "bound_weight": 0.0, "leaf_candidates": 1,
    "node_score": "children", "leaf_score": "sub", "sub_blocks": 2, "head_reduce": "none", "tile_reduce": "mean",
    "score_rows": 2, "implementation": "reference",
}  # fmt: skip


def test_the_example_values_change_every_parameter() -> None:
    assert set(CHANGED) == set(parameter_names("pyramid"))
    assert all(getattr(create("pyramid"), name) != value for name, value in CHANGED.items())


@pytest.mark.parametrize("name", CHANGED)
def test_a_keyword_reaches_the_parameter_of_its_name(
    monkeypatch: pytest.MonkeyPatch, tensors: Tensors, name: str
) -> None:
    given: list[dict[str, object]] = []

    def remember(spec: str, parameters: dict[str, object]) -> Any:
        given.append(parameters)
        return create(spec, parameters)

    monkeypatch.setattr("pyramidbench.choosing.create", remember)
    q, k, v = tensors(queries=64, dtype=torch.float32)
    pyramid_attention(q, k, v, **{name: CHANGED[name]})
    assert given[0] == {"top_k": 16, "block_size": 64, name: CHANGED[name]}


def test_gradients_flow_to_all_three(tensors: Tensors) -> None:
    q, k, v = (tensor.requires_grad_() for tensor in tensors(queries=64, dtype=torch.float32))
    pyramid_attention(q, k, v, **SMALL).square().sum().backward()
    for tensor in (q, k, v):
        assert tensor.grad is not None
        assert bool(tensor.grad.isfinite().all())
        assert bool((tensor.grad != 0).any())


def test_select_blocks_gives_the_blocks_of_the_method(tensors: Tensors) -> None:
    q, k, _ = tensors(queries=200, dtype=torch.float32)
    for method in ("pyramid", "pyramid:paper", "flat:exact", "sliding_window"):
        found = select_blocks(q, k, method=method, scale=0.5, **SMALL)
        expected = create(method, SMALL).select(q, k, Problem.of(q, k, causal=True, scale=0.5))
        assert isinstance(found, BlockSelection)
        assert expected is not None
        assert torch.equal(found.indices, expected.indices)
        assert (found.block_size, found.query_tile, found.causal) == (16, 16, True)


def test_select_then_attend_is_pyramid_attention(tensors: Tensors) -> None:
    q, k, v = tensors(queries=200, dtype=torch.float32)
    both = pyramidbench.sparse_attention(q, k, v, select_blocks(q, k, **SMALL))
    assert torch.equal(both, pyramid_attention(q, k, v, **SMALL))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "pyramyd"}, "unknown method 'pyramyd'. Did you mean 'pyramid'"),
        ({"method": "pyramid:fats"}, "'fats'. Did you mean 'fast'"),
        ({"beams": 3}, "parameter of method 'pyramid': 'beams'. Did you mean 'beam'"),
        ({"top_k": -1}, "top_k = -1: input should be greater than or equal to 0"),
        ({"block_size": 0}, "block_size = 0: input should be greater than or equal to 1"),
        ({"method": "dense"}, "method 'dense' attends to all keys: it has no selection"),
        ({"method": "sliding_window", "causal": False}, "cannot do this: a window that ends at the query needs causal"),
    ],
)
def test_select_blocks_says_what_is_wrong(tensors: Tensors, given: dict[str, Any], message: str) -> None:
    q, k, _ = tensors(queries=32, dtype=torch.float32)
    with pytest.raises(ValueError, match=message) as error:
        select_blocks(q, k, **given)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"preset": "fats"}, "Did you mean 'fast'"),
        ({"top_k": -1}, "top_k = -1"),
        ({"levels": "most"}, "levels = 'most'"),
        ({"head_reduce": "max"}, "head_reduce = 'max'"),
        ({"causal": False, "local_blocks": 2}, "local_blocks needs causal attention"),
    ],
)
def test_pyramid_attention_says_what_is_wrong(tensors: Tensors, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pyramid_attention(*tensors(queries=32, dtype=torch.float32), **given)


def test_tensors_that_do_not_fit_are_named(tensors: Tensors) -> None:
    q, k, v = tensors(queries=32, heads=3, kv_heads=2, dtype=torch.float32)
    with pytest.raises(ValueError, match="3 query heads cannot be shared by 2 key/value heads"):
        pyramid_attention(q, k, v)
    with pytest.raises(ValueError, match="k has shape"):
        select_blocks(q, k[0])


def test_a_user_error_is_a_value_error() -> None:
    assert issubclass(UserError, ValueError)
    assert UserError("x").exit_code == 2
