"""What modules of a stage do together with other ranks, beside what its tensor-parallel ranks always do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import nn


class Inside(NamedTuple):
    """What copies of a pipeline do together inside an action: its name and that of its group."""

    name: str
    group: str
    """By the axes of the mesh, as "dp x cp" or "ep": by them each rank finds those with whom it does it."""


def inside_forward(modules: Iterable[nn.Module]) -> list[Inside]:
    """What they do in forward, one after the other: each, and each part of it, has it in order as `inside`, if any.

    In backward they do the same the other way round.
    """
    return [each for module in modules for part in module.modules() for each in getattr(part, "inside", ())]
