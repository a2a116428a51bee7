"""Shares of the wide tests and of the planted faults."""

from __future__ import annotations

import pytest

from tests.harness.turn import Turn
from tests.mutants import FILES, mutants_of


def test_each_name_has_its_turn_once_and_shares_are_alike() -> None:
    names = [mutant.fault for file in FILES for mutant in mutants_of(file)]
    shares = [[name for name in names if Turn(number, 4).has(name)] for number in range(1, 5)]
    assert sorted(name for share in shares for name in share) == sorted(names)
    assert all(0.75 * len(names) / 4 < len(share) < 1.25 * len(names) / 4 for share in shares)


def test_turns_are_read() -> None:
    assert Turn.parse("2/4") == Turn(2, 4)
    for text in ("0/4", "5/4", "2", "a/b"):
        with pytest.raises(ValueError):
            Turn.parse(text)
