"""Memory of this process, as its C library and the system count it."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import NamedTuple

from megalite.errors import ConfigurationError

_NEEDS = "--memory-monitor on CPUs needs Linux with glibc 2.33 or later, which counts what is allocated"


_NAMES = "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"


class _Counts(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _NAMES)


class Allocated(NamedTuple):
    """Bytes of an allocator."""

    used: int
    free: int
    """Kept by it, for later."""


def allocated_on_host() -> Allocated:
    """Return what the C library has allocated, as for tensors and arrays. Small objects of Python are not counted.

    It walks through all that is free: a call may take a tenth of a second if that is in 100,000 pieces.

    Raises ConfigurationError if this library does not count.
    """
    try:
        count = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):
        raise ConfigurationError(f"{_NEEDS}: leave it out") from None
    count.restype = _Counts
    counts = count()
    return Allocated(counts.uordblks + counts.hblkhd, counts.fordblks)


def resident_bytes() -> tuple[int, int]:
    """Return the bytes that this process has in memory: all of them, and those of files and of shared memory.

    Raises ConfigurationError if the system does not tell.
    """
    try:
        words = Path("/proc/self/statm").read_text(encoding="ascii").split()
    except OSError as error:
        raise ConfigurationError(f"{_NEEDS}: {error.strerror}. Leave it out") from error
    page = os.sysconf("SC_PAGE_SIZE")
    return int(words[1]) * page, int(words[2]) * page
