"""Losses of the rows of a step, by running its forward again with the weights that it had."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megalite.model.batch import MicroBatch
from megalite.parallel.collectives import all_gather_json
from megalite.training import loss_terms
from megalite.training.trainer import Trainer
from megalite.watchdog.sections import SECOND_RUN


@dataclass(frozen=True)
class Row:
    """Samples of a step, mostly a single one, and the mean of their loss without dropout."""

    samples: Sequence[int]
    loss: float


def highest_rows(trainer: Trainer, micro_batches: Sequence[Any], most: int) -> list[Row]:
    """Return the rows of a step with the highest losses, the same on all ranks. Called by all ranks together.

    Args:
        micro_batches: those of this rank. Parts of its rows are on other ranks, and all ranks run as many forwards.
        most: the most rows.
    """
    mesh, task = trainer.mesh, trainer.task
    term = next(term for term in task.evaluated if term.name == task.loss_name)
    of_row = replace(
        term,
        axes=tuple(axis for axis in term.axes if axis != "dp"),
        count_axes=tuple(axis for axis in term.count_axes if axis != "dp"),
    )
    actions, own = trainer.schedules.prove(evaluation=[1], mesh=mesh).evaluation(1), []
    with trainer.sections(SECOND_RUN), trainer.evaluating():
        for row, samples in _rows(micro_batches):
            sums = loss_terms.total_sums([of_row], trainer.engine.run(actions, [row]), mesh)
            counts = loss_terms.total_counts([of_row], loss_terms.counted([of_row], [row], mesh.device), mesh)
            if counts[term.name]:  # not a slot that is empty
                own.append((list(samples), loss_terms.means(sums, counts)[term.name]))
    found = [row for rows in all_gather_json(own, mesh, "dp") for row in rows]
    highest = sorted(found, key=lambda row: (math.isfinite(row[1]), -row[1], row[0]))[:most]
    return [Row(*row) for row in all_gather_json(highest, mesh)[0]]  # ranks may differ in the last digit


def _rows(micro_batches: Sequence[Any]) -> Iterator[tuple[Any, Sequence[int]]]:
    """Yield micro-batches in which one row alone has a loss, with its sample.

    One of a task with a loss of its own, which need not be a mean over rows, is yielded whole.
    """
    for micro_batch in micro_batches:
        samples = micro_batch.sample_ids
        if not isinstance(micro_batch, MicroBatch) or micro_batch.loss_mask is None or micro_batch.token_loss:
            yield micro_batch, samples
            continue
        for number, sample in enumerate(samples):
            mask = torch.zeros_like(micro_batch.loss_mask)
            mask[number] = micro_batch.loss_mask[number]
            yield replace(micro_batch, loss_mask=mask, choices=None), (sample,)
