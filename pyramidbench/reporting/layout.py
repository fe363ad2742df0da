"""Places on a matplotlib canvas, in inches from its upper left corner. At 100 pixels an inch a figure is 800 pixels wide, and
no text in it is smaller than 12 pixels."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from pyramidbench.reporting.palette import INK

WIDTH, LEFT, PANEL_HEAD = 8.0, 0.95, 0.4


def write(
    canvas: Canvas, left: float, top: float, text: str, *, size: float, color: str = INK, weight: str = "normal"
) -> None:
    """Text at inches from the upper left corner (its base line)."""
    canvas.text(left / WIDTH, 1 - top / canvas.get_figheight(), text, fontsize=size, color=color, fontweight=weight)


def axes_at(canvas: Canvas, left: float, top: float, width: float, height: float) -> Axes:
    """Axes at inches from the upper left corner."""
    total = canvas.get_figheight()
    return canvas.add_axes((left / WIDTH, 1 - (top + height) / total, width / WIDTH, height / total))
