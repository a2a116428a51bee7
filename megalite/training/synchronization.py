"""Parts of a run that communicate less between data-parallel ranks; those that are not asked for are not imported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from megalite.checkpoint.plan import RankStates
from megalite.config.optimizer import OptimizerConfig
from megalite.config.run import TaskConfig
from megalite.config.synchronization import SynchronizationConfig
from megalite.errors import ConfigurationError
from megalite.optim.layout import BucketLayout
from megalite.optim.optimizer import Optimizer
from megalite.optim.reduction import Reduction, ReductionOf
from megalite.optim.replica import BucketState, Replica
from megalite.parallel.mesh import ParallelMesh, PartMesh
from megalite.training.memory import in_words

if TYPE_CHECKING:
    from megalite.synchronization.local_update import LocalUpdate


def part_mesh(config: TaskConfig, mesh: ParallelMesh) -> ParallelMesh:
    """Return the mesh of the ranks with the same role: of all ranks, or of the workers or the servers."""
    if not config.synchronization.has_servers:
        return mesh
    servers = config.synchronization.num_servers
    workers = mesh.world_size - servers
    return PartMesh(mesh, 0, workers) if mesh.rank < workers else PartMesh(mesh, workers, servers)


def exchange_notes(chosen: SynchronizationConfig, steps: int) -> tuple[str, ...]:
    """Return a note if replicas learn something after the last exchange of a run, which no model has then.

    `steps`: the number of steps of the run.
    """
    if not chosen.has_replicas:
        return ()
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


def replica_mesh(config: TaskConfig, mesh: ParallelMesh) -> ParallelMesh:
    """Return the mesh of the ranks that have the same weights: of this rank's replica, or of all ranks.

    Raises ConfigurationError if parameter servers were to be a part of something else than a run.
    """
    if config.synchronization.has_servers:
        if not isinstance(mesh, PartMesh):
            raise ConfigurationError("--asynchronous parameter-server needs a run, not --dry-run or --as-rank")
        return mesh.replica(mesh.world_size)
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
    if chosen.has_replicas and chosen.local_update_warmup_iters > 0:
        from megalite.synchronization.warmup import WarmupReduction

        return partial(WarmupReduction, mesh.counterparts)
    if chosen.compression_within == "none" and (chosen.has_replicas or not chosen.compresses):
        return Reduction
    from megalite.synchronization.reductions import compressed_reduction

    momentum, beta1 = config.optimizer.sgd_momentum, config.optimizer.adam_beta1
    return compressed_reduction(chosen, dtype, momentum=momentum, beta1=beta1)


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


def register_states(config: TaskConfig, optimizer: Optimizer, exchange: LocalUpdate | None) -> None:
    """Register extra state at the optimizer, so that checkpoints have it."""
    chosen, mesh = config.synchronization, optimizer.mesh
    if not (chosen.compresses or chosen.has_replicas):
        return
    from megalite.synchronization import states

    kinds = states.bucket_states(chosen, config.parallel.zero_stage)
    optimizer.bucket_states.update(states.find_bucket_states(kinds, optimizer.buckets, exchange))
    optimizer.rank_states.update(states.find_rank_states(optimizer.buckets, exchange))
    if chosen.has_replicas:
        others = mesh.counterparts
        optimizer.replica = Replica(others.rank, others.size, "average")


@dataclass(frozen=True)
class PlannedStates:
    """Extra state of the optimizer, as a checkpoint's plan gets it."""

    bucket_states: Sequence[BucketState] = ()
    rank_states: Callable[[Sequence[BucketLayout]], RankStates] = lambda layouts: {}
    replicas: int = 1


def planned_states(config: TaskConfig, mesh: ParallelMesh) -> PlannedStates:
    """Return what `register_states` registers, of any rank. `mesh`: that of all ranks."""
    chosen = config.synchronization
    if not (chosen.compresses or chosen.has_replicas):
        return PlannedStates()
    from megalite.synchronization import states

    kinds = tuple(states.bucket_states(chosen, config.parallel.zero_stage))
    return PlannedStates(kinds, partial(states.rank_states, chosen), chosen.replicas(mesh.size("dp")))


def synchronization_line(config: TaskConfig, optimizer: Optimizer) -> str | None:
    """Return in words how data-parallel ranks communicate less, and what a rank keeps for it; None if they do not."""
    chosen = config.synchronization
    within, between = chosen.compression_within, chosen.compression_between
    replicas = optimizer.mesh.counterparts.size if chosen.has_replicas else 1
    parts = [
        f"gradients in {within}" if within != "none" else "",
        f"{replicas} replicas, {chosen.local_update} every {chosen.local_update_period} steps" if replicas > 1 else "",
        f"{chosen.sites} sites" if chosen.sites > 1 else "",
        f"{between} between them" if between != "none" else "",
    ]
    if not any(parts):
        return None
    flats = [flat for buckets in optimizer.bucket_states.values() for bucket in buckets for flat in bucket]
    kept = sum(values.nbytes for values in (*flats, *optimizer.rank_states.values()))
    return ", ".join(filter(None, parts)) + (f"; {in_words(kept)} of state a rank" if kept else "")
