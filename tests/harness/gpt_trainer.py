"""Trainer of a GPT without the run around it."""

from __future__ import annotations

from megalite.config import RunConfig
from megalite.parallel.mesh import ParallelMesh
from megalite.run.run import make_trainer
from megalite.storage import AnyPath
from megalite.tasks.gpt_task import GPTTask
from megalite.training.data import RunData
from megalite.training.trainer import Trainer


def gpt_trainer(config: RunConfig, data: RunData, mesh: ParallelMesh, directory: AnyPath | None = None) -> Trainer:
    """Return the trainer of a run that pre-trains a GPT."""
    return make_trainer(config, GPTTask(config, data, mesh), mesh, directory)
