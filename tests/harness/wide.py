"""Marks the parameters of a test that `make test` leaves out."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def wide_except(values: Iterable[Any], few: Collection[Any]) -> list[Any]:
    """Return the values for `parametrize`; those that are not among the few, all of which must occur, are wide."""
    found = list(values)
    absent = [value for value in few if value not in found]
    if absent:
        raise ValueError(f"no such values: {absent}")
    return [value if value in few else pytest.param(value, marks=pytest.mark.wide) for value in found]
