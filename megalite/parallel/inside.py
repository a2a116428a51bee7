"""Collectives that modules of a stage run inside a schedule action, except those over tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import nn


class Inside(NamedTuple):
    """A collective inside an action, over ranks of several pipelines.

    Attributes:
        group: the axes of its group, for example "dp x cp" or "ep".
        backward: number of collectives that its backward runs.
    """

    name: str
    group: str
    backward: int = 1


def inside_forward(modules: Iterable[nn.Module]) -> list[Inside]:
    """List the modules' collectives in the order of forward. Backward runs those with a gradient in reverse order.

    A submodule that communicates lists its collectives in an attribute `inside`.
    """
    return [each for module in modules for part in module.modules() for each in getattr(part, "inside", ())]
