"""Keeping a library's own chatter off the error stream, line by line, and nothing else."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_lines(beginning: str) -> Iterator[None]:
    """Inside, lines on stderr that begin so are dropped, even those of C++ code; all others come out at the end.

    torch 2.13 announces every start and stop of its profiler there, whatever log level is set.
    """
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            caught.seek(0)
            lines = caught.read().splitlines(keepends=True)
            os.write(2, b"".join(line for line in lines if not line.startswith(beginning.encode())))
