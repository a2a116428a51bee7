"""Weights of a network whose parameters are sharded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megalite.optim.optimizer import Optimizer


@contextmanager
def unsharded_parameters(optimizer: Optimizer) -> Iterator[None]:
    """Gather all parameters within the block, to read weights outside a forward pass."""
    optimizer.finish_parameter_gather()
    for bucket in optimizer.buckets:
        if bucket.zero_stage == 3:
            bucket.begin_parameter_gather()
    optimizer.finish_parameter_gather()
    try:
        yield
    finally:
        for bucket in optimizer.buckets:
            bucket.free_parameters()
