"""Weights of a network whose parameters are sharded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megalite.optim.optimizer import Optimizer


@contextmanager
def unsharded_parameters(optimizer: Optimizer) -> Iterator[None]:
    """Gather all parameters within the block, to read weights outside a forward pass."""
    with optimizer.gathered_parameters():
        yield
