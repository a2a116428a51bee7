"""Extra state that a checkpoint has: which there is, as a function of the flags, and where it is.

Residuals are what is left of gradients, so they are summed when the number of ranks changes. What each replica has of
its own, weights, moments (`Optimizer.replica`) and the residual of its sum, is averaged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from megalite.config.synchronization import SynchronizationConfig
from megalite.extras.synchronization import power
from megalite.extras.synchronization.compressed import CompressedReduction, PackedSum
from megalite.extras.synchronization.local_update import LocalUpdate, kept_names
from megalite.extras.synchronization.low_rank import LowRankReduction
from megalite.optim.buckets import Bucket
from megalite.optim.layout import BucketLayout
from megalite.optim.replica import BucketState

_OF_GRADIENTS = BucketState("residual", "sum", whole=True, per_use=True, among="shards")
_VELOCITY = BucketState("velocity", "sum", whole=True, per_use=True, among="shards")
_OF_SUM = BucketState("residual_of_sum", None, whole=False, among="shards")
_OF_SUM_IN_REPLICA = BucketState("residual_of_sum", "average", whole=False, among="shards")
_OF_SITES = BucketState("residual_of_sites", "sum", whole=False, per_use=True, among="instances")
_OF_REPLICAS = BucketState("residual_of_replicas", "sum", whole=False)
_PACKERS = {_OF_GRADIENTS: ("gradients", "residual"), _VELOCITY: ("gradients", "velocity")} | {
    _OF_SUM: ("sum", "residual"),
    _OF_SUM_IN_REPLICA: ("sum", "residual"),
    _OF_SITES: ("sites", "residual"),
}
"""Packer of a reduction that has a state, and the state's name there."""


def bucket_states(config: SynchronizationConfig, zero_stage: int) -> Iterator[BucketState]:
    """Yield the kinds of state that a run has."""
    within, between = config.compression_within, config.compression_between
    if config.error_feedback and within != "none":
        yield _OF_GRADIENTS
        if within == "dgc":
            yield _VELOCITY
        if zero_stage == 0 and within != "powersgd":
            yield _OF_SUM_IN_REPLICA if config.has_replicas else _OF_SUM
    if config.has_replicas:
        yield from (BucketState(name, None, whole=False) for name in kept_names(config))
    if config.error_feedback and between != "none":
        yield _OF_REPLICAS if config.has_replicas else _OF_SITES


def find_bucket_states(
    states: Iterable[BucketState], buckets: Sequence[Bucket], exchange: LocalUpdate | None
) -> dict[BucketState, Sequence[Sequence[Tensor]]]:
    """Return the tensors of each kind of state, by bucket."""
    return {
        state: [_of_bucket(state, number, bucket, exchange) for number, bucket in enumerate(buckets)]
        for state in states
    }


def _of_bucket(state: BucketState, number: int, bucket: Bucket, exchange: LocalUpdate | None) -> list[Tensor]:
    """Return the tensors of a state that a bucket has: one for each use of its parameters, or one, or none."""
    if exchange is not None and state.name in exchange.state:
        return [exchange.state[state.name][number]]
    if exchange is not None and state == _OF_REPLICAS:
        packed = exchange.sums[number]
        return [packed.packer.state["residual"]] if isinstance(packed, PackedSum) else []
    found: list[Tensor] = []
    packer, name = _PACKERS[state]
    for reduction in (accumulator.reduction for accumulator in bucket.accumulators):
        if isinstance(reduction, LowRankReduction):
            found += reduction.state.values()
        elif isinstance(reduction, CompressedReduction) and packer in reduction.packers:
            found += [reduction.packers[packer].state[name]]
    return found if state.per_use else found[:1]


def rank_states(
    config: SynchronizationConfig, layouts: Sequence[BucketLayout]
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return the shapes and dtypes of state that only data-parallel peers share, by name.

    `layouts`: those of the trained buckets of a rank.
    """
    found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    if config.compression_within == "powersgd":
        for number, layout in enumerate(layouts):
            first = layout.slots[0].parameter
            matrices = power.matrices_of(layout, config.compression_rank)
            elements = sum(each.count * each.columns for each in matrices) * config.compression_rank
            dtype = torch.promote_types(first.dtype, torch.float32)
            for use in range(len({use.chunk for use in first.sharding.uses})) if elements else ():
                found[f"powersgd_q/{number}.{use}"] = ((elements,), dtype)
    if config.local_update == "fedavg":
        found["fedavg_tokens"] = ((1,), torch.float64)
    return found


def find_rank_states(buckets: Sequence[Bucket], exchange: LocalUpdate | None) -> dict[str, Tensor]:
    """Return the tensors that `rank_states` describes."""
    found = {
        f"powersgd_q/{number}.{use}": accumulator.reduction.factor
        for number, bucket in enumerate(buckets)
        for use, accumulator in enumerate(bucket.accumulators)
        if isinstance(accumulator.reduction, LowRankReduction) and len(accumulator.reduction.factor)
    }
    if exchange is not None and exchange.config.local_update == "fedavg":
        found["fedavg_tokens"] = exchange.tokens
    return found
