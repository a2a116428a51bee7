"""Division of a command line into flags and their values, for any program."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Any

from megalite.errors import ConfigurationError

_MAY_BE_SPACE = ("fim-no-prefix", "fim-split-sample", "prompt")


def flag_groups(argv: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each flag, without leading dashes and with hyphens for underscores, and the values that follow it.

    Values before the first flag have the flag "".
    """
    flag, values = "", list[str]()
    for token in argv:
        if not token.startswith("--"):
            values.append(token)
            continue
        if flag or values:
            yield flag, values
        name, equals, value = token[2:].partition("=")
        flag, values = name.replace("_", "-"), [value] if equals else []
    if flag or values:
        yield flag, values


def asked_help(argv: Sequence[str]) -> list[str] | None:
    """Return the words after -h or --help, up to the next flag; None if neither is there."""
    for place, token in enumerate(argv):
        name, equals, word = token.partition("=")
        if name in ("-h", "--help"):
            return [*([word] if equals else []), *takewhile(lambda word: word[:1] != "-", argv[place + 1 :])]
    return None


def split_flags(arguments: type[Any], argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the flags of a command, which are the fields of a dataclass, and those of the run that it is about."""
    names = {"help", "version", *(field.name for field in dataclasses.fields(arguments))}
    own: list[str] = []
    others: list[str] = []
    for flag, values in flag_groups(argv):
        mine = flag.removeprefix("no-").replace("-", "_") in names or "-h" in values
        (own if mine else others).extend(words_of(flag, values) if flag else values)
    return own, others


def words_of(flag: str, values: Sequence[str]) -> list[str]:
    """Return the words of a flag and its values. A value that looks like a flag, as -- of a pattern, is behind =."""
    return [f"--{flag}={values[0]}"] if values and values[0].startswith("--") else [f"--{flag}", *values]


def refuse_blank(flag: str, values: Iterable[str]) -> None:
    """Raise ConfigurationError if a value is empty, or only white space for a flag that does not take it."""
    for value in values:
        if flag and blank(flag, value):
            raise ConfigurationError(f"--{flag} {value!r}: is {BLANK}")


def blank(flag: str, value: str) -> bool:
    """Tell whether a value of this flag is blank."""
    return not (value if flag in _MAY_BE_SPACE else value.strip())


BLANK = "blank: if this was a shell variable, it may not be set"
"""Error message for a blank value, without the flag."""
