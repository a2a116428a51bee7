"""Safe reading of untrusted files.

Small files (JSON, YAML, trackers, tokenizers) are read with limits on size, nesting and number of values. Files of any
size are opened only if they are regular: a FIFO, a device or a link out of the folder is refused. A refusal is a
ValueError with the reason; the caller adds the file's name and what to do.
"""

from __future__ import annotations

import errno
import json
import os
import re
import reprlib
import stat
import tomllib
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path
from typing import Any

MIB = 2**20
LARGEST = 64 * MIB
"""Default limit for the size of a small file, in bytes."""
MOST_MARKS = 3_000_000
"""Limit for the number of braces, brackets, commas and colons in a JSON text. Each takes at most 100 bytes of memory
when parsed, in addition to the text itself."""
DEEPEST = 64
"""Limit for the nesting of lists and objects. Of the files that megalite reads, the deepest has eight levels."""
MOST_TOML_MARKS = 10_000
"""Limit for the number of dots, equals signs, brackets, braces and commas in a TOML text: its parser, in Python, takes
0.1 ms for each."""
_DEEP_KEY = re.compile(rf"""(?:(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){{{DEEPEST}}}""")
MOST_AXES = 64
"""Limit for the number of axes of a tensor, the same as torch's. It bounds the time to multiply the sizes."""
WHOLE_NUMBERS = range(-(2**63), 2**64)
"""Integers of 64 bits, signed or unsigned."""
_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = _BRIEF.maxlong = 100


def read_small_file(path: Path, *, largest: int = LARGEST, folder: Path | None = None) -> bytes:
    """Read all of a regular file.

    Args:
        largest: limit for the size in bytes.
        folder: as for `open_regular`.

    Raises:
        OSError: the file is missing or cannot be read.
        ValueError: the file is not regular, is too large, or is a link that leads out of the folder.
    """
    with open_regular(path, folder=folder) as file:
        size = os.fstat(file.fileno()).st_size
        content = b"" if size > largest else file.read(largest + 1)  # some file systems report a wrong size
    if max(size, len(content)) > largest:
        raise ValueError(f"larger than its limit of {largest / MIB:g} MiB")
    return content


def open_regular(path: Path, *, folder: Path | None = None) -> BufferedReader:
    """Open a regular file of any size for reading.

    Args:
        folder: the folder that must contain the file after links are resolved. The folder's own path may contain links.

    Raises:
        OSError: the file is missing or cannot be read.
        ValueError: the file is not regular, or is a link that leads out of the folder.
    """
    if folder is not None and not _lies_in(path, folder):
        raise ValueError(f"a link to {os.path.realpath(path)}, outside its folder")
    # O_NONBLOCK: opening a FIFO does not wait for a writer. O_NOCTTY: a terminal does not become this process's.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise ValueError("not a regular file, but a pipe, socket or device")


def _lies_in(path: Path, folder: Path) -> bool:
    """Tell whether the path is inside the folder after links are resolved.

    Hugging Face's cache is an exception: files in models--NAME/snapshots/COMMIT are links into models--NAME/blobs.
    """
    root, real = Path(os.path.realpath(folder)), Path(os.path.realpath(path))
    model = root.parent.parent
    cached = root.parent.name == "snapshots" and model.name.startswith("models--")
    return real.is_relative_to(root) or (cached and real.is_relative_to(model / "blobs"))


def read_json(path: Path, *, largest: int = LARGEST, most_marks: int = MOST_MARKS, folder: Path | None = None) -> Any:
    """Read a small JSON file, with the limits of `read_small_file` and `parse_json`."""
    return parse_json(read_small_file(path, largest=largest, folder=folder), most_marks=most_marks)


def parse_json(text: str | bytes, *, most_marks: int = MOST_MARKS, larger_numbers: bool = False) -> Any:
    """Parse JSON with limits: no key twice in an object, integers of at most 64 bits, at most `DEEPEST` levels.

    Args:
        most_marks: limit for the number of opening braces and brackets, commas and colons.
        larger_numbers: read a larger integer as a float instead of refusing it. For files of other programs, most of
            whose numbers are not used here: "no limit" is 10^30 in some. A float is no count (`is_count`).

    Raises:
        ValueError: the text is not JSON, or exceeds a limit.
    """
    # Counted before parsing: `{},` takes more than twenty times as much memory when parsed.
    count: Callable[[Any], int] = text.count
    marks = sum(map(count, "{[,:" if isinstance(text, str) else b"{[,:"))
    if marks > most_marks:
        raise ValueError(f"of {marks:,} braces, brackets, commas and colons, but {most_marks:,} are allowed")
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_int=_number if larger_numbers else _whole_number)
    except RecursionError:
        raise ValueError(f"nested deeper than {DEEPEST} levels") from None
    level = [value]
    for _ in range(DEEPEST + 1):
        inner = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level = [value for values in inner for value in values if isinstance(value, dict | list)]
        if not level:
            return value
    raise ValueError(f"nested deeper than {DEEPEST} levels")


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML with limits: at most `MOST_TOML_MARKS` marks, and `DEEPEST` levels in a key.

    Raises:
        ValueError: the text is not TOML, or exceeds a limit.
    """
    # Before parsing: the time for a key goes with the square of its parts.
    marks = sum(map(text.count, ".=[{,"))
    if marks > MOST_TOML_MARKS:
        raise ValueError(f"of {marks:,} dots, brackets, commas and the like, but {MOST_TOML_MARKS:,} are allowed")
    if _DEEP_KEY.search(text):
        raise ValueError(f"a key of more than {DEEPEST} parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError(f"nested deeper than {DEEPEST} levels") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the key {name[:80]!r} is twice in one object")
        found[name] = value
    return found


def _whole_number(text: str) -> int | float:
    if text == "-0":  # integers have no negative zero
        return -0.0
    if len(text) > 20 or (number := int(text)) not in WHOLE_NUMBERS:
        raise ValueError(f"a whole number of {len(text.lstrip('-'))} digits, but 64 bits have at most 20")
    return number


def _number(text: str) -> int | float:
    try:
        return _whole_number(text)
    except ValueError:
        return float(text)


def is_count(value: object, end: int = 2**63) -> bool:
    """Return whether a value is an integer from 0 to (not including) `end`."""
    return type(value) is int and 0 <= value < end


def reason(error: BaseException) -> str:
    """Return the cause of an error in one line, without the error number and the path of an OSError."""
    return " ".join(str(getattr(error, "strerror", None) or error).split())[:300]


def shown(value: object) -> str:
    """Return an untrusted value as text for a message, in at most 100 characters."""
    try:
        text = _BRIEF.repr(value)
    except ValueError:  # an integer with more digits than Python converts to text
        text = "a number of thousands of digits"
    return text if len(text) <= 100 else f"{text[:97]}..."
