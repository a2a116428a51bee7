"""Weights of a network whose parameters are sharded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megalite.optim.optimizer import Optimizer
from megalite.parallel import collectives


@contextmanager
def unsharded_parameters(optimizer: Optimizer) -> Iterator[None]:
    """Gather the values of all parameters within the block, to read weights outside a forward pass."""
    coded = [bucket for bucket in (*optimizer.buckets, *optimizer.frozen) if bucket.codes is not None]
    kept = [(slot.parameter, slot.parameter.data) for bucket in coded for slot in bucket.slots]
    with optimizer.gathered_parameters():
        for bucket in coded:
            values = collectives.all_gather(bucket.parameter_shard, bucket.shard_group)
            for slot in bucket.slots:
                slot.parameter.data = values[slot.start : slot.stop].view(slot.parameter.shape)
        yield
    for parameter, data in kept:
        parameter.data = data
