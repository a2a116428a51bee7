"""A command line as flags and the values behind them, whatever program they are for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from megalite.errors import ConfigurationError

_MAY_BE_SPACE = ("fim-no-prefix", "fim-split-sample", "prompt")


def flag_groups(argv: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each flag, without dashes and with hyphens, and the values that follow it."""
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
    """Raise ConfigurationError if a value is empty, or white space that is no text."""
    for value in values:
        if flag and blank(flag, value):
            raise ConfigurationError(f"--{flag} {value!r}: is {BLANK}")


def blank(flag: str, value: str) -> bool:
    """Tell whether a value of this flag is blank, and so means nothing."""
    return not (value if flag in _MAY_BE_SPACE else value.strip())


BLANK = "blank: if a shell variable stands there, it may not be set"
"""The error of a blank value, after its flag."""
