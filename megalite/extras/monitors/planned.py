"""Step of a run as the planner predicts it, by the names under which a run measures it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megalite.config import RunConfig
from megalite.errors import ConfigurationError
from megalite.extras.planner.cluster import find_cluster
from megalite.extras.planner.plan import Planner
from megalite.parallel.collective_error import raise_on_all_ranks
from megalite.training.trainer import Trainer
from megalite.watchdog.sections import FORWARD_BACKWARD, OPTIMIZER

_PARTS: Mapping[str, tuple[str, ...]] = {
    FORWARD_BACKWARD: ("products", "attention", "elementwise", "launch"),
    OPTIMIZER: ("optimizer", "host"),
    "tp": ("tensor",),
    "cp": ("context",),
    "ep": ("expert",),
    "pp": ("pipeline", "bubble"),
    "dp": ("data",),
}
"""Sections and axes, with the entries of a predicted cost that they have."""


@dataclass(frozen=True)
class Planned:
    """Prediction of a step."""

    seconds: float
    shares: Mapping[str, float]
    """Shares of a step by section and by axis."""


def planned(trainer: Trainer, cluster: str) -> Planned | None:
    """Return the plan of the run on a cluster, on rank 0, and None on the others. Called by all ranks together.

    Raises MegaliteError, on every rank, if there is no such cluster, or no plan of such a run.
    """
    config, mesh = trainer.config, trainer.mesh
    found = find_cluster(cluster, "--performance-plan")
    if not isinstance(config, RunConfig):
        raise ConfigurationError("--performance-plan: plans are of GPTs, and this run trains another network")
    with raise_on_all_ranks(mesh, f"--performance-plan {cluster}: planning the run"):
        if mesh.rank != 0:
            return None
        step = Planner(config, found, mesh.world_size).plan(config).step
    costs = {name: sum(getattr(step.cost, part) for part in parts) for name, parts in _PARTS.items()}
    return Planned(step.seconds, {name: cost / step.seconds for name, cost in costs.items()})
