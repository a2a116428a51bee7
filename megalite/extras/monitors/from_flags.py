"""Monitors that the flags of a run ask for."""

from __future__ import annotations

from collections.abc import Sequence

from megalite.extras.monitors.gradient_sync import GradientSync
from megalite.extras.monitors.memory import MemoryMonitor
from megalite.extras.monitors.performance import PerformanceMonitor
from megalite.extras.monitors.planned import planned
from megalite.run.copies import Copies
from megalite.run.monitor import Monitor
from megalite.training.trainer import Trainer


def monitors(trainer: Trainer, copies: Copies | None) -> Sequence[Monitor]:
    """Return the monitors of a run's steps, and have its gradients checked. Called by all ranks together.

    `copies`: copies in memory of the run, if it has some.
    """
    config, found = trainer.config, list[Monitor]()
    if config.corruption.check_gradient_sync_interval is not None:
        GradientSync(trainer, copies)
    if config.logging.memory_monitor:
        found.append(MemoryMonitor(trainer, trainer.task.counted_memory))
    if config.logging.performance_monitor:
        plan = config.logging.performance_plan
        found.append(PerformanceMonitor(None if plan is None else planned(trainer, plan)))
    return found
