"""The synchronization that the flags of a run ask for, if it is not plain data parallelism."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from megalite.config.optimizer import OptimizerConfig
from megalite.config.run import TaskConfig
from megalite.errors import ConfigurationError
from megalite.extras.synchronization import states
from megalite.extras.synchronization.all_reduce import RingReduction, TreeReduction
from megalite.extras.synchronization.late_ranks import LateRanksTrainer, OrderedReduction
from megalite.extras.synchronization.local_update import LocalUpdate
from megalite.extras.synchronization.local_update_trainer import LocalUpdateTrainer
from megalite.extras.synchronization.onebit_adam import OneBitAdam
from megalite.extras.synchronization.parameter_server_trainers import (
    ServerLoop,
    ServerTrainer,
    WorkerLoop,
    WorkerTrainer,
)
from megalite.extras.synchronization.part_mesh import PartMesh
from megalite.extras.synchronization.reductions import compressed_reduction, sums_over_replicas
from megalite.extras.synchronization.warmup import WarmupReduction
from megalite.optim.buckets import DataParallel
from megalite.optim.layout import BucketLayout
from megalite.optim.reduction import Reduction, ReductionOf
from megalite.optim.replica import Replica
from megalite.optim.shard import Shard
from megalite.optim.synchronization import ExtraState, RankStates
from megalite.optim.update_rule import UpdateRule
from megalite.parallel.mesh import ParallelMesh
from megalite.process.output import in_words
from megalite.run.run import RunSynchronization


def synchronization(config: TaskConfig, mesh: ParallelMesh) -> RunSynchronization:
    """Return how the ranks of this mesh, all of a run, bring together what they learn. Called by all ranks together."""
    chosen = config.synchronization
    if chosen.leaves_out:
        return LateRanks(config, mesh)
    return (ParameterServers if chosen.has_servers else LessCommunication)(config, mesh)


class LessCommunication(RunSynchronization):
    """Data parallelism that communicates less in a step, or not in each step.

    Replicas exchange their weights between counterparts: the ranks at one position in each of them.
    """

    def __init__(self, config: TaskConfig, mesh: ParallelMesh) -> None:
        super().__init__(mesh)
        self._chosen, self._optimizer = config.synchronization, config.optimizer
        self.bucket_states = tuple(states.bucket_states(self._chosen, config.parallel.zero_stage))
        if self._chosen.has_replicas:
            self.trainer = LocalUpdateTrainer
            self.replicas = self._chosen.replicas(mesh.size("dp"))
            self.replica_mesh = mesh.replica(self.replicas)
            at, size = self.replica_mesh.coordinate("dp"), self.replica_mesh.size("dp")
            self._counterparts = mesh.group_of(mesh.ranks("dp")[at::size])

    def options(self, plain: DataParallel) -> DataParallel:
        """Return the options of data parallelism, with the reduction of the gradients."""
        reduction, fragments = self._reduction(plain.gradient_dtype), self._chosen.local_update_fragments
        return replace(plain, reduction=reduction, fragments=fragments)

    def _reduction(self, dtype: torch.dtype) -> ReductionOf:
        """Return how gradients are summed. `dtype`: that of the sums."""
        chosen = self._chosen
        if chosen.all_reduce_algorithm in ("ring", "tree"):
            return RingReduction if chosen.all_reduce_algorithm == "ring" else TreeReduction
        if chosen.has_replicas and chosen.local_update_warmup_iters > 0:
            return partial(WarmupReduction, self._counterparts)
        if chosen.compression_within == "none" and (chosen.has_replicas or not chosen.compresses):
            return Reduction
        momentum, beta1 = self._optimizer.sgd_momentum, self._optimizer.adam_beta1
        return compressed_reduction(chosen, dtype, momentum=momentum, beta1=beta1)

    def hyperparameters(self, plain: OptimizerConfig) -> OptimizerConfig:
        """Return the options of the update rule. dgc applies momentum to each rank's own gradients instead."""
        return replace(plain, sgd_momentum=0.0) if "dgc" in self._chosen.gradient_compression else plain

    def rules(self, plain: list[UpdateRule], shards: Sequence[Shard]) -> list[UpdateRule]:
        """Return the update rules of an optimizer, or the one of the compression if it has one."""
        if self._chosen.compression_within != "onebit-adam":
            return plain
        (adam,) = plain
        return [OneBitAdam(adam, shards, self._optimizer, self._chosen.compression_warmup_iters)]

    def extra_state(self, shards: Sequence[Shard]) -> ExtraState:
        """Return what an optimizer keeps for its reductions, and its exchange with other replicas."""
        chosen = self._chosen
        if not (chosen.compresses or chosen.has_replicas):
            return ExtraState()
        exchange, replica = None, None
        if chosen.has_replicas:
            others = self._counterparts
            sums = sums_over_replicas(chosen, shards, others)
            exchange = LocalUpdate(chosen, shards, others, self.replica_mesh.device, sums)
            replica = Replica(others.rank, others.size, "average")
        buckets = [shard.bucket for shard in shards]
        kept = states.find_bucket_states(self.bucket_states, buckets, exchange)
        return ExtraState(kept, states.find_rank_states(buckets, exchange), replica, exchange)

    def rank_states(self, layouts: Sequence[BucketLayout]) -> RankStates:
        """Return the private state of a rank whose trained buckets have these layouts."""
        return states.rank_states(self._chosen, layouts)

    def description(self, state_bytes: int) -> str:
        """Return in words how ranks communicate less; empty if they do not. `state_bytes`: size of the extra state."""
        chosen, within, between = self._chosen, self._chosen.compression_within, self._chosen.compression_between
        local = f"{self.replicas} replicas, {chosen.local_update} every {chosen.local_update_period} steps"
        parts = [
            f"gradients in {within}" if within != "none" else "",
            local if self.replicas > 1 else "",
            f"{chosen.sites} sites" if chosen.sites > 1 else "",
            f"{between} between them" if between != "none" else "",
        ]
        if not any(parts):
            return ""
        return ", ".join(filter(None, parts)) + (f"; {in_words(state_bytes)} of state a rank" if state_bytes else "")


