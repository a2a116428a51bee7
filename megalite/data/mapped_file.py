"""Memory mapping that needs no open file descriptor per file, since a blend may have thousands of files."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from pathlib import Path

import numpy as np

from megalite.process.host import too_many_open_files
from megalite.small_files import open_regular

_system = ctypes.CDLL(None, use_errno=True)
_system.mmap.restype = ctypes.c_void_p
_system.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_system.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


def map_file(path: Path) -> np.ndarray:
    """Return the bytes of a file, uint8 [size], mapped read-only until the last view of the array is deleted.

    Raises:
        OSError: it cannot be opened or mapped.
        ValueError: it is not a regular file.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0:
            return np.empty(0, np.uint8)
        # Python's mmap, and therefore np.memmap, keeps a file descriptor for each mapping. (Python 3.13 can avoid it.)
        address = _system.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    if address == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    memory = (ctypes.c_uint8 * size).from_address(address)
    # No unmapping at exit: threads may still read then, and the system unmaps everything anyway.
    weakref.finalize(memory, _system.munmap, address, size).atexit = False
    return np.frombuffer(memoryview(memory).toreadonly(), np.uint8)


def refuse_too_many_open_files(error: Exception) -> None:
    """Raise ConfigurationError if the cause of an error is the limit of open files, not the file that it names."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        raise too_many_open_files(f"{error.filename} cannot be opened") from error
