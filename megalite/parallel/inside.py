"""Collectives that a stage's modules run inside an action of the schedule, other than over tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import nn


class Inside(NamedTuple):
    """A collective inside an action, among ranks of several pipelines.

    Attributes:
        group: its group, as axes of the mesh, such as "dp x cp" or "ep".
    """

    name: str
    group: str


def inside_forward(modules: Iterable[nn.Module]) -> list[Inside]:
    """List the collectives of modules in the order of forward; backward runs them in reverse order.

    A submodule that communicates lists its collectives in an attribute `inside`.
    """
    return [each for module in modules for part in module.modules() for each in getattr(part, "inside", ())]
