"""Methods by name, preset, parameter and file, and what is said about a wrong one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest

from pyramidbench.errors import UserError
from pyramidbench.registry import create, method_class, method_names, parameter_names, preset_names, split_spec


def test_the_methods_of_this_package_are_found() -> None:
    assert {"dense", "pyramid", "flat", "exact_topk", "sliding_window", "random_blocks"} <= set(method_names())
    assert list(method_names()) == sorted(method_names())


@pytest.mark.parametrize("name", method_names())
def test_a_method_carries_the_name_of_its_file(name: str) -> None:
    assert method_class(name).name == name
    assert create(name).name == name
    assert method_class(name).__module__ == f"pyramidbench.methods.{name}"


@pytest.mark.parametrize("name", method_names())
def test_presets_set_known_parameters_and_build(name: str) -> None:
    assert "default" in preset_names(name)
    assert create(name) == create(f"{name}:default")
    for preset in preset_names(name):
        given = method_class(name).presets.get(preset, {})
        method = create(f"{name}:{preset}")
        assert all(getattr(method, key) == value for key, value in given.items())


def test_parameters_come_over_those_of_the_preset() -> None:
    method = create("pyramid:paper", {"beam": 3, "top_k": 5})
    fields = dataclasses.asdict(method)
    assert (fields["beam"], fields["top_k"], fields["levels"], fields["node_score"]) == (3, 5, "full", "children")
    assert parameter_names("pyramid")[:2] == ("top_k", "block_size")
    assert split_spec("pyramid") == ("pyramid", "default")
    assert split_spec("pyramid:fast") == ("pyramid", "fast")


@pytest.mark.parametrize(
    ("spec", "parameters", "message"),
    [
        (
            "piramid",
            {},
            r"unknown method 'piramid'. Did you mean 'pyramid'\? Accepted: .*dense, exact_topk, exact_topp, ",
        ),
        ("", {}, "unknown method ''. Accepted:"),
        ("pyramid:fst", {}, r"unknown preset of method 'pyramid': 'fst'. Did you mean 'fast'\?"),
        ("flat", {"topk": 3}, r"unknown parameter of method 'flat': 'topk'. Did you mean 'top_k'\?"),
        ("flat", {"beam": 3}, "unknown parameter of method 'flat': 'beam'"),
        ("flat", {"top_k": -1}, "top_k = -1: input should be greater than or equal to 0"),
        ("flat", {"top_k": 1.5}, "top_k = 1.5: input should be a valid integer"),
        ("flat", {"block_size": 0}, "block_size = 0: input should be greater than or equal to 1"),
        ("pyramid", {"branching": 1}, "branching = 1: input should be greater than or equal to 2"),
        ("pyramid", {"beam": 0.5}, "beam = 0.5: input should be greater than or equal to 1"),
        ("pyramid", {"levels": "all"}, "levels = 'all': .*'auto' or 'full'.* or input should be a valid integer"),
        ("pyramid", {"levels": 0}, "levels = 0: "),
        ("pyramid", {"bound_weight": 2}, "bound_weight = 2: "),
        ("pyramid", {"head_reduce": "max"}, "head_reduce = 'max': input should be 'sum_prob', 'sum_lse', 'lse' or"),
        ("dense", {"kernel": "flush"}, "kernel = 'flush': input should be 'auto', 'cudnn', 'flash'"),
    ],
)
def test_a_wrong_spec_says_what_is_accepted(spec: str, parameters: Mapping[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        create(spec, parameters)
