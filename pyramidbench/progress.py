"""How a sweep goes, while it goes: a bar in a terminal, a line per cell elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pyramidbench.cell import Cell
from pyramidbench.plan import PlannedCell
from pyramidbench.record import Record
from pyramidbench.units import duration, tokens


class SweepProgress:
    """A `Reporter` for people. Use it as a context manager around the sweep."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("about {task.fields[left]} left"),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self.task = self.bar.add_task("planning", total=None, left="?")
        self.done = 0
        self.total = 0

    def __enter__(self) -> SweepProgress:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def planned(self, folder: Path, cells: Sequence[PlannedCell], done: int) -> None:
        self.done, self.total = done, len(cells)
        self.bar.update(self.task, total=self.total, completed=done)
        self._say(f"{self.total} cells into {folder}" + (f"; {done} are there already" if done else ""))

    def started(self, cell: Cell, left_s: float) -> None:
        self.bar.update(self.task, description=_name(cell), left=duration(left_s))

    def timing(self, cells: Sequence[Cell]) -> None:
        methods = (
            _name(cells[0]) if len(cells) == 1 else f"{len(cells)} methods in turns at {tokens(cells[0].seq_len_kv)}"
        )
        self.bar.update(self.task, description=f"timing {methods}")

    def finished(self, record: Record) -> None:
        self.done += 1
        self.bar.update(self.task, completed=self.done)
        if not self.console.is_terminal:
            took = f"{duration(record.latency_s)} a call" if record.latency_s else record.status
            reason = f": {record.reason}" if record.reason else ""
            where = tokens(record.seq_len_kv) + _pass(record.direction)
            self._say(f"[{self.done}/{self.total}] {record.method} at {where}, {took}{reason}")

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


class VerifyProgress:
    """Calls that are only checked: a bar in a terminal, elsewhere a line for each that is not right."""

    def __init__(self, console: Console, total: int) -> None:
        self.console = console
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.bar = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
        self.task = self.bar.add_task("verifying", total=total)
        self.total = total

    def __enter__(self) -> VerifyProgress:
        self.bar.start()
        if not self.console.is_terminal:
            self.console.print(f"{self.total} calls", highlight=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def finished(self, record: Record) -> None:
        where = f"{record.method} at {tokens(record.seq_len_kv)}{_pass(record.direction)}"
        self.bar.update(self.task, advance=1, description=where)
        if not self.console.is_terminal and record.status not in ("ok", "unsupported"):
            text = f"{where}, {record.status}: {record.reason}"
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def _name(cell: Cell) -> str:
    layer = "" if cell.layer is None else f", layer {cell.layer}"
    return f"{cell.method} at {tokens(cell.seq_len_kv)}{_pass(cell.direction)}{layer}"


def _pass(direction: str | None) -> str:
    return "" if direction in (None, "forward") else f" {direction}"
