"""Origin of a run: the checkpoints with which it and its parents began, as its own checkpoints keep them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megalite.checkpoint import TrainingState
from megalite.errors import CheckpointError
from megalite.storage import AnyPath, place_of

PARENTS = "parents"
"""Section of a checkpoint's configuration that has them."""
_MOST = 100
"""Most parents of a run."""


@dataclass(frozen=True)
class Parent:
    """Checkpoint of another run, with which a run began: its directory, step and consumed samples."""

    run: str
    step: int
    samples: int

    @staticmethod
    def of(path: AnyPath, training: TrainingState) -> Parent:
        """Return the parent of a run that begins with the checkpoint in folder `path`."""
        return Parent(place_of(path.parent), training.iteration, training.consumed_samples)

    def __str__(self) -> str:
        return f"a branch of {self.run} from step {self.step} ({self.samples:,} samples)"


def parents_of(path: AnyPath, saved: Mapping[str, Any]) -> tuple[Parent, ...]:
    """Return the parents of a run, the nearest first, from the configuration of its checkpoint in folder `path`.

    Raises CheckpointError if they are damaged.
    """
    found: Any = saved.get(PARENTS, {}).get("runs", [])
    if isinstance(found, list) and len(found) <= _MOST and all(map(_is_parent, found)):
        return tuple(Parent(**each) for each in found)
    raise CheckpointError(f"{path}: {PARENTS} are not runs, each with step and samples: resume from another checkpoint")


def _is_parent(found: object) -> bool:
    if not isinstance(found, dict) or found.keys() != {"run", "step", "samples"} or not isinstance(found["run"], str):
        return False
    return all(type(found[name]) is int and found[name] >= 0 for name in ("step", "samples"))


def saved_parents(parents: Sequence[Parent]) -> dict[str, Any]:
    """Return the section of a checkpoint's configuration that `parents_of` reads; without parents there is none."""
    return {PARENTS: {"runs": [asdict(each) for each in parents]}} if parents else {}


def in_words(parents: Sequence[Parent]) -> str:
    """Return the parents in words, the nearest first."""
    return ", ".join(map(str, parents))
