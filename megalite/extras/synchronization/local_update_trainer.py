"""Trainer of a run whose replicas update their own weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megalite.checkpoint import Manifest, TrainingState
from megalite.config.synchronization import SynchronizationConfig
from megalite.conversion.opened import OpenedModel
from megalite.extras.synchronization.local_update import EXCHANGED, LocalUpdate
from megalite.optim.replica import ANCHOR
from megalite.parallel.stage import LossTerm, TermSums
from megalite.storage import AnyPath
from megalite.training import loss_terms
from megalite.training.loss_terms import Totals
from megalite.training.resume import ResumePoint
from megalite.training.trainer import Trainer


class LocalUpdateTrainer(Trainer):
    """Trainer of one of several replicas, which exchange their weights once in a while."""

    @property
    def exchange(self) -> LocalUpdate:
        """The exchange of the replicas' weights."""
        exchange = self.optimizer.exchange
        assert isinstance(exchange, LocalUpdate)
        return exchange

    def _counts(self, terms: Sequence[LossTerm], own: TermSums) -> tuple[Totals, Totals]:
        """Return the counts over the global batch, and those by which gradients are divided: the replica's, but in the
        first steps of plain data parallelism.
        """
        counts, _ = super()._counts(terms, own)
        of_replica = loss_terms.total_counts(terms, own, self.optimizer.mesh)
        self.exchange.begin_step(self.iteration, of_replica[terms[0].name])
        return counts, of_replica if self.exchange.is_local else counts

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Let the network evaluate within the block, with the weights after the last exchange."""
        with super().evaluating(), self.exchange.with_anchor():
            yield

    def progress(self) -> tuple[TrainingState, dict[str, Any]]:
        """Return the progress for a checkpoint, after the exchanges that are under way."""
        self.exchange.before_save()
        return super().progress()

    def load(self, path: AnyPath, described: Manifest, resume_point: ResumePoint) -> None:
        """Continue from a checkpoint, which may be of a run without replicas."""
        self.exchange.before_load()
        super().load(path, described, resume_point)
        names = described.tensors if resume_point.optimizer else ()
        anchor, exchanged = (any(f"optimizer/{name}/" in each for each in names) for name in (ANCHOR, EXCHANGED))
        at = self.iteration if resume_point.position else 0
        self.exchange.after_load(at, has_anchor=anchor, has_exchanged=exchanged)

    def load_model(self, opened: OpenedModel) -> None:
        """Start from the weights of a model that another program has written."""
        super().load_model(opened)
        self.exchange.begin()

    def notes(self) -> tuple[str, ...]:
        """Return the messages of any trainer, and one on what the replicas learn in vain."""
        return (*super().notes(), *exchange_notes(self.config.synchronization, self.iterations))


def exchange_notes(chosen: SynchronizationConfig, steps: int) -> tuple[str, ...]:
    """Return a note if replicas learn something after the last exchange of a run, which no model has then.

    `steps`: the number of steps of the run.
    """
    period, fragments, delay = chosen.local_update_period, chosen.local_update_fragments, chosen.local_update_delay
    local = steps - chosen.local_update_warmup_iters
    lost = delay + max((local - delay - fragment * period // fragments) % period for fragment in range(fragments))
    if not lost:
        return ()
    some = " of some fragments" if fragments > 1 else ""
    return (
        f"note: after the last exchange{some} the replicas learn for {lost} {'step' if lost == 1 else 'steps'} more, "
        "which the weights at the end of the run (model/ in checkpoints) are without",
    )
