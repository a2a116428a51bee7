"""Weights of tokens in the loss of training, as arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megalite.config.loss_weights import DEFAULT_ROLES
from megalite.data.sources import Sources, SourceTokens
from megalite.errors import ConfigurationError


@dataclass(frozen=True)
class LossWeights:
    """Weights of tokens, each float64.

    Attributes:
        of_sources: [sources], factors of the loss mask; None: 1.
        of_roles: [1 + roles], in place of the loss mask; the first one is that of the tokens of no role. None: the
            mask is as it is.
    """

    of_sources: np.ndarray | None = None
    of_roles: np.ndarray | None = None


def weighted_roles(given: Mapping[str, float]) -> tuple[str, ...]:
    """Return the roles that have a weight, the one that has it anyway first."""
    return tuple({**DEFAULT_ROLES, **given})


def weights_of_roles(given: Mapping[str, float]) -> LossWeights:
    """Return the weights of `weighted_roles`."""
    return LossWeights(of_roles=np.array([0.0, *{**DEFAULT_ROLES, **given}.values()]))


def weights_of_sources(given: Mapping[str, float], sources: Sources | None) -> LossWeights:
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
    return LossWeights(of_sources=weights)


def _listed(names: Sequence[str], most: int = 20) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
