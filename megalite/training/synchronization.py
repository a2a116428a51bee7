"""Parts of a run that communicate less between data-parallel ranks; those that are not asked for are not imported."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from megalite.config.run import TaskConfig
from megalite.optim.optimizer import Optimizer
from megalite.optim.reduction import Reduction, ReductionOf
from megalite.parallel.mesh import ParallelMesh

if TYPE_CHECKING:
    from megalite.synchronization.local_update import LocalUpdate


def replica_mesh(config: TaskConfig, mesh: ParallelMesh) -> ParallelMesh:
    """Return the mesh of the ranks that have the same weights: of this rank's replica, or of all ranks."""
    replicas = config.synchronization.replicas(mesh.size("dp"))
    return mesh.replica(replicas) if replicas > 1 else mesh


def reduction_of(config: TaskConfig, mesh: ParallelMesh) -> ReductionOf:
    """Return how gradients are summed. `mesh`: that of this rank's replica."""
    chosen = config.synchronization
    if chosen.has_replicas and chosen.local_update_warmup_iters:
        from megalite.synchronization.warmup import WarmupReduction

        return partial(WarmupReduction, mesh.counterparts)
    return Reduction


def make_local_update(config: TaskConfig, optimizer: Optimizer) -> LocalUpdate | None:
    """Return the exchange of the replicas' weights, if replicas have weights of their own."""
    if not config.synchronization.has_replicas:
        return None
    from megalite.synchronization.local_update import LocalUpdate

    mesh = optimizer.mesh
    return LocalUpdate(config.synchronization, optimizer.shards, mesh.counterparts, mesh.device)
