"""The covering array that most layouts are tested on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.harness.covering_array import Row, covering_array, every_value_once, uncovered

LAYOUT = {
    "family": ("gpt2", "llama"),
    "tp": (1, 2, 4, 8),
    "sp": (False, True),
    "pp": (1, 2, 4, 8),
    "vpp": (1, 2, 3),
    "schedule": ("gpipe", "1f1b", "zero_bubble"),
    "dp": (1, 2, 4, 8),
    "zero": (0, 1, 2, 3),
    "overlap": (False, True),
    "recompute": ("none", "selective", "full"),
    "kv_groups": (1, 2, 8),
    "tied": (False, True),
    "vocabulary": (64, 61),
}


def layout_is_valid(row: Row) -> bool:
    if row["sp"] and row["tp"] == 1:
        return False
    if row["tp"] * row["pp"] * row["dp"] > 8:
        return False
    if row["vpp"] > 1 and (row["pp"] == 1 or row["schedule"] == "gpipe"):
        return False
    return not (row["zero"] == 3 and row["pp"] > 1)


def holds(row: Row, target: Row) -> bool:
    return target.items() <= row.items()


@pytest.mark.wide
def test_layouts_are_covered_by_few_rows() -> None:
    strength3 = ("tp", "pp", "zero")
    rows = covering_array(LAYOUT, layout_is_valid, strength3)
    assert uncovered(LAYOUT, layout_is_valid, rows, strength3) == []
    assert all(layout_is_valid(row) for row in rows)
    assert all(list(row) == list(LAYOUT) for row in rows)
    assert len(rows) <= 60  # 4 · 4 · 4 triples, less the impossible ones, are the least
    assert any(holds(row, {"tp": 2, "pp": 2, "zero": 2}) for row in rows)
    assert rows == covering_array(LAYOUT, layout_is_valid, strength3)
    assert rows != covering_array(LAYOUT, layout_is_valid, strength3, seed=1)


def test_uncovered_tells_what_a_missing_row_held() -> None:
    factors = {"a": (0, 1), "b": (0, 1)}
    rows = covering_array(factors, lambda row: True)
    assert len(rows) == 4
    assert uncovered(factors, lambda row: True, rows[1:]) == [rows[0]]


def test_every_value_stands_in_few_rows() -> None:
    rows = covering_array(LAYOUT, layout_is_valid)
    few = every_value_once(rows)
    assert {item for row in few for item in row.items()} == {
        (n, value) for n, values in LAYOUT.items() for value in values
    }
    assert len(few) < len(rows) / 3


def test_impossible_pairs_are_not_asked_for() -> None:
    rows = covering_array({"a": (0, 1), "b": (0, 1)}, lambda row: row["a"] == row["b"])
    assert sorted(row["a"] for row in rows) == [0, 1]


def test_nothing_valid_gives_no_rows() -> None:
    assert covering_array({"a": (0, 1), "b": (0, 1)}, lambda row: False) == []


def test_mistake_in_valid_is_not_taken_for_an_undecided_factor() -> None:
    with pytest.raises(KeyError, match="typo"):
        covering_array({"a": (0, 1), "b": (0, 1)}, lambda row: row["typo"])


@st.composite
def spaces(draw: st.DrawFn) -> tuple[dict[str, tuple[int, ...]], Callable[[Row], bool]]:
    """A small space of factors, with random forbidden combinations of values."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=3, max_size=5))
    factors = {f"f{index}": tuple(range(size)) for index, size in enumerate(sizes)}
    value_of = [st.tuples(st.just(name), st.sampled_from(values)) for name, values in factors.items()]
    forbidden = draw(st.lists(st.lists(st.one_of(value_of), min_size=1, max_size=3), max_size=6))
    return factors, lambda row: not any(all(row[name] == value for name, value in rule) for rule in forbidden)


@settings(max_examples=40)
@given(spaces(), st.integers(0, 3))
def test_every_pair_of_some_valid_row_is_covered(
    space: tuple[dict[str, tuple[int, ...]], Callable[[Row], bool]], seed: int
) -> None:
    factors, valid = space
    strength3 = tuple(factors)[:3]
    every_row = [dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())]
    valid_rows = [row for row in every_row if valid(row)]
    rows = covering_array(factors, valid, strength3, seed)
    assert all(row in valid_rows for row in rows)
    for names in [*itertools.combinations(factors, 2), strength3]:
        possible = {tuple(row[name] for name in names) for row in valid_rows}
        assert {tuple(row[name] for name in names) for row in rows} == possible
    assert len(rows) <= math.prod(len(values) for values in factors.values())
    assert uncovered(factors, valid, rows, strength3) == []
    for row in rows:
        others = [other for other in rows if other is not row]
        assert all(holds(row, target) for target in uncovered(factors, valid, others, strength3))
