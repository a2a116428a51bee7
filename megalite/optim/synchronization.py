"""The seam at which data-parallel ranks may bring together in another way what they learn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from megalite.config.optimizer import OptimizerConfig
from megalite.optim.buckets import DataParallel
from megalite.optim.layout import BucketLayout
from megalite.optim.replica import BucketState, Replica
from megalite.optim.shard import Shard
from megalite.optim.update_rule import UpdateRule
from megalite.parallel.mesh import ParallelMesh

RankStates = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shapes and dtypes of a rank's private state, by name."""


class ReplicaExchange(Protocol):
    """Exchange of weights between replicas that otherwise update their own."""

    def agreed(self, is_finite: bool) -> bool:
        """Return True if the gradients of all replicas are finite. Otherwise all of them skip the step."""

    def advance(self) -> bool:
        """Exchange what is due after the update of a step, or after a skipped one; True if weights have changed."""


@dataclass(frozen=True)
class ExtraState:
    """State of an optimizer beside that of its update rules."""

    bucket_states: dict[BucketState, Sequence[Sequence[Tensor]]] = field(default_factory=dict)
    """Extra state: for each bucket, one flat tensor per part (see `bucket_parts`)."""
    rank_states: dict[str, Tensor] = field(default_factory=dict)
    """State that differs between stages and tensor-parallel ranks and is equal over data-parallel ranks; saved by the
    first of these; kept unchanged if the checkpoint has none that fits."""
    replica: Replica | None = None
    """This rank's replica, if each replica has weights and state of its own."""
    exchange: ReplicaExchange | None = None
    """Exchange with other replicas, which have optimizers of their own; None: all ranks have the same weights."""


class Synchronization:
    """Plain data parallelism: in each step the backend sums all gradients.

    Who builds a run asks it once for each part. Subclasses, in `megalite/extras/synchronization`, communicate less.

    Attributes:
        mesh: the mesh of the ranks that run each step together, and add up its counts and sums.
        replica_mesh: the mesh of the ranks that have the same weights: all of them, unless replicas update their own.
        replicas: the number of blocks of data-parallel ranks whose weights and state a checkpoint has apart.
        bucket_states: the kinds of extra state with one number per element of a bucket.
    """

    replicas: int = 1
    bucket_states: Sequence[BucketState] = ()

    def __init__(self, mesh: ParallelMesh) -> None:
        self.mesh = self.replica_mesh = mesh

    def options(self, plain: DataParallel) -> DataParallel:
        """Return the options of data parallelism, with the reduction of the gradients."""
        return plain

    def hyperparameters(self, plain: OptimizerConfig) -> OptimizerConfig:
        """Return the options of the update rule."""
        return plain

    def rules(self, plain: list[UpdateRule], shards: Sequence[Shard]) -> list[UpdateRule]:
        """Return the update rules of an optimizer."""
        return plain

    def extra_state(self, shards: Sequence[Shard]) -> ExtraState:
        """Return what an optimizer has beside its update rules. Called by all ranks together."""
        return ExtraState()

    def rank_states(self, layouts: Sequence[BucketLayout]) -> RankStates:
        """Return the private state of a rank whose trained buckets have these layouts."""
        return {}

    def description(self, state_bytes: int) -> str:
        """Return in words how ranks communicate less; empty if they do not. `state_bytes`: size of the extra state."""
        return ""
