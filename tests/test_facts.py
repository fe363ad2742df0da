"""What is known of a method before it is tried: growth of its cost, passes, and what `list methods` makes of it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from rich.console import Console

from pyramidbench.catalogue import describe_one, method_facts
from pyramidbench.cost import Cost, StageCost
from pyramidbench.facts import Facts, can, facts, selection_growth
from pyramidbench.method import Method
from pyramidbench.problem import Problem
from pyramidbench.registry import create, method_names
from pyramidbench.render import show_methods


@dataclass(frozen=True)
class Growing(Method):
    """A method whose choice costs N to some power, or nothing."""

    power: float = 1.0
    factor: float = 100.0

    def cost(self, problem: Problem) -> Cost:
        n = problem.seq_len_kv
        log = n.bit_length() if self.power == 1.5 else 1
        route = StageCost(
            "route", self.factor * problem.heads * n ** round(self.power) / (n if log > 1 else 1) * log, 0
        )
        return Cost((route, StageCost("attend", 1e3 * n**2, 0)))


@pytest.mark.parametrize(
    ("power", "factor", "growth"),
    [(1.0, 100, "O(N)"), (1.5, 100, "O(N log N)"), (2.0, 1, "O(N²)"), (1.0, 1, "none"), (0.0, 1e9, "O(1)")],
)
def test_growth_is_read_off_the_formula(power: float, factor: float, growth: str) -> None:
    assert selection_growth(Growing(power, factor)) == growth


@pytest.mark.parametrize(
    ("spec", "growth"),
    [
        ("pyramid", "O(N log N)"),
        ("flat", "O(N²)"),
        ("exact_topk", "O(N²)"),
        ("sliding_window", "none"),
        ("dense", "none"),
    ],
)
def test_growth_of_the_methods_here(spec: str, growth: str) -> None:
    assert selection_growth(create(spec)) == growth


def test_passes_are_those_that_some_device_can_do() -> None:
    fa3 = create("dense:fa3")
    assert (can(fa3, "forward"), can(fa3, "train"), can(fa3, "decode")) == (True, False, True)
    assert not can(create("llsa"), "decode")
    # A sweep decodes with a set for every token, which tiles of 128, or of whole antidiagonals, are not.
    decode = {name: facts(name).decode for name in ("xattention", "fa4_blocks", "flex", "nsa", "vertical_slash")}
    assert decode == {"xattention": False, "fa4_blocks": False, "flex": True, "nsa": True, "vertical_slash": False}
    assert can(create("fastvideo_vsa"), "forward"), "it has no causal mask, and so another problem must be found"
    assert facts("fla_moba").passes == "F B –"


@pytest.fixture
def shown() -> list[Facts]:
    return method_facts()


@pytest.mark.parametrize("width", [60, 80, 120, 250])
def test_a_terminal_of_any_width_shows_every_method_and_whether_it_is_here(width: int, shown: list[Facts]) -> None:
    console = Console(width=width, force_terminal=True, color_system=None, record=True)
    show_methods(console, shown)
    lines = console.export_text().splitlines()
    assert max(len(line) for line in lines) <= width
    rows = {cells[1].strip(): cells for line in lines if len(cells := line.split("│")) > 4}
    assert set(method_names()) <= set(rows)
    assert rows["pyramid"][-2].strip() == "yes" or width == 250
    heads = next(line for line in lines if "passes" in line)
    assert ("kind" in heads) == (width >= 80)
    assert ("what it is" in heads) == (width == 250)
    if width >= 80:
        assert [cell.strip() for cell in rows["fa4_blocks"][2:6]] == ["selection", "128 × 128", "as its rule", "F B –"]


def test_what_is_not_here_says_why_in_a_line_of_its_own(shown: list[Facts]) -> None:
    console = Console(width=80, record=True, force_terminal=False)
    show_methods(console, shown)
    lines = console.export_text().splitlines()
    missing = [method for method in shown if method.unavailable]
    assert missing
    for method in missing:
        assert f"{method.name}: {method.unavailable}" in lines
        assert (
            "pip install" in lines[lines.index(f"{method.name}: {method.unavailable}")]
            or "repository" in method.unavailable
        )


def test_one_in_full_has_docstring_facts_presets_and_parameters() -> None:
    text = describe_one("methods", "dense")
    assert "Attends to every visible key." in text
    assert "Differs from the sources:" in text
    assert "Passes: forward, backward, decode" in text
    assert "  cudnn: kernel=cudnn\n" in text
    assert "  kernel = 'auto'" in text
    assert "fla_nsa (selection)" in describe_one("methods", "fla_nsa")
    assert "1 × any; choosing costs: as its rule" in describe_one("methods", "fla_nsa")
