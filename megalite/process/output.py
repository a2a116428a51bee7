"""Standard output and standard error of the program."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from io import TextIOWrapper

# Control characters but for tab and newline, separators of lines, and marks that change the direction of text.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def require_streams() -> None:
    """Make writing to standard output and error always possible.

    Characters that cannot be encoded are escaped. If this process was started without one of the streams (`>&-`, some
    supervisors), its output is discarded.
    """
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # it stays open as long as the process lives
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, TextIOWrapper):  # Python escapes on standard error by itself
        with suppress(OSError):  # flushes earlier output, which fails on a full disk; `write_out` reports it
            sys.stdout.reconfigure(errors="backslashreplace")


def write_out() -> OSError | None:
    """Flush standard output. If this fails (full disk, closed pipe), discard the output and return the error.

    Otherwise Python would fail at exit and change the exit code.
    """
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return error
    return None


def say(*values: object, sep: str = " ", end: str = "\n", to_error: bool = False, exact: bool = False) -> None:
    """Print what a person reads, on standard output or error, at once: all that a program prints passes here.

    It is made `printable`, unless it is `exact`, for another program. Raises OSError if the stream cannot be written
    to.
    """
    stream = sys.stderr if to_error else sys.stdout
    text = sep.join(map(str, values))
    stream.write((text if exact else printable(text)) + end)
    stream.flush()


def printable(text: str) -> str:
    """Return the text with escapes in place of characters that move, hide or reorder what a terminal shows.

    Names and texts in files of others may hold them, to forge lines or to give commands to the terminal.
    """
    shown = _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
    return shown.encode(errors="backslashreplace").decode()  # half a pair of UTF-16 is no text that can be encoded


def shell_word(word: str) -> str:
    """Return a word as bash takes it, without a character that `printable` would escape: $'\\e' in place of such."""
    if printable(word) == word:
        return shlex.quote(word)
    escaped = re.sub(r"([\\'])", r"\\\1", word)
    escaped = _UNSAFE.sub(lambda found: "".join(f"\\x{byte:02x}" for byte in os.fsencode(found[0])), escaped)
    return f"$'{escaped}'"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table. Columns have the least width; columns of numbers are aligned right."""
    columns = [_aligned(column) for column in zip(header, *rows, strict=True)]
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]


def _aligned(cells: Sequence[str]) -> list[str]:
    width = max(map(len, cells))
    numbers = all(re.fullmatch(r"-?|-?[\d,.]+(e[+-]\d+)?|-?inf", cell) for cell in cells[1:])
    return [cell.rjust(width) if numbers else cell.ljust(width) for cell in cells]


def in_words(number: float) -> str:
    """Return a number of bytes as text, with a readable unit."""
    for unit in ("B", "KiB", "MiB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:.4g} GiB"
