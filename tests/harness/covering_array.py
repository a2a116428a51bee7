"""Covering arrays: a small set of rows that contains every pair of values that a valid row can contain.

Reference: Cohen, Dalal, Fredman, Patton, "The AETG system" (1997): rows built greedily; the value that covers the most
missing pairs comes first.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Factors = Mapping[str, tuple[Any, ...]]
Row = dict[str, Any]
Valid = Callable[[Row], bool]
Target = frozenset[tuple[str, Any]]  # values of two or three factors, to occur together in one row

CANDIDATES = 24


def covering_array(
    factors: Factors,
    valid: Valid,
    strength3: tuple[str, ...] = (),
    seed: int = 0,
    cost: Callable[[Row], float] = lambda row: 1.0,
    candidates: int = CANDIDATES,
) -> list[Row]:
    """Return valid rows that cover every pair of values that a valid row can contain.

    Args:
        factors: values of each factor.
        valid: returns True if a row is valid. It reads the row only by `row[name]`. It may be called with incomplete
            rows: then reading an undecided factor raises KeyError, which ends the call.
        strength3: factors for which also every possible triple of values is covered.
        seed: the same seed gives the same rows.
        cost: cost of running a row. The candidate that covers the most missing targets per cost is kept.
        candidates: number of rows built per row kept; few take less time and give hardly more rows.
    """
    generator = random.Random(seed)
    missing = dict.fromkeys(coverable(factors, valid, strength3))  # an ordered set
    rows: list[Row] = []
    while missing:
        first = next(iter(missing))
        built = [_build_row(factors, valid, strength3, first, missing, generator) for _ in range(candidates)]
        news = (sum(target in missing for target in _targets(row, strength3)) / cost(row) for row in built)
        _, row = max(zip(news, built, strict=True), key=lambda candidate: candidate[0])
        rows.append(row)
        for target in _targets(row, strength3):
            missing.pop(target, None)
    return rows


def uncovered(factors: Factors, valid: Valid, rows: list[Row], strength3: tuple[str, ...] = ()) -> list[Row]:
    """Return the pairs (and triples of `strength3`) that a valid row could contain and none of `rows` contains."""
    covered = {target for row in rows for target in _targets(row, strength3)}
    return [dict(target) for target in coverable(factors, valid, strength3) if target not in covered]


def every_value_once(rows: Sequence[Row]) -> list[Row]:
    """Return a few of the rows that contain each value of each factor.

    The next row is always the one with the most new values; among equals, the one whose values occur in the fewest
    rows.
    """
    missing, met, found = {item for row in rows for item in row.items()}, Counter[tuple[str, Any]](), []
    while missing:
        row = max(rows, key=lambda row: (len(missing & row.items()), -sum(met[item] for item in row.items())))
        found.append(row)
        met.update(row.items())
        missing -= row.items()
    return found


def coverable(factors: Factors, valid: Valid, strength3: tuple[str, ...] = ()) -> list[Target]:
    """Return the pairs (and triples of `strength3`) of values that at least one valid row contains."""
    names = [*itertools.combinations(factors, 2), *itertools.combinations(strength3, 3)]
    choices = ((chosen, values) for chosen in names for values in itertools.product(*(factors[n] for n in chosen)))
    found, completed = [], Row()
    for partial in (dict(zip(chosen, values, strict=True)) for chosen, values in choices):
        if (now := _complete(factors, valid, partial, completed)) is not None:
            found.append(frozenset(partial.items()))
            completed = now
    return found


def _targets(row: Row, strength3: tuple[str, ...]) -> list[Target]:
    triples = itertools.combinations([(name, row[name]) for name in strength3], 3)
    return [frozenset(items) for items in itertools.chain(itertools.combinations(row.items(), 2), triples)]


def _complete(factors: Factors, valid: Valid, partial: Row, other: Row) -> Row | None:
    """Return `partial` with values for those undecided factors that `valid` reads, as a valid row; None if there are
    none.

    The values of another valid row are tried first: they often do, and a search takes much longer.
    """
    row = other | partial
    try:
        if valid(row):
            return row
    except KeyError as asked:
        if asked.args[0] in row:
            raise  # a bug in `valid`
    return _search(factors, valid, partial, other)


def _search(factors: Factors, valid: Valid, partial: Row, other: Row) -> Row | None:
    """Decide one factor after the other; the value of the other row is tried first.

    The factor that `valid` reads is the next one decided, so that a contradiction is found as soon as it exists.
    """
    try:
        return partial if valid(partial) else None
    except KeyError as asked:
        name = asked.args[0]
    if name in partial or name not in factors:
        raise KeyError(name)  # a bug in `valid`
    values = sorted(factors[name], key=lambda value: value != other.get(name))
    rows = (_search(factors, valid, {**partial, name: value}, other) for value in values)
    return next((row for row in rows if row is not None), None)


def _build_row(
    factors: Factors,
    valid: Valid,
    strength3: tuple[str, ...],
    first: Target,
    missing: Mapping[Target, None],
    generator: random.Random,
) -> Row:
    """Build a valid row that contains `first`. The other factors, in random order, take the value that covers the
    most."""
    row, completed = dict(first), dict(first)
    undecided = [name for name in factors if name not in row]
    generator.shuffle(undecided)
    for name in undecided:
        values = generator.sample(factors[name], len(factors[name]))
        values.sort(key=lambda value: _news(row, (name, value), strength3, missing), reverse=True)
        rows = (_complete(factors, valid, {**row, name: value}, completed) for value in values)
        completed = next(found for found in rows if found is not None)
        row[name] = completed[name]
    return {name: row[name] for name in factors}


def _news(row: Row, item: tuple[str, Any], strength3: tuple[str, ...], missing: Mapping[Target, None]) -> int:
    """Count the missing targets that `item` completes together with the values already in `row`."""
    pairs = sum(frozenset((item, other)) in missing for other in row.items())
    if item[0] not in strength3:
        return pairs
    decided = [(name, row[name]) for name in strength3 if name in row]
    return pairs + sum(frozenset((item, *two)) in missing for two in itertools.combinations(decided, 2))
