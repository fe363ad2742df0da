"""The look of a method: one colour and one marker, the same in every figure. Colours by Okabe and Ito, told apart by
people with any kind of colour vision; the marker says the same again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pandas as pd

Line = Literal["-", "--", ":"]
INK, MUTED, GRID, PAPER, SHADE = "#16191d", "#5b6570", "#dfe3e7", "#ffffff", "#f3f4f6"
BOUND = "#8a929b"
BLUE, SKY, PURPLE, ORANGE, VERMILLION, GREEN = "#0072b2", "#56b4e9", "#cc79a7", "#e69f00", "#d55e00", "#009e73"
DARK = {
    INK: "#eceff2", MUTED: "#a3adb8", GRID: "#333a42", PAPER: "#14171a", SHADE: "#1d2126", BOUND: "#87909a",
    BLUE: "#4ba3dd", SKY: "#8fd0f5", PURPLE: "#dc9cc1", ORANGE: "#f0b429", VERMILLION: "#f58a4b", GREEN: "#2fbf95",
}  # fmt: skip
"""Each colour on a dark page."""
FAVOURED = {
    "pyramid": (BLUE, "o"),
    "pyramid:fast": (SKY, "s"),
    "pyramid:paper": (PURPLE, "D"),
    "pyramid:fastest": (PURPLE, "p"),
    "flat": (ORANGE, "^"),
    "flat:exact": (VERMILLION, "v"),
    "sliding_window": (GREEN, "P"),
}
"""Methods that nearly every run has keep their look from report to report."""
COLOURS = (GREEN, PURPLE, ORANGE, SKY, VERMILLION, BLUE)
OTHERS = [(COLOURS[(i + i // 6) % 6], "X<>h*8"[i % 6]) for i in range(36)]
"""Looks for the rest: neighbours differ in colour and in marker."""
STAGES = {
    "build": (PURPLE, INK), "route": (ORANGE, INK), "index": (GREEN, INK), "attend": (BLUE, PAPER),
    "backward": (VERMILLION, INK), "append": (SKY, INK),
}  # fmt: skip
"""Colour of each stage of a call, and of text on it."""
OTHER_STAGE = (BOUND, INK)
HEAT = (
    "#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838",
)  # fmt: skip
"""Ten steps of cividis, from low to high: even in lightness, and the same to every kind of colour vision."""
BOUND_MARKERS = "dx+1"
DENSE_LINES: tuple[Line, ...] = ("-", "--", ":")


@dataclass(frozen=True)
class Series:
    """How one method is drawn. `muted`: a bound, which is no rival, stands back."""

    name: str
    colour: str
    marker: str
    line: Line = "-"
    muted: bool = False


def series_of(summary: pd.DataFrame) -> dict[str, Series]:
    """The series of each `label` of a summary; the same labels always get the same looks."""
    kinds = dict(zip(summary["label"], summary["kind"]))
    dense = sorted((label for label, kind in kinds.items() if kind == "dense"), key=lambda label: (len(label), label))
    bounds = sorted(label for label, kind in kinds.items() if kind == "bound")
    rivals = sorted(label for label, kind in kinds.items() if kind not in ("dense", "bound"))
    free = iter(OTHERS * (1 + len(rivals) // len(OTHERS)))
    looks = {name: FAVOURED[name] if name in FAVOURED else next(free) for name in rivals}
    return {
        **{name: Series(name, INK, "o", DENSE_LINES[i % 3]) for i, name in enumerate(dense)},
        **{name: Series(name, colour, marker) for name, (colour, marker) in looks.items()},
        **{name: Series(name, BOUND, BOUND_MARKERS[i % 4], ":", True) for i, name in enumerate(bounds)},
    }
