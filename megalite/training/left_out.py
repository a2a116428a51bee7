"""Samples that a run passes over, as its checkpoints keep them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalite.config.run import fits
from megalite.data.sampler import Ranges
from megalite.errors import CheckpointError
from megalite.storage import AnyPath

LEFT_OUT = "left_out_samples"
"""Section of a checkpoint's configuration that has them."""


def left_out_of(path: AnyPath, saved: Mapping[str, Any]) -> Ranges:
    """Return them, from the configuration of a checkpoint. Raises CheckpointError if they are not ascending ranges."""
    found: Any = saved.get(LEFT_OUT, {}).get("ranges", [])
    if fits(found, tuple[tuple[int, int], ...]):
        bounds = [-1, *(bound for first, last in found for bound in (first, last + 1))]
        if bounds == sorted(set(bounds)):
            return [(first, last) for first, last in found]
    raise CheckpointError(f"{path}: {LEFT_OUT} are not ascending ranges of samples: resume from another checkpoint")
