"""Jane Austen's six novels, from Debian's r-cran-janeaustenr: long prose that everybody may use.

The package holds them as R's lazy-load file: parts of a 4-byte length and a zlib stream, each one serialised vector of
lines (R Internals, 1.8 "Serialization formats"). No R is needed.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

from pyramidbench.errors import UserError
from pyramidbench.evaluation.carriers import AUSTEN, member
from pyramidbench.texts import Passage

NOVELS = ("emma", "mansfield-park", "northanger-abbey", "persuasion", "pride-and-prejudice", "sense-and-sensibility")
"""In the order of the file."""
_VECTOR_OF_TEXT, _TEXT = 16, 9


def read_novel(name: str) -> Passage:
    """One novel, lines joined as they were printed.

    Raises:
        UserError: the package was not fetched.
    """
    parts = list(_parts(member(AUSTEN, AUSTEN.members[0]).read_bytes()))
    if len(parts) != len(NOVELS):
        raise UserError(f"'{AUSTEN.folder}' does not hold the six novels; delete it and fetch it again.")
    return Passage(name, "\n".join(_lines(parts[NOVELS.index(name)])))


def _parts(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        stream = zlib.decompressobj()
        yield stream.decompress(data[at + 4 :])
        at = len(data) - len(stream.unused_data)


def _lines(part: bytes) -> Iterator[str]:
    """The strings of one serialised character vector (XDR, version 3)."""
    encoding_length = struct.unpack_from(">i", part, 14)[0]
    at = 18 + encoding_length
    kind, count = struct.unpack_from(">ii", part, at)
    assert kind & 0xFF == _VECTOR_OF_TEXT
    at += 8
    for _ in range(count):
        kind, length = struct.unpack_from(">ii", part, at)
        assert kind & 0xFF == _TEXT
        yield part[at + 8 : at + 8 + length].decode()
        at += 8 + length
