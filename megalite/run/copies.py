"""Interface of copies in memory, implemented in `megalite/extras/recovery/copies.py`: what a run calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from megalite.storage import AnyPath
from megalite.training.trainer import Trainer


class Copies(Protocol):
    """Copies in memory of what ranks hold (megalite/extras/recovery/copies.py)."""

    notes: tuple[str, ...]

    @property
    def busy(self) -> bool:
        """Return whether this rank's last copy is under way. Raises the error of its background work."""

    def load(self, build: Any, on_disk: Sequence[AnyPath]) -> tuple[Trainer, str] | None:
        """Return the trainer that continues from copies, and a text on where; None if there are none to load."""

    def begin(self, trainer: Trainer) -> None:
        """Allocate the memory."""

    def after_step(self, *, busy: bool) -> str | None:
        """Take a copy if one is due, and no rank is busy. Returns a text to show."""

    def drop_after(self, step: int) -> None:
        """Drop the copies of later steps: what they hold may be wrong."""

    def figures(self) -> dict[str, float]:
        """Return figures for the record of a step."""

    def __enter__(self) -> Copies: ...

    def __exit__(self, *error: Any) -> None:
        """End the background work."""
