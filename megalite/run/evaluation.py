"""Evaluation of a network: means of the loss and of metrics over a dataset, whose samples count once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megalite.parallel.stage import NO_SUMS, LossTerm, TermSums, add_sums, items_of
from megalite.pipeline.engine import PipelineEngine
from megalite.training import loss_terms
from megalite.training.loss_terms import Totals
from megalite.training.task import Loader
from megalite.training.trainer import Trainer


def evaluate(
    trainer: Trainer,
    *,
    test: bool = False,
    should_stop: Callable[[], bool] | None = None,
    loader: Loader[Any] | None = None,
    batches: int | None = None,
) -> Totals | None:
    """Compute the means of the evaluated terms over the validation data, or over the test data: `eval_iters` batches,
    starting at the first sample, or with `full_validation` all validation data. `loader` and `batches` give other data,
    and another number.

    Data with a length have each sample at most once, and the last batch may be smaller. Called by all ranks together.

    If the data are several sets (`Task.evaluation_loaders`), a term's mean is that over all of them together, and
    TERM/NAME is that of a set.

    `should_stop` is called between batches and must return the same value on all ranks. Returns None if the
    evaluation was stopped.
    """
    task, stops = trainer.task, should_stop or (lambda: False)
    iterations = trainer.config.training.eval_iters if batches is None else batches
    reads_all = task.full_validation and not test and batches is None
    sets: dict[str, tuple[Totals, Totals]] = {}
    with trainer.evaluating():
        for name, each in (task.evaluation_loaders(test=test) if loader is None else {"": loader}).items():
            if sets and stops():
                return None
            totals = _of_set(trainer, each, None if reads_all else iterations, stops)
            if totals is None:
                return None
            sets[name] = totals
    trainer.return_unused_memory(1)
    sums, counts = (_added([of_set[part] for of_set in sets.values()]) for part in (0, 1))
    for name, (set_sums, set_counts) in sets.items():
        if name:
            sums |= {f"{term}/{name}": total for term, total in set_sums.items()}
            counts |= {f"{term}/{name}": count for term, count in set_counts.items()}
    trainer.empty_terms.add(counts)
    return loss_terms.means(sums, counts)


def _of_set(
    trainer: Trainer, loader: Loader[Any], batches: int | None, stops: Callable[[], bool]
) -> tuple[Totals, Totals] | None:
    """Return the sums and counts of the terms over one set, of all ranks; None if the evaluation was stopped.

    `batches`: the most that are read; None: all, of a set that has an end.
    """
    task, mesh, batch_size = trainer.task, trainer.mesh, trainer.evaluation_batch_size
    sums, counts, terms = NO_SUMS, NO_SUMS, (*task.evaluated, *loader.terms)
    most = [] if batches is None else [batches * batch_size]
    samples = min(most if loader.length is None else [*most, loader.length])
    with loader:
        for start in range(0, samples, batch_size):
            if start and stops():
                return None
            is_full = start + batch_size <= samples
            for found in (_of_batch if is_full else _of_last)(trainer, loader, start, terms):
                sums, counts = add_sums(sums, found[0]), add_sums(counts, found[1])
    metrics = [LossTerm(name, loss_terms.no_count) for metric in task.metrics for name in (metric, items_of(metric))]
    totals = dict(loss_terms.total_sums((*terms, *metrics), sums, mesh))
    total_counts = dict(loss_terms.total_counts(terms, counts, mesh))
    total_counts |= {metric: totals.pop(items_of(metric)) for metric in task.metrics}
    return totals, total_counts


def _added(totals: Sequence[Totals]) -> dict[str, float]:
    """Return the sums of totals by name. Some may lack a name, of what they have nothing of."""
    names = dict.fromkeys(name for each in totals for name in each)
    return {name: sum(each.get(name, 0.0) for each in totals) for name in names}


def _of_batch(
    trainer: Trainer, loader: Loader[Any], start: int, terms: Sequence[LossTerm]
) -> Iterator[tuple[TermSums, TermSums]]:
    """Yield this rank's sums and counts of a batch."""
    deal = trainer.deal(trainer.evaluation_batch_size)
    micro_batches = loader.micro_batches(start, deal)
    sums = trainer.engine.run(trainer.schedules.evaluation(deal.slots), micro_batches)
    yield sums, loss_terms.counted(terms, micro_batches, trainer.mesh.device)


def _of_last(
    trainer: Trainer, loader: Loader[Any], start: int, terms: Sequence[LossTerm]
) -> Iterator[tuple[TermSums, TermSums]]:
    """Yield this rank's sums and counts of the samples from `start` on, which do not fill a batch."""
    trainer.schedules.prove(evaluation=[1], mesh=trainer.mesh)
    device = trainer.mesh.device
    for micro_batch, stages, is_counted in trainer.task.last_micro_batches(loader, start):
        engine = PipelineEngine(trainer.chunks, stages, trainer.engine.rank, trainer.engine.links, device)
        engine.rounded = trainer.engine.rounded
        sums = engine.run(trainer.schedules.evaluation(1), [micro_batch])
        if is_counted:  # all ranks run it, since they communicate
            yield sums, loss_terms.counted(terms, [micro_batch], device)
