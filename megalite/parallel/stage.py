"""The output of a network's stage: tensors for the next stage, and terms of the loss.

This is all that a network and the engine that runs it know of each other. It imports torch for types alone, so that a
schedule can be drawn without.
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
    """A tensor that a stage passes to the next one for every micro-batch.

    Attributes:
        shape: for hidden states [sequence (/ size under sequence parallelism), batch, hidden]; like `dtype`, None
            where nothing is sent, as in a schedule that is only drawn.
        gradient: the next stage gives its gradient back.
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
        tensors: for the next stage, by name; of the last stage, what it has instead of a loss, as logits.
        terms: this rank's sums of loss terms over the micro-batch, scalars in fp32 or wider, by the term's name;
            one that does not depend on what needs a gradient is recorded alone.
    """

    tensors: Mapping[str, Tensor]
    terms: TermSums = NO_SUMS


@dataclass(frozen=True)
class LossTerm:
    """A term of the loss: weight * sum / count, sum and count taken over the whole global batch.

    Any stage may return its sum, recomputed or not. The gradient of the loss is that of all terms together.

    Attributes:
        name: under which it is recorded.
        count: of a micro-batch, how much there is of what the term is a mean of, a scalar on any device.
        axes: of the mesh, over whose ranks the sum is partial: of a sum over a layer's tokens
            `ParallelContext.token_axes`. What stages return is added over the pipeline besides.
        count_axes: over whose ranks the count is partial. Ranks with the same micro-batch count the same.
    """

    name: str
    count: Callable[[Any], Tensor]
    weight: float = 1.0
    axes: tuple[str, ...] = ("dp", "cp")
    count_axes: tuple[str, ...] = ("dp", "cp")

    def __str__(self) -> str:
        over, counted = (" x ".join(axes) or "no axis" for axes in (self.axes, self.count_axes))
        return f"{self.name} (weight {self.weight}, summed over {over}, counted over {counted})"


def add_sums(terms: TermSums, more: TermSums) -> TermSums:
    """The sum of terms by name."""
    if not more:
        return terms
    return {**terms, **{name: terms[name] + value if name in terms else value for name, value in more.items()}}
