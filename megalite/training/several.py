"""The trainer of a run with several optimizers, of which a step may update some."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from megalite.checkpoint import Manifest, TrainingState
from megalite.config.run import TaskConfig
from megalite.optim.learning_rate import Rates, RateSchedules, rate_schedules
from megalite.optim.optimizer import StepResult
from megalite.optim.several import SeveralOptimizers, SeveralRates, norm_of
from megalite.optim.synchronization import Synchronization
from megalite.parallel.stage import LossTerm
from megalite.pipeline.engine import StepObserver
from megalite.storage import AnyPath
from megalite.training.gradients import Gradients
from megalite.training.load_report import optimizer_differences
from megalite.training.loss_terms import Totals
from megalite.training.metrics import StepMetrics
from megalite.training.resume import ResumePoint
from megalite.training.task import Task
from megalite.training.trainer import Trainer
from megalite.watchdog.sections import Sections


@dataclass(frozen=True)
class SeveralSchedules(RateSchedules):
    """Schedules of several optimizers, of which the first one's stand for the run's."""

    each: Mapping[str, RateSchedules]
    optimizer: SeveralOptimizers
    batch_size: int
    """Number of samples in a step."""
    steps: dict[str, int]
    """Number of steps of each optimizer, with those that were skipped."""

    def at(self, consumed_samples: int) -> SeveralRates:
        """Return the rates of the optimizers that a step updates, each by the number of its own steps."""
        each = {name: self.each[name].at(self.steps[name] * self.batch_size) for name in self.optimizer.chosen}
        first = next(iter(each.values()))
        return SeveralRates(first.learning_rate, first.token_table_learning_rate, first.weight_decay, each)


class SeveralTrainer(Trainer):
    """Training state of a run with several optimizers.

    Each has a schedule, a number of steps and a loss scale of its own: those of the steps that were to update it. In a
    step of several of them, the loss has the smallest of their scales.
    """

    optimizer: SeveralOptimizers
    rates: SeveralSchedules

    def __init__(
        self,
        config: TaskConfig,
        task: Task,
        synchronization: Synchronization,
        directory: AnyPath | None = None,
        sections: Sections | None = None,
    ) -> None:
        super().__init__(config, task, synchronization, directory, sections)
        size, width = task.batch_size.final, task.hidden_size
        schedules = {
            name: rate_schedules(
                each, config.training, hidden_size=width, global_batch_size=size, factor=task.factors.get(name)
            )
            for name, each in task.optimizers.items()
        }
        first, steps = next(iter(schedules.values())), dict.fromkeys(schedules, 0)
        self.rates = SeveralSchedules(
            first.learning_rate, first.token_tables, first.weight_decay, schedules, self.optimizer, size, steps
        )
        self._scales = dict.fromkeys(schedules, self.loss_scale)

    def step(self, micro_batches: Sequence[Any] | None = None, only: Collection[str] | None = None) -> StepMetrics:
        """Run a step as `Trainer.step` does, and update these optimizers; None: all of them."""
        self.optimizer.choose(self.task.optimizers if only is None else only)
        return super().step(micro_batches)

    def forward_backward(
        self,
        micro_batches: Sequence[Any] | None = None,
        terms: Sequence[LossTerm] | None = None,
        multipliers: Callable[[Totals], Totals] = dict,
        observer: StepObserver | None = None,
    ) -> Gradients:
        """Compute the gradients as `Trainer.forward_backward` does, of the optimizers that are chosen alone."""
        chosen = self.optimizer.chosen
        self.loss_scale = min((self._scales[name] for name in chosen), key=lambda scale: scale.value)
        terms = self.task.terms_of_step(chosen, self.terms if terms is None else terms)
        with self._updating():
            return super().forward_backward(micro_batches, terms, multipliers, observer)

    def update(self, gradients: Gradients, figures: Mapping[str, float] = MappingProxyType({})) -> StepMetrics:
        metrics = super().update(gradients, figures)
        for name in self.optimizer.chosen:
            self.rates.steps[name] += 1
            self._scales[name] = self._scales[name].after(overflow=metrics.skipped)
        return metrics

    def locate_not_finite(self) -> str | None:
        with self._updating():
            return super().locate_not_finite()

    @contextmanager
    def _updating(self) -> Iterator[None]:
        """Differentiate within the block only what the chosen optimizers need."""
        with self.optimizer.differentiated(), self.task.updating(self.optimizer.chosen):
            yield

    def _statistics(self, others: Totals, update: StepResult, rates: Rates) -> dict[str, float]:
        assert isinstance(rates, SeveralRates)
        figures = {f"learning_rate/{name}": each.learning_rate for name, each in rates.each.items()}
        norms = {f"grad_norm/{name}": norm_of(update, name) for name in rates.each}
        return {**super()._statistics(others, update, rates), **figures, **norms}

    # ------------------------------------------------------------------------------------------------ save and load

    def steps_of(self, optimizer: str) -> int:
        return self.rates.steps[optimizer]

    def _training_state(self) -> TrainingState:
        dynamic = self.loss_scale.window is not None
        of_each = {
            name: {
                "steps": self.rates.steps[name],
                "updates": self.optimizer.updates[name],
                "loss_scale": scale.state() if dynamic else None,
            }
            for name, scale in self._scales.items()
        }
        return replace(super()._training_state(), optimizers=of_each)

    def load(self, path: AnyPath, described: Manifest, resume_point: ResumePoint) -> None:
        super().load(path, described, resume_point)
        for name, saved in (described.training.optimizers or {}).items():
            if name in self._scales and resume_point.position:
                self.rates.steps[name] = saved["steps"]
            if resume_point.optimizer:  # the names are the same
                self.optimizer.updates[name] = saved["updates"]
                if saved["loss_scale"] is not None and self.loss_scale.window is not None:
                    self._scales[name] = self._scales[name].restored(saved["loss_scale"])

    def _optimizer_notes(self, path: AnyPath, saved: Mapping[str, Any], samples: int) -> tuple[str, ...]:
        theirs = saved.get("optimizers", {})
        return tuple(
            line
            for name, config in self.task.optimizers.items()
            for line in optimizer_differences(name, theirs.get(name, {}), config)
        )
