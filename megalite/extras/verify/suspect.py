"""The tensor whose difference is to be explained, and what each explanation leaves of the difference."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megalite.errors import MegaliteError
from megalite.extras.verify.judgement import LIMIT, Judgement
from megalite.extras.verify.recall import Recall
from megalite.extras.verify.replay import Replay


@dataclass(frozen=True)
class Hypothesis:
    """Explanation of what was recorded.

    Attributes:
        kind: its class: factor, sum, term, shards, layout, mask, position, epsilon, scale, missing, precision, count.
        text: what the program seems to have computed.
        ratio: what is left of the distance, as a multiple of what rounding explains.
        factor: the factor, of a hypothesis of this kind.
    """

    kind: str
    text: str
    ratio: float
    factor: float | None = None

    @property
    def explains(self) -> bool:
        """True if no more than rounding is left."""
        return self.ratio <= LIMIT


NOT_EXPLAINED = (MegaliteError, ValueError, RuntimeError, LookupError, AssertionError)
"""Errors of a search for explanations, which a verdict does not need: mistakes that a network cannot make, and files
that only explanations read."""
Expected = Callable[[Judgement], Tensor | None]
"""Tensor that a rank would have recorded; None if the hypothesis says nothing of it."""


@dataclass(frozen=True)
class Suspect:
    """Tensor that differs.

    Attributes:
        recall: computes what the walk has compared again.
        group: the judgements of the tensor, one of each rank that has recorded it.
        sizes: sizes of axes, and other numbers that a factor may be, by name.
    """

    recall: Recall
    group: Sequence[Judgement]
    sizes: Mapping[str, float]

    @property
    def first(self) -> Judgement:
        return self.group[0]

    @property
    def replay(self) -> Replay:
        return self.recall.replay

    def ratio(self, expected: Expected) -> float:
        """Return what is left of the distance on all ranks together, as a multiple of what rounding explains."""
        left, rounding = 0.0, 0.0
        for judgement in self.group:
            tensor = expected(judgement)
            if tensor is None:
                return math.inf
            scale = float(torch.linalg.vector_norm(tensor)) / judgement.norm if judgement.norm else 1.0
            left += judgement.entry.read().distance(tensor.double()) ** 2
            rounding += (judgement.rounding * max(scale, 0.1)) ** 2
        return math.sqrt(left / rounding) if rounding else math.inf if left else 0.0

    def changed(self, change: Callable[[Tensor], Tensor]) -> float:
        """Return what is left if the point was changed in this way."""
        return self.ratio(partial(self.recall.expected, change=change))

    def truth(self, judgement: Judgement) -> Tensor:
        return self.recall.expected(judgement)

    def place(self, judgement: Judgement, axis: str) -> tuple[int, int]:
        """Return the place of a rank on an axis, and the axis's number of ranks."""
        return self.recall.trace.coordinates.get(judgement.entry.rank, {}).get(axis, (0, 1))

    def size(self, axis: str) -> int:
        """Return the number of ranks on an axis."""
        return max(self.place(each, axis)[1] for each in self.group)
