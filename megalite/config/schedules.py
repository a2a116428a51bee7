"""The schedules of a pipeline by name, and on which each runs; their orders are in megalite/pipeline/schedules.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

ScheduleName = Literal["gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v"]


@dataclass(frozen=True)
class Shape:
    """The way a schedule's stages lie on the ranks."""

    chunks: int | None = 1
    """Stages of a rank; None: two or more."""
    v_shaped: bool = False
    """Every other round of stages goes back over the ranks."""


SHAPES: Mapping[str, Shape] = {
    "gpipe": Shape(),
    "1f1b": Shape(),
    "interleaved-1f1b": Shape(chunks=None),
    "zb-h1": Shape(),
    "zb-v": Shape(chunks=2, v_shaped=True),
}
