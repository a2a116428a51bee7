"""Errors of libraries with native code, in which a tokenizer's file may be wrong in ways that they do not check."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megalite.errors import DataError, MegaliteError
from megalite.small_files import reason


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Raise errors of a library as a DataError that begins with `what`.

    A panic of Rust's code is one of them, although it is no Exception. Errors of megalite, of the system and of memory
    are not.
    """
    try:
        yield
    except (MegaliteError, OSError, MemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise DataError(f"{what} ({reason(error)})") from error
