"""The C library's allocator, where it is glibc: whether freed memory stays with the process."""

from __future__ import annotations

import ctypes
import ctypes.util
from functools import cache

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_MMAP_THRESHOLD = 32 << 20
"""The most that glibc accepts."""
_NEVER = (1 << 31) - 1


def keep_freed_memory() -> None:
    """Let freed blocks of up to 32 MiB be used again, rather than go back to the system and be faulted in anew.

    Page faults are 10 to 30 % of the time of a chunked call on two cores (64k tokens, 16 MiB chunks). Another C library
    is left as it is.
    """
    library = _library()
    if hasattr(library, "mallopt"):
        library.mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        library.mallopt(_M_TRIM_THRESHOLD, _NEVER)


def release_freed_memory() -> None:
    """Give freed memory back to the system now, so that the resident size is what is held."""
    library = _library()
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


@cache
def _library() -> ctypes.CDLL:
    """Found once: looking for it starts a program, which takes milliseconds."""
    return ctypes.CDLL(ctypes.util.find_library("c"))
