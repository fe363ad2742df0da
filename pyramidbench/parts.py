"""Parts of a sweep: shares of its cells for several machines, whose runs `pyramidbench merge` joins.

What shares tensors stays together, since methods are timed in turns and judged against the same attention. These groups are
dealt out by their size, the largest first, back and forth; nothing but the cells decides, so that every machine deals alike.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pyramidbench.cell import Cell
from pyramidbench.errors import UserError

_PART = re.compile(r"(\d+)/(\d+)")


@dataclass(frozen=True)
class Part:
    """Part `number` of `count`, from 1."""

    number: int
    count: int

    def of(self, cells: Sequence[Cell]) -> list[Cell]:
        """This part's cells, in the order of the sweep.

        Raises:
            UserError: more parts than groups of cells.
        """
        sizes: dict[str, int] = {}
        for cell in cells:
            pairs = cell.batch * cell.heads * cell.seq_len * cell.seq_len_kv
            sizes[cell.tensors] = sizes.get(cell.tensors, 0) + pairs
        if self.count > len(sizes):
            raise UserError(
                f"--part {self.number}/{self.count}: the sweep has {len(sizes)} groups of cells that must stay together, one "
                f"for each length, shape and input; accepted: at most {len(sizes)} parts."
            )
        largest_first = sorted(sizes, key=lambda name: -sizes[name])
        own = {name for place, name in enumerate(largest_first) if self._receives(place)}
        return [cell for cell in cells if cell.tensors in own]

    def _receives(self, place: int) -> bool:
        turn, seat = divmod(place, self.count)
        return (seat if turn % 2 == 0 else self.count - 1 - seat) == self.number - 1


def parse_part(value: str) -> Part:
    """The part that "2/8" names.

    Raises:
        UserError: another form, or a number that is not 1 to the count.
    """
    match = _PART.fullmatch(value.strip())
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise UserError(f"--part {value}: accepted: I/N, part I of N, as 1/8 to 8/8.")
    return Part(int(match[1]), int(match[2]))
