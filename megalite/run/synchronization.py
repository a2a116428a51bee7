"""Synchronization of a run: with the trainer and the loop that go with it. What no flag asks for is not imported."""

from __future__ import annotations

from megalite.config.run import TaskConfig
from megalite.entry_points import entry_point
from megalite.optim.synchronization import Synchronization
from megalite.parallel.mesh import ParallelMesh
from megalite.run.loop import TrainingLoop
from megalite.storage import AnyPath
from megalite.training.task import Task
from megalite.training.trainer import Trainer


class RunSynchronization(Synchronization):
    """Synchronization of a run.

    Attributes:
        trainer: the trainer of this rank.
        loop: the loop that runs it.
    """

    trainer: type[Trainer] = Trainer
    loop: type[TrainingLoop] = TrainingLoop


def make_synchronization(config: TaskConfig, mesh: ParallelMesh) -> RunSynchronization:
    """Return how the ranks of this mesh, all of a run, bring together what they learn. Called by all ranks together."""
    if config.synchronization.is_plain:
        return RunSynchronization(mesh)
    found: RunSynchronization = entry_point("synchronization")(config, mesh)
    return found


def make_trainer(config: TaskConfig, task: Task, mesh: ParallelMesh, directory: AnyPath | None = None) -> Trainer:
    """Return the trainer of a rank without a run around it. Called by all ranks together."""
    synchronization = make_synchronization(config, mesh)
    return synchronization.trainer(config, task, synchronization, directory)
