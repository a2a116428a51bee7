"""Common code of the dataclasses of options: the ranges of numbers, and the flags of fields."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Annotated, Any, get_args, get_type_hints

from megalite.process.host import cores
from megalite.small_files import shown


@dataclass(frozen=True)
class Range:
    """Values that a number may have.

    Attributes:
        words: description for messages, after "must be".
        holds: function that returns true if a value is in the range.
    """

    words: str
    holds: Callable[[float], bool]


def at_most(most: int) -> Range:
    """Return the range up to `most`, for numbers of things that are listed or started one by one."""
    return Range(f"at most {most:,}", lambda value: value <= most)


_AT_LEAST_ZERO = Range("at least 0", lambda value: value >= 0)
PositiveInt = Annotated[int, Range("at least 1", lambda value: value >= 1)]
NonNegativeInt = Annotated[int, _AT_LEAST_ZERO]
PositiveFloat = Annotated[float, Range("above 0", lambda value: value > 0)]
NonNegativeFloat = Annotated[float, _AT_LEAST_ZERO]
CapacityFactor = Annotated[float, Range("above 0 (leave it out to drop nothing)", lambda value: value > 0)]
Share = Annotated[float, Range("from 0 to 1", lambda value: 0 <= value <= 1)]
ShareAboveZero = Annotated[float, Range("above 0, at most 1", lambda value: 0 < value <= 1)]
ShareInside = Annotated[float, Range("above 0 and below 1", lambda value: 0 < value < 1)]
ShareBelowOne = Annotated[float, Range("at least 0 and below 1", lambda value: 0 <= value < 1)]
Workers = Annotated[PositiveInt, at_most(1024)]
CORES = cores()
"""Cores that this process may use, the default number of workers."""
_FINITE = Range("a finite number", lambda value: isinstance(value, int) or math.isfinite(value))
_EXACT = Range("at most 2^53", lambda value: isinstance(value, float) or abs(value) <= 2**53)


def range_problems(section: Any) -> Iterator[str]:
    """Yield a line for each number of a section that is not in its range."""
    kind: Any = type(section)
    for name, ranges in _ranges(kind).items():
        values = getattr(section, name)
        for value in values if isinstance(values, tuple) else (values,):
            if isinstance(value, int | float) and not isinstance(value, bool):
                missed = [each.words for each in ranges if not each.holds(value)]
                if missed:
                    yield f"{flag_of(name)} {shown(value)}: must be {missed[0]}"


@cache
def _ranges(kind: type) -> Mapping[str, Sequence[Range]]:
    """Return the ranges of each field, from the annotations of its type or of the members of a union."""
    found = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        named = [each for option in (hint, *get_args(hint)) for each in getattr(option, "__metadata__", ())]
        found[name] = (_FINITE, *named, _EXACT)
    return found


def flag_of(name: str) -> str:
    """Return the flag of a field."""
    return f"--{name.replace('_', '-')}"


def named(section: Any, names: str) -> list[str]:
    """Return the names of the fields that `names` means, as those of `changed`."""
    return [*_defaults(section.__class__, names)]


def changed(section: Any, names: str) -> list[str]:
    """Return the names of those fields in `names` that differ from their defaults.

    Args:
        section: a dataclass of options.
        names: field names separated by spaces; `prefix_*` means all fields with this prefix.
    """
    return [name for name, default in _defaults(section.__class__, names).items() if getattr(section, name) != default]


def with_defaults(section: Any, names: Iterable[str]) -> Any:
    """Return a dataclass of options in which these fields have their defaults."""
    return replace(section, **{name: getattr(type(section), name) for name in names})


@cache
def _defaults(kind: Any, names: str) -> Mapping[str, Any]:
    """Return the defaults of the fields that `names` means, by field: a start asks for most of them several times."""
    if names == "*":
        return {field.name: field.default for field in fields(kind)}
    single = names.split()
    prefixes = tuple(name[:-1] for name in single if name.endswith("*"))
    every = _defaults(kind, "*").items()
    return {name: default for name, default in every if name in single or name.startswith(prefixes)}


def given(section: Any, names: str) -> list[str]:
    """Return the flags, with their values, of the fields that are `changed`."""
    flags = []
    for name in changed(section, names):
        value = getattr(section, name)
        if isinstance(value, bool):
            flags.append(flag_of(name) if value else flag_of(f"no_{name}"))
        else:
            values = value if isinstance(value, tuple) else (value,)
            flags.append(" ".join([flag_of(name), *map(str, values)]))
    return flags


def needs(section: Any, names: str, needed: str) -> Iterator[str]:
    """Yield an error line for each of the named fields that is `changed`."""
    for name in changed(section, names):
        yield f"{flag_of(f'no_{name}' if getattr(section, name) is False else name)} needs {needed}"
