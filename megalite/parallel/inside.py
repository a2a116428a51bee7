"""Communication of a stage's modules inside an action, beyond that of its tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import nn


class Inside(NamedTuple):
    """Communication inside an action between copies of a pipeline: its name and that of its group."""

    name: str
    group: str
    """By the axes of the mesh, as "dp x cp" or "ep": by them each rank finds those with whom it does it."""


def inside_forward(modules: Iterable[nn.Module]) -> list[Inside]:
    """Collect what modules communicate in forward, in order: each submodule that communicates lists it as `inside`.

    In backward they do the same in reverse order.
    """
    return [each for module in modules for part in module.modules() for each in getattr(part, "inside", ())]
