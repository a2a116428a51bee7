"""Evidence of a tensor in a trace: all of it, a sketch, or a few statistics. Each tells how far an expected one is.

A distance is that of the Euclidean norm. A sketch estimates it, and statistics bound it from below, so what is near by
any of them may still be wrong where it was not recorded, and what is far is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

import torch
from torch import Tensor

import megalite_trace


class Evidence(Protocol):
    """Recorded values of one tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def norm(self) -> float:
        """Euclidean norm; NaN if the trace does not tell it."""

    @property
    def finite(self) -> bool:
        """False if there is a NaN or an infinity."""

    def distance(self, expected: Tensor) -> float:
        """Return the norm of the recorded minus the expected tensor, as well as the values tell it.

        `expected` has the recorded shape, in fp64.
        """

    def factor(self, expected: Tensor) -> float | None:
        """Return the number by which to multiply `expected` so that it is nearest; None if the values do not tell."""


@dataclass(frozen=True)
class Whole:
    """A tensor of which all elements were recorded."""

    values: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def norm(self) -> float:
        return float(torch.linalg.vector_norm(self.values, dtype=torch.float64))

    @property
    def finite(self) -> bool:
        return bool(torch.isfinite(self.values).all())

    def distance(self, expected: Tensor) -> float:
        return float(torch.linalg.vector_norm(self.values.double() - expected))

    def factor(self, expected: Tensor) -> float | None:
        square = float(expected.square().sum())
        return float((self.values.double() * expected).sum()) / square if square else None


@dataclass(frozen=True)
class Sketched:
    """A tensor of which a sketch of `megalite_trace` was recorded."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    norm: float
    finite: bool
    projections: Tensor
    """Products with seeded vectors of signs, fp64; their root mean square estimates the norm."""
    samples: Tensor
    """Elements at seeded places, fp64."""
    seed: int = 0

    def _of(self, expected: Tensor) -> Tensor:
        return megalite_trace.project(expected, self.seed)

    def distance(self, expected: Tensor) -> float:
        difference = self.projections - self._of(expected)
        return float(difference.square().mean().sqrt())

    def factor(self, expected: Tensor) -> float | None:
        theirs = self._of(expected)
        square = float(theirs.square().sum())
        return float((self.projections * theirs).sum()) / square if square else None


_BOUNDS: Mapping[str, tuple[Callable[[Tensor], Tensor], Callable[[int], float]]] = {
    # name: (statistic, largest change of it by an error of norm 1 in a tensor of n elements)
    "norm": (torch.linalg.vector_norm, lambda n: 1.0),
    "l1": (lambda values: values.abs().sum(), math.sqrt),
    "least": (torch.min, lambda n: 1.0),
    "most": (torch.max, lambda n: 1.0),
    "mean": (torch.mean, lambda n: 1.0 / math.sqrt(n)),
    "sum": (torch.sum, math.sqrt),
}


@dataclass(frozen=True)
class Statistics:
    """A tensor of which only some statistics were recorded, by the names of `_BOUNDS`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    values: Mapping[str, float]
    errors: Mapping[str, float] = field(default_factory=dict)
    """Largest error of a recorded statistic itself, from its own computation and the digits that were written."""

    @property
    def norm(self) -> float:
        return self.values.get("norm", math.nan)

    @property
    def finite(self) -> bool:
        return all(map(math.isfinite, self.values.values()))

    def distance(self, expected: Tensor) -> float:
        """Return the least norm of an error that explains all statistics; infinity if one of them is not finite."""
        if not self.finite:
            return math.inf
        size = max(expected.numel(), 1)
        found = 0.0
        for name, value in self.values.items():
            statistic, bound = _BOUNDS[name]
            gap = abs(value - float(statistic(expected))) - self.errors.get(name, 0.0)
            found = max(found, gap / bound(size))
        return found

    def factor(self, expected: Tensor) -> float | None:
        norm = float(torch.linalg.vector_norm(expected))
        return self.norm / norm if norm and math.isfinite(self.norm) else None


def added(terms: Sequence[Evidence]) -> Evidence | None:
    """Return the evidence of a sum of tensors, of which each rank has recorded a term; None if it cannot be told."""
    first = terms[0]
    if all(isinstance(term, Whole) for term in terms):
        total = torch.stack([cast(Whole, term).values.double() for term in terms]).sum(0)
        return _Sum(total, first.dtype)
    if isinstance(first, Sketched) and all(isinstance(term, Sketched) and term.seed == first.seed for term in terms):
        sketches = cast(Sequence[Sketched], terms)
        projections = torch.stack([term.projections for term in sketches]).sum(0)
        samples = torch.stack([term.samples for term in sketches]).sum(0)
        norm = float(projections.square().mean().sqrt())
        finite = all(term.finite for term in sketches)
        return Sketched(first.shape, first.dtype, norm, finite, projections, samples, first.seed)
    return None


@dataclass(frozen=True)
class _Sum(Whole):
    """A sum of whole tensors, which were recorded in another dtype than the sum is in."""

    of: torch.dtype = torch.float64

    @property
    def dtype(self) -> torch.dtype:
        return self.of
