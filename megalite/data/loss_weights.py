"""Weights of tokens in the loss of training, by the source of a sample or by the role of a message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megalite.config.loss_weights import DEFAULT_ROLES
from megalite.data.blend import Dataset
from megalite.data.fields import SampleFields
from megalite.data.sources import Sources, SourceTokens
from megalite.errors import ConfigurationError


@dataclass(frozen=True)
class WeightedDataset:
    """Dataset of samples whose loss masks have weights of tokens, in float64.

    Attributes:
        samples: samples without weights.
        weights: float64 [sources], factors of the masks; or [1 + roles] in their place, the first of tokens of no role.
        sources: sources of the samples; None: weights are of roles.
    """

    samples: Dataset[SampleFields]
    weights: np.ndarray
    sources: Sources | None = None

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, sample: int) -> SampleFields:
        """Return a sample. Raises IndexError if there is no such sample."""
        fields = self.samples[sample]
        if self.sources is None:
            return SampleFields(**{**fields, "loss_mask": self.weights[fields["roles"]]})
        weighted = fields["loss_mask"].astype(np.float64) * self.weights[self.sources.of(sample)]
        return SampleFields(**{**fields, "loss_mask": weighted})


def weighted_roles(given: Mapping[str, float]) -> tuple[str, ...]:
    """Return the roles that have a weight, the one that has it anyway first."""
    return tuple({**DEFAULT_ROLES, **given})


def weights_of_roles(given: Mapping[str, float]) -> np.ndarray:
    """Return the weights of tokens of no role, and of those of `weighted_roles`."""
    return np.array([0.0, *{**DEFAULT_ROLES, **given}.values()])


def weights_of_sources(given: Mapping[str, float], sources: Sources | None) -> np.ndarray:
    """Return the weights of sources, which are named as in records or by their full prefix; others have 1.

    Raises ConfigurationError: there is one source only, a name is not of one of them, or all weights are 0.
    """
    flag = f"--loss-weights {' '.join(f'{name}={weight:g}' for name, weight in given.items())}"
    if sources is None:
        raise ConfigurationError(f"{flag}: the training data have one source: give a blend of several, or leave it out")
    numbers = {name: number for number, name in enumerate(sources.names)}
    if isinstance(sources, SourceTokens):
        numbers |= {prefix: numbers[name] for prefix, name in sources.by_prefix.items()}
    weights = np.ones(len(sources.names))
    for name, weight in given.items():
        if name not in numbers:
            raise ConfigurationError(
                f"{flag}: no source of the training data is called {name!r}: they are {_listed(sources.names)}"
            )
        weights[numbers[name]] = weight
    if not weights.any():
        raise ConfigurationError(f"{flag}: no source counts, so nothing would be learned: give one more than 0")
    return weights


def _listed(names: Sequence[str], most: int = 20) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
