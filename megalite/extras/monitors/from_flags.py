"""Monitors that the flags of a run ask for."""

from __future__ import annotations

from collections.abc import Sequence

from megalite.extras.monitors.memory import MemoryMonitor
from megalite.extras.monitors.performance import PerformanceMonitor
from megalite.extras.monitors.planned import planned
from megalite.run.monitor import Monitor
from megalite.training.trainer import Trainer


def monitors(trainer: Trainer) -> Sequence[Monitor]:
    """Return the monitors of a run's steps. Called by all ranks together."""
    config, found = trainer.config, list[Monitor]()
    if config.logging.memory_monitor:
        found.append(MemoryMonitor(trainer, trainer.task.counted_memory))
    if config.logging.performance_monitor:
        plan = config.logging.performance_plan
        found.append(PerformanceMonitor(None if plan is None else planned(trainer, plan)))
    return found
