"""Parts of a run that communicate less between data-parallel ranks; those that are not asked for are not imported."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from megalite.config.optimizer import OptimizerConfig
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


def reduction_of(config: TaskConfig, mesh: ParallelMesh, dtype: torch.dtype) -> ReductionOf:
    """Return how gradients are summed.

    Args:
        config: the configuration of the run.
        mesh: the mesh of this rank's replica.
        dtype: the dtype of the sums.
    """
    chosen = config.synchronization
    if chosen.all_reduce_algorithm in ("ring", "tree"):
        from megalite.synchronization.all_reduce import RingReduction, TreeReduction

        return RingReduction if chosen.all_reduce_algorithm == "ring" else TreeReduction
    warms_up = chosen.has_replicas and chosen.local_update_warmup_iters > 0
    if not (warms_up or chosen.compression_within != "none" or (chosen.compresses and not chosen.has_replicas)):
        return Reduction
    from megalite.synchronization import reductions

    momentum, beta1 = config.optimizer.sgd_momentum, config.optimizer.adam_beta1
    return reductions.reduction_of(chosen, dtype, mesh.counterparts, momentum=momentum, beta1=beta1)


def optimizer_config(config: TaskConfig) -> OptimizerConfig:
    """Return the options of the update rule. With dgc, momentum is applied to each rank's own gradients instead."""
    if "dgc" in config.synchronization.gradient_compression:
        return replace(config.optimizer, sgd_momentum=0.0)
    return config.optimizer


def make_rules_of(config: TaskConfig, optimizer: Optimizer) -> None:
    """Replace the update rule by the one of the compression, if it has one."""
    chosen = config.synchronization
    if chosen.compression_within == "onebit-adam":
        from megalite.synchronization.onebit_adam import OneBitAdam

        (adam,) = optimizer.rules
        warmup = chosen.compression_warmup_iters
        optimizer.rules = [OneBitAdam(adam, optimizer.shards, config.optimizer, warmup)]


def make_local_update(config: TaskConfig, optimizer: Optimizer) -> LocalUpdate | None:
    """Return the exchange of the replicas' weights, if replicas have weights of their own."""
    if not config.synchronization.has_replicas:
        return None
    from megalite.synchronization.local_update import LocalUpdate
    from megalite.synchronization.reductions import sums_over_replicas

    mesh, shards = optimizer.mesh, optimizer.shards
    sums = sums_over_replicas(config.synchronization, shards, mesh.counterparts)
    return LocalUpdate(config.synchronization, shards, mesh.counterparts, mesh.device, sums)
