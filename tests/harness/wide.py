"""Marks the parameters of a test that `make test` leaves out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest


def wide_except(values: Iterable[Any], few: Collection[Any]) -> list[Any]:
    """Return the values for `parametrize`; those that are not among the few, all of which must occur, are wide."""
    found = list(values)
    absent = [value for value in few if value not in found]
    if absent:
        raise ValueError(f"no such values: {absent}")
    return [value if value in few else pytest.param(value, marks=pytest.mark.wide) for value in found]


def mark_all_but_few(collected: Sequence[object]) -> None:
    """Mark as wide the cells of a module or class whose tests are marked `wide_except` and do not name them.

    Raises pytest.UsageError for a name that no cell has: all would be wide, and nobody would notice.
    """
    absent: dict[str, set[str]] = {}
    for item in collected:
        mark = item.get_closest_marker("wide_except") if isinstance(item, pytest.Function) else None
        if mark is not None and isinstance(item, pytest.Function):
            absent.setdefault(item.originalname, set(mark.args)).discard(item.callspec.id)
            if item.callspec.id not in mark.args:
                item.add_marker(pytest.mark.wide)
    if unknown := [f"{test}[{name}]" for test, names in absent.items() for name in names]:
        raise pytest.UsageError(f"wide_except names cells that are not there: {', '.join(sorted(unknown))}")
