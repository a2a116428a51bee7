"""The loss terms of a step: counts before the step, multipliers for its backward, means after it.

Sums and counts are taken once over the global batch. No other code averages: neither over micro-batches nor over
data-parallel ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from megalite.errors import MegaliteError
from megalite.parallel import collectives
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.stage import NO_SUMS, LossTerm, TermSums, add_sums
from megalite.parallel.stage_module import StageModule
from megalite.training.metrics import is_figure

_MISSING = torch.tensor(-0.0, dtype=torch.float64)
Totals = Mapping[str, float]
"""One value per loss term, by the term's name."""


def declared_terms(chunks: Iterable[StageModule]) -> tuple[LossTerm, ...]:
    """Return the loss terms of the network.

    Raises MegaliteError if two stages of this rank declare different terms, or if a name is not unique. The proof of
    steps checks that all ranks declare the same terms.
    """
    terms, *others = [chunk.loss_terms for chunk in chunks]
    for number, other in enumerate(others, 1):
        if [str(term) for term in other] != [str(term) for term in terms]:
            raise MegaliteError(
                f"stages of one rank declare different terms of the loss: chunk 0 {_listed(terms)}, chunk {number} "
                f"{_listed(other)}. `loss_terms` must give those of the whole network, on every stage"
            )
    check_names(terms)
    return terms


def check_names(terms: Iterable[LossTerm]) -> None:
    """Raise MegaliteError if a term of the loss has no name of its own in the records."""
    names = [name for term in terms for name in term.names]
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise MegaliteError(f"several terms of the loss are called {twice[0]}: give each a name of its own")
    if taken := [name for name in names if is_figure(name)]:
        raise MegaliteError(
            f"a term of the loss is called {taken[0]}, which is the name of another figure in the metrics: choose one "
            "another name"
        )


def _listed(terms: Iterable[LossTerm]) -> str:
    return "; ".join(map(str, terms)) or "none"


def counted(terms: Sequence[LossTerm], micro_batches: Iterable[Any], device: torch.device) -> TermSums:
    """Return this rank's count of each term: the denominator of its mean, in fp64 on the device."""
    counts: TermSums = NO_SUMS
    for micro_batch in micro_batches:
        counts = add_sums(counts, {term.name: term.count(micro_batch).to(device, torch.float64) for term in terms})
    return counts


def no_count(micro_batch: object) -> torch.Tensor:
    """Return the count of a sum that is no mean."""
    return torch.zeros(())


def total_counts(terms: Sequence[LossTerm], own: TermSums, mesh: ParallelMesh) -> Totals:
    """Return the sum of each term's counts over the ranks, by the names under which it is recorded.

    A term that is missing in `own` counts as 0. A part that has counted nothing is left out.
    """
    counts = _totals({term: term.count_axes for term in terms}, own, mesh, over_stages=False)
    parts = {part for term in terms for part in term.parts}
    return {name: count for name, count in counts.items() if count or name not in parts}


def total_sums(terms: Sequence[LossTerm], own: TermSums, mesh: ParallelMesh) -> Totals:
    """Return the sum of each term over the ranks, including the stages, by the names under which it is recorded.

    A rank may lack a term. Raises MegaliteError if no rank has a sum of it, unless the others have no processes.
    """
    # A missing sum is -0.0, and `+ 0.0` turns a present -0.0 into 0.0. A total is then -0.0 only if all ranks lack it.
    sums = _totals(
        {term: term.axes for term in terms},
        {term.name: own[term.name] + 0.0 if term.name in own else _MISSING for term in terms},
        mesh,
        over_stages=True,
    )
    missing = [name for name, total in sums.items() if total == 0.0 and math.copysign(1.0, total) < 0.0]
    if missing and mesh.is_connected:  # otherwise another stage would have returned it
        raise MegaliteError(
            f"no stage returned the term of the loss that is declared as {missing[0]}: have a layer or the head return "
            "its sum, or take it out of `loss_terms`"
        )
    return sums


def _totals(
    axes_of: Mapping[LossTerm, tuple[str, ...]], own: TermSums, mesh: ParallelMesh, *, over_stages: bool
) -> dict[str, float]:
    """Sum over the ranks, in fp64, with one all-reduce for all terms that have the same axes."""
    zero, found = torch.zeros((), dtype=torch.float64), dict[str, float]()
    for axes in dict.fromkeys(axes_of.values()):
        terms = [term for term, spread in axes_of.items() if spread == axes]
        values = [own.get(term.name, zero).to(mesh.device).reshape(-1).expand(len(term.names)) for term in terms]
        totals = torch.cat(values)
        totals = collectives.all_reduce_(totals, mesh.group(*axes))
        if over_stages:
            totals = collectives.all_reduce_(totals, mesh.group("pp"))
        found.update(zip((name for term in terms for name in term.names), totals.tolist(), strict=True))
    return found


class EmptyTerms:
    """Terms that counted nothing in a step or an evaluation. Each is told once."""

    def __init__(self) -> None:
        self._found: list[str] = []
        self._told = 0  # the first ones of them

    def add(self, counts: Totals) -> None:
        self._found += [name for name, count in counts.items() if not count and name not in self._found]

    def note(self) -> str | None:
        """Return a note on the terms that have not been told, if there are any."""
        found, self._told = self._found[self._told :], len(self._found)
        if not found:
            return None
        return (
            f"note: the count of {', '.join(found)} was 0 in a step or an evaluation: its mean is recorded as 0, and "
            "it gives no gradients. This is said once: see what count=... returns, or the loss mask"
        )


def loss_multipliers(terms: Sequence[LossTerm], counts: Totals, loss_scale: float) -> Totals:
    """Return the multiplier of each term's sum in backward; 0 for a term whose count is 0, or that has parts."""
    scale = {term.name: loss_scale * term.weight for term in terms}
    return {name: scaled / counts[name] if counts.get(name) else 0.0 for name, scaled in scale.items()}


def means(sums: Totals, counts: Totals) -> Totals:
    """Return the unweighted mean of each term; 0 for a term whose count is 0, and none for one that has no count."""
    return {name: total / counts[name] if counts[name] else 0.0 for name, total in sums.items() if name in counts}
