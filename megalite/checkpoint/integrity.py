"""Damage: errors for files whose contents are not as they were written, and a check that boxes cover a tensor once."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence
from itertools import combinations
from operator import add, sub

from megalite.errors import CheckpointError, CorruptCheckpointError
from megalite.parallel.sharding import Box
from megalite.storage import AnyPath

_MOST_CUTS, _MOST_INTERLOCKED = 32, 32
"""Limits on the depth of nested straight cuts, and on the number of boxes that no straight cut separates.

A few cuts separate all boxes of megalite's own checkpoints.
"""


class CorruptFileError(CorruptCheckpointError):
    """Damaged file of a checkpoint, or damaged tensor in it."""

    def __init__(self, path: AnyPath, problem: str, tensor: str | None = None) -> None:
        advice = "Load another checkpoint; megalite-inspect-checkpoint --verify lists all that is damaged"
        super().__init__(f"{path}: {problem}. {advice}")
        self.file, self.problem, self.tensor = path.name, problem, tensor


def unreadable(path: AnyPath, error: OSError) -> CheckpointError:
    """Return the error to raise after the operating system failed to read a file.

    Lost or missing data is damage. Any other failure, such as a missing permission, may be temporary.
    """
    if error.errno == errno.ENOENT:
        return CorruptFileError(path, "it is missing")
    problem = f"it cannot be read: {error.strerror or error}"
    if error.errno in (errno.EIO, errno.ENOTDIR, errno.EISDIR, errno.ENODATA):
        return CorruptFileError(path, problem)
    return CheckpointError(f"{path}: {problem}. Load another checkpoint")


def check_size(path: AnyPath, found: int, size: int) -> None:
    """Raise CorruptFileError if a file does not have the expected size."""
    if found != size:
        raise CorruptFileError(path, f"it has {found} bytes of {size}: it was cut off or replaced")


def covers(boxes: Iterable[Box], target: Box) -> bool:
    """Return whether the boxes contain each element of `target` exactly once, also if nobody has checked them.

    Raises CorruptCheckpointError if many boxes interlock, so that no straight cut separates them: checking them would
    take too long.
    """
    parts = [part for box in boxes if (part := box.intersection(target)) is not None]
    return sum(part.numel for part in parts) == target.numel and _are_apart(parts, _MOST_CUTS)


def _are_apart(parts: Sequence[Box], cuts: int) -> bool:
    """Return whether no two boxes share an element.

    The boxes are divided at every straight cut that does not go through a box. Each side is then checked recursively,
    to a depth of at most `cuts`.
    """
    if len(parts) <= 1:
        return True
    for axis in range(len(parts[0].size)) if cuts else ():
        slabs = _slabs(parts, axis)
        if len(slabs) > 1:
            return all(_are_apart(slab, cuts - 1) for slab in slabs)
    if len(parts) > _MOST_INTERLOCKED:
        low = [min(starts) for starts in zip(*(part.offset for part in parts), strict=True)]
        high = [max(stops) for stops in zip(*(map(add, part.offset, part.size) for part in parts), strict=True)]
        raise CorruptCheckpointError(
            f"the {len(parts)} boxes of {[*map(sub, high, low)]} elements from {low} on interlock, which "
            "those that megalite writes never do: load another checkpoint"
        )
    return all(one.intersection(other) is None for one, other in combinations(parts, 2))


def _slabs(parts: Iterable[Box], axis: int) -> list[list[Box]]:
    """Group the boxes by the straight cuts across an axis, and return the groups in order."""
    slabs: list[list[Box]] = []
    end = -1
    for part in sorted(parts, key=lambda part: part.offset[axis]):
        if part.offset[axis] >= end:
            slabs.append([])
        slabs[-1].append(part)
        end = max(end, part.offset[axis] + part.size[axis])
    return slabs
