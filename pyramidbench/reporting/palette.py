"""The look of a method: one colour and one marker, the same in every figure. Colours after Okabe and Ito: families of methods
are told apart by people with any kind of colour vision; the marker says the same again, and which of a family it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pandas as pd

from pyramidbench.registry import method_names, preset_names

Line = Literal["-", "--", ":"]
INK, MUTED, GRID, PAPER, SHADE = "#16191d", "#5b6570", "#dfe3e7", "#ffffff", "#f3f4f6"
BOUND = "#8a929b"
BLUE, SKY, NAVY = "#0072b2", "#56b4e9", "#2b3c9e"
ORANGE, VERMILLION, BROWN = "#e69f00", "#d55e00", "#8c4a12"
GREEN, PURPLE, WINE = "#009e73", "#cc79a7", "#882255"
DARK = {
    INK: "#eceff2", MUTED: "#a3adb8", GRID: "#333a42", PAPER: "#14171a", SHADE: "#1d2126", BOUND: "#87909a",
    BLUE: "#4ba3dd", SKY: "#8fd0f5", NAVY: "#8c9bf0", ORANGE: "#f0b429", VERMILLION: "#f58a4b", BROWN: "#c98d5a",
    GREEN: "#2fbf95", PURPLE: "#dc9cc1", WINE: "#d2638f",
}  # fmt: skip
"""Each colour on a dark page."""
FAVOURED = {
    "pyramid": (BLUE, "o"),
    "pyramid:fast": (SKY, "s"),
    "pyramid:fastest": (NAVY, "p"),
    "pyramid:paper": (NAVY, "D"),
    "flat": (ORANGE, "^"),
    "flat:exact": (VERMILLION, "v"),
    "flat:filtered": (BROWN, "<"),
    "flat:bounds": (VERMILLION, ">"),
    "flat:sub": (BROWN, "d"),
    "sliding_window": (GREEN, "P"),
}
"""The subject is blue and single-pass selection orange and brown, in all their presets; other families have what is left."""
COLOURS = (GREEN, PURPLE, WINE)
MARKERS = "X<>h*8vD^dpsPo"
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
DENSE_MARKERS = "osD^vphP"
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
    """The series of each `label` of a summary. A method has the same colour in every report, as have its presets and variants;
    those are told apart by the marker, which no other method of that colour has (as long as there are markers)."""
    kinds = dict(zip(summary["label"], summary["kind"]))
    dense = sorted(label for label, kind in kinds.items() if kind == "dense")
    bounds = sorted(label for label, kind in kinds.items() if kind == "bound")
    rivals = [label for label, kind in kinds.items() if kind not in ("dense", "bound")]
    looks = _rivals(rivals)
    return {
        **{label: _dense(label) for label in dense},
        **{label: Series(label, *looks[label]) for label in sorted(rivals)},
        **{label: Series(label, BOUND, BOUND_MARKERS[i % 4], ":", True) for i, label in enumerate(bounds)},
    }


def _dense(label: str) -> Series:
    """Black, with a marker and a line for each kernel."""
    presets = preset_names("dense")
    name = label.partition(":")[2] or presets[0]
    at = presets.index(name) if name in presets else 0
    return Series(label, INK, DENSE_MARKERS[at % len(DENSE_MARKERS)], DENSE_LINES[at % len(DENSE_LINES)])


def _rivals(labels: list[str]) -> dict[str, tuple[str, str]]:
    """Colour and marker of each label: the favoured ones their own, then plain methods, then presets and variants."""
    taken: dict[str, tuple[str, str]] = {label: FAVOURED[label] for label in labels if label in FAVOURED}
    known = [name for name in method_names() if name not in FAVOURED]
    others = sorted({_family(label) for label in labels} - set(known) - set(FAVOURED))
    places = {name: i for i, name in enumerate([*known, *others])}
    for label in sorted(labels, key=lambda label: (label != _family(label), label)):
        if label not in taken:
            taken[label] = _look(label, places, {*FAVOURED.values(), *taken.values()})
    return taken


def _look(label: str, places: dict[str, int], used: set[tuple[str, str]]) -> tuple[str, str]:
    """The family's colour, and the first marker from its own on that is free."""
    preset, place = label.partition(" ")[0], places.get(_family(label), 0)
    colour, marker = (
        FAVOURED.get(preset) or FAVOURED.get(_family(label)) or (COLOURS[place % 3], MARKERS[place // 3 % len(MARKERS)])
    )
    start = MARKERS.index(marker)
    turns = [MARKERS[(start + i) % len(MARKERS)] for i in range(len(MARKERS))]
    return colour, next((turn for turn in turns if (colour, turn) not in used), marker)


def _family(label: str) -> str:
    """The method behind a label: without its preset and its parameters."""
    return label.partition(" ")[0].partition(":")[0]
