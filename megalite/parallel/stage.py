"""The output of a pipeline stage: tensors for the next stage, and terms of the loss.

This is the whole interface between a network and the engine that runs it. It imports torch only for type checking, so
a schedule can be drawn without importing torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import torch
    from torch import Tensor

TermSums: TypeAlias = "Mapping[str, Tensor]"
NO_SUMS: TermSums = MappingProxyType({})


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that a stage sends to the next stage for every micro-batch.

    Attributes:
        shape: [sequence (/ size under sequence parallelism), batch, hidden] for hidden states. Shape and dtype are
            None if nothing is sent, for example in a schedule that is only drawn.
        gradient: True if the next stage sends the gradient of this tensor back.
    """

    name: str
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    gradient: bool = True

    def __str__(self) -> str:
        return f"{self.name} {self.shape} of {self.dtype}{'' if self.gradient else ' without a gradient'}"


class StageOutput(NamedTuple):
    """The output of a stage for one micro-batch.

    Attributes:
        tensors: tensors for the next stage, by name. The last stage returns its logits here if there is no loss.
        terms: this rank's sums of the loss terms over the micro-batch, by name: scalars in fp32 or wider. A sum that
            does not require a gradient is only recorded.
        recorded: its sums of the terms that have parts, by name: vectors [parts] without a gradient.
    """

    tensors: Mapping[str, Tensor]
    terms: TermSums = NO_SUMS
    recorded: TermSums = NO_SUMS


@dataclass(frozen=True)
class LossTerm:
    """A term of the loss: weight * sum / count. Sum and count are taken over the whole global batch.

    Any stage may return a sum, recomputed or not. The loss is the sum of all terms.

    Attributes:
        name: the name under which the term is recorded.
        count: returns the number of items in a micro-batch that the mean is taken over, for example its valid tokens: a
            scalar on any device.
        axes: the mesh axes over which the sum is partial. For a sum over a layer's tokens, these are
            `ParallelContext.token_axes`. The sums of all pipeline stages are added in any case.
        count_axes: the mesh axes over which the count is partial. Ranks with the same micro-batch have the same count.
        parts: the names under which the elements of sum and count are recorded, if these are vectors; a part that has
            counted nothing is not recorded. Such a term has no gradient.
    """

    name: str
    count: Callable[[Any], Tensor]
    weight: float = 1.0
    axes: tuple[str, ...] = ("dp", "cp")
    count_axes: tuple[str, ...] = ("dp", "cp")
    parts: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names under which it is recorded."""
        return self.parts or (self.name,)

    def __str__(self) -> str:
        over, counted = (" x ".join(axes) or "no axis" for axes in (self.axes, self.count_axes))
        parts = f", of {', '.join(self.parts)}" if self.parts else ""
        return f"{self.name} (weight {self.weight}, summed over {over}, counted over {counted}{parts})"


def items_of(metric: str) -> str:
    """Return the name under which a stage returns the number of items of a metric."""
    return f"items of {metric}"


def add_sums(terms: TermSums, more: TermSums) -> TermSums:
    """Add two mappings of terms by name."""
    if not more:
        return terms
    return {**terms, **{name: terms[name] + value if name in terms else value for name, value in more.items()}}
