"""Covering arrays: few configurations in which every two values that can meet do meet.

Reference: Cohen, Dalal, Fredman, Patton, "The AETG system" (1997): greedy rows, the value with the most news first.
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
Target = frozenset[tuple[str, Any]]  # the values of two or three factors, to be met in one row

CANDIDATES = 24  # rows built for each row kept


def covering_array(
    factors: Factors,
    valid: Valid,
    strength3: tuple[str, ...] = (),
    seed: int = 0,
    cost: Callable[[Row], float] = lambda row: 1.0,
) -> list[Row]:
    """Rows, all valid, such that every pair of values that a valid row can hold stands in one of them.

    Args:
        factors: the values of each factor.
        valid: whether a row may be. It reads the row only by `row[name]`, and may be asked about incomplete rows:
            there, reading a factor that is not decided yet raises KeyError and ends the call.
        strength3: factors of which every three values that can meet do, too.
        seed: the same seed gives the same rows.
        cost: what a row is to run; of the candidates that with the most news for it is kept.
    """
    generator = random.Random(seed)
    missing = dict.fromkeys(coverable(factors, valid, strength3))  # an ordered set
    rows: list[Row] = []
    while missing:
        first = next(iter(missing))
        candidates = [_build_row(factors, valid, strength3, first, missing, generator) for _ in range(CANDIDATES)]
        news = (sum(target in missing for target in _targets(row, strength3)) / cost(row) for row in candidates)
        _, row = max(zip(news, candidates, strict=True), key=lambda candidate: candidate[0])
        rows.append(row)
        for target in _targets(row, strength3):
            missing.pop(target, None)
    return rows


def uncovered(factors: Factors, valid: Valid, rows: list[Row], strength3: tuple[str, ...] = ()) -> list[Row]:
    """The pairs (and triples of `strength3`) that a valid row could hold and that none of `rows` holds."""
    covered = {target for row in rows for target in _targets(row, strength3)}
    return [dict(target) for target in coverable(factors, valid, strength3) if target not in covered]


def every_value_once(rows: Sequence[Row]) -> list[Row]:
    """A few of the rows, in which each value of each factor stands: always the row with the most news is next, of those
    with as much the one whose values stand there the least.
    """
    missing, met, found = {item for row in rows for item in row.items()}, Counter[tuple[str, Any]](), []
    while missing:
        row = max(rows, key=lambda row: (len(missing & row.items()), -sum(met[item] for item in row.items())))
        found.append(row)
        met.update(row.items())
        missing -= row.items()
    return found


def coverable(factors: Factors, valid: Valid, strength3: tuple[str, ...] = ()) -> list[Target]:
    """The pairs (and triples of `strength3`) of values that at least one valid row holds."""
    names = [*itertools.combinations(factors, 2), *itertools.combinations(strength3, 3)]
    choices = ((chosen, values) for chosen in names for values in itertools.product(*(factors[n] for n in chosen)))
    partials = [dict(zip(chosen, values, strict=True)) for chosen, values in choices]
    return [frozenset(partial.items()) for partial in partials if _can_complete(factors, valid, partial)]


def _targets(row: Row, strength3: tuple[str, ...]) -> list[Target]:
    triples = itertools.combinations([(name, row[name]) for name in strength3], 3)
    return [frozenset(items) for items in itertools.chain(itertools.combinations(row.items(), 2), triples)]


def _can_complete(factors: Factors, valid: Valid, partial: Row) -> bool:
    """Whether values for the undecided factors make `partial` a valid row.

    The factor that `valid` asks for is the one decided next: so a contradiction is met as soon as it exists.
    """
    try:
        return valid(partial)
    except KeyError as asked:
        name = asked.args[0]
    if name in partial or name not in factors:
        raise KeyError(name)  # a mistake inside `valid`
    return any(_can_complete(factors, valid, {**partial, name: value}) for value in factors[name])


def _build_row(
    factors: Factors,
    valid: Valid,
    strength3: tuple[str, ...],
    first: Target,
    missing: Mapping[Target, None],
    generator: random.Random,
) -> Row:
    """A valid row that holds `first`; the others, in random order, take the possible value with the most news."""
    row = dict(first)
    undecided = [name for name in factors if name not in row]
    generator.shuffle(undecided)
    for name in undecided:
        values = generator.sample(factors[name], len(factors[name]))
        values.sort(key=lambda value: _news(row, (name, value), strength3, missing), reverse=True)
        row[name] = next(value for value in values if _can_complete(factors, valid, {**row, name: value}))
    return {name: row[name] for name in factors}


def _news(row: Row, item: tuple[str, Any], strength3: tuple[str, ...], missing: Mapping[Target, None]) -> int:
    """How many missing targets `item` completes beside the values already in `row`."""
    pairs = sum(frozenset((item, other)) in missing for other in row.items())
    if item[0] not in strength3:
        return pairs
    decided = [(name, row[name]) for name in strength3 if name in row]
    return pairs + sum(frozenset((item, *two)) in missing for two in itertools.combinations(decided, 2))
