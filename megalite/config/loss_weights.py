"""Weights of tokens in the loss of training, by the source of a blend or by the role of a message."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from megalite.errors import ConfigurationError
from megalite.small_files import shown

DEFAULT_ROLES: Mapping[str, float] = {"assistant": 1.0}
"""Weights of the roles of conversations that have one without `--loss-weights`."""


def loss_weights(given: Sequence[str]) -> dict[str, float]:
    """Return the weights in a `--loss-weights`, by name.

    Raises ConfigurationError: one is not NAME=WEIGHT, is given twice, or is negative or not finite.
    """
    found = dict[str, float]()
    for each in given:
        name, _, number = each.rpartition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not name or not 0 <= weight < math.inf:
            raise ConfigurationError(
                f"--loss-weights {shown(each)}: give NAME=WEIGHT with a finite weight of at least 0, as in web=0.5"
            )
        if name in found:
            raise ConfigurationError(f"--loss-weights gives {shown(name)} twice: keep one of the two")
        found[name] = weight
    return found


def loss_weight_problems(given: Sequence[str], *, sft: bool, mock_data: bool) -> Iterator[str]:
    """Yield a line if the weights cannot be read, or if they leave nothing to learn."""
    try:
        weights = loss_weights(given)
    except ConfigurationError as error:
        yield str(error)
        return
    if weights and mock_data:
        yield "--loss-weights is of the sources of a blend or, with --sft, of roles: --mock-data has neither"
    if sft and not any({**DEFAULT_ROLES, **weights}.values()):
        yield f"--loss-weights {' '.join(given)}: no role counts, so nothing would be learned: give one more than 0"
