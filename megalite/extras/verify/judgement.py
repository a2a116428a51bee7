"""Judgement of one recorded tensor: how far it is from the truth, beside how far rounding takes it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.extras.verify.evidence import Evidence
from megalite.extras.verify.points import Point
from megalite.extras.verify.trace import Entry

LIMIT = 4.0
"""Distance, as a multiple of what rounding explains, from which on a tensor is accused.

Programs round in other places than the emulation: a fused kernel once where separate ones round three times, which is a
factor of about the root of three in norm; and the largest of the values of a step is an extreme. No right run that is
told in `docs/verify.md` has reached it.
"""
_BLOCK = 1 << 16
"""Elements that are compared at once."""
_STORED = 0.29
"""Root mean square of the rounding error of storing a number, in units of its last place: 1 / sqrt(12)."""


@dataclass(frozen=True)
class Judgement:
    """Comparison of a recorded tensor with the expected one.

    Attributes:
        entry: the recorded tensor.
        point: the point of megalite's network that it shows; None for weights and what follows from them.
        layer: number of the layer; None for what is in none.
        order: place in the order of execution.
        distance: norm of the recorded minus the true tensor.
        rounding: root mean square of that distance over the emulated runs.
        spread: the largest of these over the smallest.
        norm: norm of the true tensor.
    """

    entry: Entry
    point: Point | None
    layer: int | None
    order: int
    distance: float
    rounding: float
    spread: float
    norm: float

    @property
    def ratio(self) -> float:
        """Distance as a multiple of what rounding explains."""
        if self.distance == 0.0:
            return 0.0
        return self.distance / self.rounding if self.rounding else math.inf

    @property
    def differs(self) -> bool:
        """True if rounding does not explain the distance."""
        return not self.ratio <= LIMIT

    @property
    def relative(self) -> float:
        """Distance relative to the norm of the true tensor."""
        return self.distance / self.norm if self.norm else self.distance


def stored_error(expected: Tensor, dtype: torch.dtype) -> float:
    """Return the norm of the error of storing a tensor in a dtype, on average."""
    if not dtype.is_floating_point or dtype == torch.float64:
        return 0.0
    # The unit in the last place is eps times the power of two below the number, which is 0.72 of it on average.
    return float(torch.linalg.vector_norm(expected)) * torch.finfo(dtype).eps * 0.72 * _STORED


def _distance(tensor: Tensor, truth: Tensor) -> float:
    """Return the norm of a difference, in blocks: whole temporary tensors would take longer than the sum."""
    blocks = zip(tensor.flatten().split(_BLOCK), truth.flatten().split(_BLOCK), strict=True)
    return math.sqrt(sum(float((each.double() - exact).square_().sum()) for each, exact in blocks))


def compare(
    evidence: Evidence, expected: Sequence[Tensor], stores: int = 0, other_choices: Tensor | None = None
) -> tuple[float, float, float, float]:
    """Return distance, rounding, spread and norm, as `Judgement` has them.

    Args:
        expected: the tensor in fp64, and in each of the emulated runs.
        stores: number of times that the program has rounded it to the recorded dtype, and the emulation has not, as
            where gradients are added up in bf16.
        other_choices: the tensor if routers choose otherwise wherever rounding might.
    """
    truth = expected[0].double()
    norm = float(torch.linalg.vector_norm(truth))
    errors = [_distance(each, truth) for each in expected[1:]]
    rounding = math.sqrt(sum(error**2 for error in errors) / len(errors)) if errors else 0.0
    spread = max(errors) / min(errors) if errors and min(errors) > 0 else 1.0
    stored = stored_error(truth, evidence.dtype)
    further = 0.0 if other_choices is None else _distance(other_choices, truth)
    rounding = math.hypot(rounding, stored * math.sqrt(stores), further)
    rounding = max(rounding, stored, norm * torch.finfo(torch.float64).eps)
    distance = evidence.distance(truth) if evidence.finite else math.inf
    return distance, rounding, spread, norm
