"""Combinations of factors as parameters of a test, of which `make test` runs those that a rule keeps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest


def named(values: Sequence[Any], name: Callable[[Any], str] = str) -> dict[str, Any]:
    """Return the values under the names that they have in the id of a test."""
    return {name(value): value for value in values}


def cells(*factors: Mapping[str, Any], kept: Callable[..., bool]) -> list[Any]:
    """Return all combinations; those are `wide` whose places, one in each factor, are not `kept`.

    A rule such as `(i + j) % 3 == k` keeps one value of the last factor for each pair of values of the others, so that
    each two values of two factors still meet, if the numbers of values allow it.
    """
    found = []
    for combination in itertools.product(*(enumerate(factor.items()) for factor in factors)):
        places = [place for place, _ in combination]
        names, values = zip(*(item for _, item in combination), strict=True)
        marks = () if kept(*places) else pytest.mark.wide
        found.append(pytest.param(*values, id="-".join(names), marks=marks))
    return found
