"""Division of a command line into flags and their values, for any program."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

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
