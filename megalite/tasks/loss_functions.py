"""Loss functions of a user: the terms that they return sums of, and checks of what they return."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megalite.errors import MegaliteError
from megalite.modules.stage import LOSS, Samples
from megalite.parallel.stage import LossTerm

Function = Callable[[Any, Any], Any]
"""Function from a network's outputs and a batch to a sum over the batch, or to sums by name."""
IGNORED = -100
"""Label of a token that torch's cross entropy leaves out of its mean."""
Count = Callable[[Any], Any]
"""Function from a batch to the number of items that the mean is taken over, or to numbers by name."""


def padded_fields(values: Any) -> list[str]:
    """Describe the fields of a batch that tell which tokens are padding: attention masks, and labels of -100."""
    if not isinstance(values, Mapping):
        return []
    tensors = {str(name): value for name, value in values.items() if isinstance(value, Tensor)}
    masks = [name for name in tensors if name == "attention_mask"]
    labels = [name for name, each in tensors.items() if not each.is_floating_point() and bool((each == IGNORED).any())]
    return [*masks, *(f"{name} of {IGNORED}" for name in labels)]


def counted_terms(count: Count, example: Samples | None) -> tuple[LossTerm, ...]:
    """Return the terms of a loss by the numbers that `count` returns for a micro-batch; without one, there is one."""
    numbers = None if example is None else count(example.values)
    names = tuple(numbers) if isinstance(numbers, Mapping) else (LOSS,)
    if not names:
        raise MegaliteError("count returned {}: return the number of items in the batch, or numbers by name")
    return tuple(LossTerm(name, _counted(count, name)) for name in names)


def _counted(count: Count, name: str) -> Callable[[Samples], Tensor]:
    """Return a function that counts the items of a micro-batch for one term of the loss, in float64.

    It raises MegaliteError if the user's function returns no number for that term.
    """

    def of_micro_batch(batch: Samples) -> Tensor:
        found = count(batch.values)
        if isinstance(found, Mapping):
            if name not in found:
                raise MegaliteError(f"count returned no number for the term {name} of the loss: {', '.join(found)}")
            found = found[name]
        if not isinstance(found, Tensor | float | int) or (isinstance(found, Tensor) and found.dim()):
            shown = f"a tensor {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise MegaliteError(
                f"count returned {shown} for the term {name} of the loss: return the number of items in the batch"
            )
        return torch.as_tensor(found, dtype=torch.float64)

    return of_micro_batch


def with_terms(loss: Function, names: Sequence[str]) -> Function:
    """Return a function with the sums of a loss that has all terms which are counted."""

    def total(outputs: Any, values: Any) -> Any:
        sums = loss(outputs, values)
        found = tuple(sums) if isinstance(sums, Mapping) else (LOSS,)
        if missing := [name for name in names if name not in found]:
            raise MegaliteError(
                f"the loss returned {', '.join(found) or 'no terms'} and lacks {', '.join(missing)}, of which count "
                "returns the number of items: let both return the same names"
            )
        return sums

    return total


def checked_mean(loss: Function) -> Function:
    """Return a loss that returns the mean over samples, with checks."""

    def checked(outputs: Any, values: Any) -> Tensor:
        mean = loss(outputs, values)
        if isinstance(mean, Mapping):
            raise MegaliteError(
                f"the loss returned the terms {', '.join(mean)} and has no count: give Trainer(count=...), which "
                "returns for each the number of items in a batch"
            )
        if not isinstance(mean, Tensor) or mean.dim():
            shown = f"a tensor {tuple(mean.shape)}" if isinstance(mean, Tensor) else type(mean).__name__
            raise MegaliteError(f"the loss returned {shown}: return a mean, a tensor without dimensions")
        return mean

    return checked
