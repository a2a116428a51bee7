"""Files of strangers: small ones (JSON, YAML, trackers, tokenizers) are read within bounds, no fifo, device or endless
file, no text whose reading never ends; others are opened where they are regular files. What is refused is a ValueError
that says why; the caller knows the file and what to do.
"""

from __future__ import annotations

import errno
import json
import os
import reprlib
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any

MIB = 2**20
LARGEST = 64 * MIB
"""Bytes of a small file, where its reader knows no better."""
MOST_MARKS = 3_000_000
"""Braces, brackets, commas and colons of a JSON text: beside its own bytes, 100 bytes of memory each at most."""
DEEPEST = 64
"""Levels of lists and objects in each other; the deepest file of those that are read has eight."""
MOST_AXES = 64
"""The most axes of a tensor, as torch has them: the product of endless sizes would take for ever."""
WHOLE_NUMBERS = range(-(2**63), 2**64)
"""Integers of 64 bits, with a sign or without."""
_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = _BRIEF.maxlong = 100


def read_small_file(path: Path, *, largest: int = LARGEST, folder: Path | None = None) -> bytes:
    """Read a whole regular file.

    Args:
        largest: bytes.
        folder: as for `open_regular`.

    Raises:
        OSError: it is missing or cannot be read.
        ValueError: it is no regular file, too large, or a link that leads out of the folder.
    """
    with open_regular(path, folder=folder) as file:
        size = os.fstat(file.fileno()).st_size
        content = b"" if size > largest else file.read(largest + 1)  # a file system may not know the size
    if max(size, len(content)) > largest:
        raise ValueError(f"larger than the {largest / MIB:g} MiB that such a file may have")
    return content


def open_regular(path: Path, *, folder: Path | None = None) -> BufferedReader:
    """Open a regular file of any size to be read.

    Args:
        folder: the one that it must lie in once links are followed; those of the folder's own path may lead anywhere.

    Raises:
        OSError: it is missing or cannot be read.
        ValueError: it is no regular file, or a link that leads out of the folder.
    """
    if folder is not None and not _lies_in(path, folder):
        raise ValueError(f"a link to {os.path.realpath(path)}, out of its folder")
    # A fifo is opened without waiting for a writer, and a terminal does not become this process's.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise ValueError("no regular file, but a pipe, socket or device")


def _lies_in(path: Path, folder: Path) -> bool:
    """Follow links. Hugging Face's cache keeps the files of models--NAME/snapshots/COMMIT in models--NAME/blobs."""
    root, real = Path(os.path.realpath(folder)), Path(os.path.realpath(path))
    model = root.parent.parent
    cached = root.parent.name == "snapshots" and model.name.startswith("models--")
    return real.is_relative_to(root) or (cached and real.is_relative_to(model / "blobs"))


def read_json(path: Path, *, largest: int = LARGEST, most_marks: int = MOST_MARKS, folder: Path | None = None) -> Any:
    """Read a small file of JSON: `read_small_file`, then `parse_json`."""
    return parse_json(read_small_file(path, largest=largest, folder=folder), most_marks=most_marks)


def parse_json(text: str | bytes, *, most_marks: int = MOST_MARKS) -> Any:
    """Parse JSON in which no key stands twice in an object, whole numbers have 64 bits, and depth is bounded.

    Args:
        text: what to parse.
        most_marks: braces, brackets, commas and colons that it may have.

    Raises:
        ValueError: the text is none.
    """
    # Counted before anything is made of them: `{},` becomes more than twenty times its bytes.
    if isinstance(text, str):
        marks = sum(text.count(mark) for mark in "{[,:")
    else:
        marks = sum(text.count(mark) for mark in b"{[,:")
    if marks > most_marks:
        raise ValueError(f"of {marks:,} braces, brackets, commas and colons, where {most_marks:,} may be")
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_int=_whole_number)
    except RecursionError:
        raise ValueError(f"nested deeper than {DEEPEST} levels") from None
    level = [value]
    for _ in range(DEEPEST + 1):
        inner = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level = [value for values in inner for value in values if isinstance(value, dict | list)]
        if not level:
            return value
    raise ValueError(f"nested deeper than {DEEPEST} levels")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the key {name[:80]!r} stands twice in one object")
        found[name] = value
    return found


def _whole_number(text: str) -> int | float:
    if text == "-0":  # which no whole number is
        return -0.0
    if len(text) > 20 or (number := int(text)) not in WHOLE_NUMBERS:
        raise ValueError(f"a whole number of {len(text.lstrip('-'))} digits, where 64 bits hold no more than 20")
    return number


def reason(error: Exception) -> str:
    """Give an error's cause in a line, where libraries have several; that of the system without number and path."""
    return " ".join(str(getattr(error, "strerror", None) or error).split())[:300]


def shown(value: object) -> str:
    """Give a value of a stranger for a message, in a hundred characters at most, however large it is."""
    try:
        text = _BRIEF.repr(value)
    except ValueError:  # of a number with more digits than Python writes
        text = "a number of thousands of digits"
    return text if len(text) <= 100 else f"{text[:97]}..."
