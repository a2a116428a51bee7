"""The terms of a step's loss: counts before the step, multipliers during it, means after it.

Everything is summed once over the whole global batch, and nothing else averages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch

from megalite.errors import MegaliteError
from megalite.model.batch import MicroBatch
from megalite.model.gpt import GPT
from megalite.model.head import LM_LOSS
from megalite.parallel import collectives
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.stage import NO_SUMS, LossTerm, TermSums, add_sums
from megalite.training.metrics import is_figure

_MISSING = torch.tensor(-0.0, dtype=torch.float64)
Totals = Mapping[str, float]
"""Values by the names of terms."""


def declared_terms(chunks: Iterable[GPT]) -> tuple[LossTerm, ...]:
    """The terms of the loss, which all stages of a rank must declare alike, under names that nothing else has.

    Raises MegaliteError if they do not; that other ranks do, too, is part of the proof of steps.
    """
    terms, *others = [chunk.loss_terms for chunk in chunks]
    for number, other in enumerate(others, 1):
        if [str(term) for term in other] != [str(term) for term in terms]:
            raise MegaliteError(
                f"stages of one rank declare other terms of the loss: chunk 0 {_listed(terms)}, chunk {number} "
                f"{_listed(other)}. GPT.loss_terms must give those of the whole network, on every stage"
            )
    names = [term.name for term in terms]
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise MegaliteError(f"several terms of the loss are called {twice[0]}: give each a name of its own")
    if taken := [name for name in names if name != LM_LOSS.name and is_figure(name)]:
        raise MegaliteError(
            f"a term of the loss is called {taken[0]}, which is the name of another figure in the metrics: choose one "
            "that is free"
        )
    return terms


def _listed(terms: Iterable[LossTerm]) -> str:
    return "; ".join(map(str, terms)) or "none"


def counted(terms: Sequence[LossTerm], micro_batches: Iterable[MicroBatch], device: torch.device) -> TermSums:
    """Count what each term is a mean of, on this rank, fp64 on the device."""
    counts: TermSums = NO_SUMS
    for micro_batch in micro_batches:
        counts = add_sums(counts, {term.name: term.count(micro_batch).to(device, torch.float64) for term in terms})
    return counts


def total_counts(terms: Sequence[LossTerm], own: TermSums, mesh: ParallelMesh) -> Totals:
    """Add up what ranks have counted for each term, or nothing."""
    return _totals({term.name: term.count_axes for term in terms}, own, mesh, over_stages=False)


def total_sums(terms: Sequence[LossTerm], own: TermSums, mesh: ParallelMesh) -> Totals:
    """Add up the sums that ranks have of each term, or nothing; the stages of a pipeline have parts of them, too.

    Raises MegaliteError for a term of which no rank has a sum.
    """
    # What is missing is a negative zero, of which any sum leaves one, and no sum that a rank has is one.
    sums = _totals(
        {term.name: term.axes for term in terms},
        {term.name: own[term.name] + 0.0 if term.name in own else _MISSING for term in terms},
        mesh,
        over_stages=True,
    )
    if missing := [name for name, total in sums.items() if total == 0.0 and math.copysign(1.0, total) < 0.0]:
        raise MegaliteError(
            f"no stage returned the term of the loss that is declared as {missing[0]}: have a layer or the head return "
            "its sum, or take it out of GPT.loss_terms"
        )
    return sums


def _totals(
    axes_of: Mapping[str, tuple[str, ...]], own: TermSums, mesh: ParallelMesh, *, over_stages: bool
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


def loss_multipliers(terms: Sequence[LossTerm], counts: Totals, loss_scale: float) -> Totals:
    """Multipliers of the terms' sums in backward; 0 for a term with nothing to count."""
    return {term.name: loss_scale * term.weight / counts[term.name] if counts[term.name] else 0.0 for term in terms}


def means(sums: Totals, counts: Totals) -> Totals:
    """The mean of each term, unweighted; 0 for a term with nothing to count."""
    return {name: total / counts[name] if counts[name] else 0.0 for name, total in sums.items()}
