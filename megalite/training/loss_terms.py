"""The terms of a step's loss: their counts before it, their factors in it, their means after it.

Everything is summed once over the whole global batch, and nothing else averages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from megalite.model.batch import MicroBatch
from megalite.parallel import collectives
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.stage import NO_TERMS, LossTerm, Terms, add_terms

Totals = Mapping[str, float]
"""By the names of terms."""


def counted(terms: Sequence[LossTerm], micro_batches: Iterable[MicroBatch], device: torch.device) -> Terms:
    """Count what each term is a mean of, on this rank, fp64 on the device."""
    counts: Terms = NO_TERMS
    for micro_batch in micro_batches:
        counts = add_terms(counts, {term.name: term.count(micro_batch).to(device, torch.float64) for term in terms})
    return counts


def total_counts(terms: Sequence[LossTerm], own: Terms, mesh: ParallelMesh) -> Totals:
    """Add up what ranks have counted for each term, or nothing."""
    return _totals({term.name: term.count_axes for term in terms}, own, mesh, over_stages=False)


def total_sums(terms: Sequence[LossTerm], own: Terms, mesh: ParallelMesh) -> Totals:
    """Add up the sums that ranks have of each term, or nothing; the stages of a pipeline have parts of them, too."""
    return _totals({term.name: term.axes for term in terms}, own, mesh, over_stages=True)


def _totals(
    axes_of: Mapping[str, tuple[str, ...]], own: Terms, mesh: ParallelMesh, *, over_stages: bool
) -> dict[str, float]:
    """Add up over ranks: one all-reduce for all names that are spread over the same axes. `own`: fp64."""
    zero, found = torch.zeros((), dtype=torch.float64), dict[str, float]()
    for axes in dict.fromkeys(axes_of.values()):
        names = [name for name, spread in axes_of.items() if spread == axes]
        totals = torch.stack([own.get(name, zero).to(mesh.device) for name in names])
        totals = collectives.all_reduce_(totals, mesh.group(*axes))
        if over_stages:
            totals = collectives.all_reduce_(totals, mesh.group("pp"))
        found.update(zip(names, totals.tolist(), strict=True))
    return found


def factors(terms: Sequence[LossTerm], counts: Totals, loss_scale: float) -> Totals:
    """Factors of the terms' sums, at which they are differentiated; 0 where there is nothing to count."""
    return {term.name: loss_scale * term.weight / counts[term.name] if counts[term.name] else 0.0 for term in terms}


def means(sums: Totals, counts: Totals) -> Totals:
    """The mean of each term, unweighted; 0 where there is nothing to count."""
    return {name: total / counts[name] if counts[name] else 0.0 for name, total in sums.items()}
