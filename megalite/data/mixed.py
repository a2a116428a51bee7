"""The interface of samples whose mix may change in the course of a run (`--data-mix-schedule`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from megalite.data.sampler import Ranges
from megalite.data.sources import Sources
from megalite.storage import AnyPath


@dataclass(frozen=True)
class Resumed:
    """Position and messages with which a run goes on from a checkpoint.

    Attributes:
        consumed_samples: number of samples so far: another one than before, if samples have another length now.
        former_length: tokens that a sample had before; None: as many as now.
        notes: messages for the person who starts the run.
        why: the change of the data in words, for the ledger; None if they are as before.
    """

    consumed_samples: int
    former_length: int | None = None
    notes: tuple[str, ...] = ()
    why: str | None = None


class MixedSamples(Sources, Protocol):
    """Samples by number, tokens int64 [sequence_length + 1], and where each source stands."""

    def __len__(self) -> int:
        """Return the number of samples; a large one if they have no end."""

    def __getitem__(self, sample: int) -> np.ndarray:
        """Return the tokens of a sample. Raises IndexError if there is no such sample."""

    def documents(self, sample: int) -> Mapping[str, list[int]]:
        """Return the documents of which a sample has tokens, ascending, by the prefix of their file."""

    def require_phases(self, iterations: str, batch_size: int) -> None:
        """Raise ConfigurationError unless phases begin after these steps of so many samples, separated by commas."""

    def description(self, sample: int) -> str:
        """Return the mix at a sample in words, and what follows."""

    def notes(self, end: int) -> tuple[str, ...]:
        """Return notes on the samples before `end`. Raises DataError if there are not as many."""

    def fingerprint(self) -> str:
        """Return a checksum of what decides the samples, which all ranks must have in common."""

    def saved(self) -> dict[str, Any]:
        """Return the section of a checkpoint's configuration from which `resume` continues."""

    def resume(self, path: AnyPath, saved: Mapping[str, Any], consumed_samples: int, left_out: Ranges) -> Resumed:
        """Continue from a checkpoint of any data.

        Args:
            path: the checkpoint, for messages.
            saved: its configuration.
            consumed_samples: samples that its run had consumed, of that run's length.
            left_out: samples that the run passes over.

        Raises:
            ConfigurationError, DataError: the run cannot go on with these flags or sources.
            CheckpointError: the checkpoint's record of the mix cannot be read.
        """
