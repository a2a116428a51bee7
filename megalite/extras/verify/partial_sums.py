"""Tensors that were recorded as a term on each rank, before their sum over ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from megalite.extras.verify.evidence import Evidence, added
from megalite.extras.verify.trace import Entry, Trace


def complete_entries(trace: Trace, leave_out: Callable[[str], None]) -> Iterator[Entry]:
    """Yield the entries of a trace, with one entry for each sum of terms instead of the terms.

    `leave_out` is told why a sum is not there: a rank is missing, or only statistics were recorded.
    """
    groups: dict[tuple[object, ...], list[Entry]] = defaultdict(list)
    for entry in trace.entries:
        if entry.place is None or not entry.place.partial:
            yield entry
            continue
        others = {a: at for a, at in trace.coordinates.get(entry.rank, {}).items() if a not in entry.place.partial}
        key = entry.name, entry.role, entry.number, entry.micro_batch, tuple(sorted(others.items()))
        groups[key].append(entry)
    for terms in groups.values():
        first = terms[0]
        assert first.place is not None
        sizes = trace.coordinates.get(first.rank, {})
        wanted = 1
        for axis in first.place.partial:
            wanted *= sizes.get(axis, (0, 1))[1]
        if len({term.rank for term in terms}) != wanted:
            leave_out(f"{first.role} of {first.name} is a sum over {wanted} ranks, of which some are missing")
        elif added([term.read() for term in terms]) is None:
            leave_out(f"{first.role} of {first.name} is a sum over {wanted} ranks, of which only statistics are there")
        else:
            yield replace(first, read=partial(_sum, terms), place=replace(first.place, partial=()))


def _sum(terms: Sequence[Entry]) -> Evidence:
    found = added([term.read() for term in terms])
    assert found is not None
    return found