class LateRanks(RunSynchronization):
    """Plain data parallelism in which late ranks leave out what is left of a step."""

    trainer = LateRanksTrainer

    def __init__(self, config: TaskConfig, mesh: ParallelMesh) -> None:
        super().__init__(mesh)
        self._after = config.synchronization.drop_stragglers_after

    def options(self, plain: DataParallel) -> DataParallel:
        """Return the options of data parallelism, with reductions that know their order."""
        return replace(plain, reduction=partial(OrderedReduction, itertools.count(1)))

    def description(self, state_bytes: int) -> str:
        """Return in words from when on a rank is late."""
        return f"late ranks leave out micro-batches, {self._after:g} median steps after the first one"


class ParameterServers(RunSynchronization):
    """Workers that compute gradients, each with all weights, and servers that share out weights and state."""

    def __init__(self, config: TaskConfig, mesh: ParallelMesh) -> None:
        """Divide the ranks. Raises ConfigurationError if there is no run, or its ranks cannot send to each other."""
        if not mesh.is_connected:
            raise ConfigurationError("--asynchronous parameter-server needs a run, not --dry-run or --as-rank")
        if mesh.device.type == "cuda" and dist.get_backend() != "gloo":
            raise ConfigurationError(
                "--asynchronous parameter-server: messages go through host memory: give --distributed-backend gloo"
            )
        servers = config.synchronization.num_servers
        workers = mesh.world_size - servers
        if mesh.rank < workers:
            super().__init__(PartMesh(mesh, 0, workers))
            self.replica_mesh = self.mesh.replica(workers)
            self.trainer, self.loop = WorkerTrainer, WorkerLoop
        else:
            super().__init__(PartMesh(mesh, workers, servers))
            self.trainer, self.loop = ServerTrainer, ServerLoop
