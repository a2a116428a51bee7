"""Gradients of an embedding that is also the output layer: kept until the sum of the output layer is complete."""

from __future__ import annotations

from collections import deque
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from megalite.optim.layout import BucketLayout
from megalite.parallel.parameter import Gradient, Parameter


@runtime_checkable
class SmallGradient(Gradient, Protocol):
    """A gradient that may be kept before it is added, because it knows what that takes."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors from which it is computed."""


class KeptGradients:
    """Sum of the gradients of one use over a round, for a use whose gradients take less memory than their sum.

    It has the bits of a flat sum to which each gradient is added when it arrives, because they are added in the same
    order. That flat sum has memory only while it is needed: when `total` is called, and from the gradient on with which
    the gradients would take more bytes than the sum. Any gradient that is not a `SmallGradient` is added at once.
    """

    def __init__(self, layout: BucketLayout, dtype: torch.dtype) -> None:
        self._layout, self._dtype = layout, dtype
        self._places = {id(slot.parameter): slot for slot in layout.slots}
        self._kept: deque[tuple[Parameter, Gradient]] = deque()
        self._bytes = 0
        self._sum: Tensor | None = None

    def clear(self) -> None:
        """Begin a new round."""
        self._kept.clear()
        self._bytes, self._sum = 0, None

    def add(self, parameter: Parameter, gradient: Gradient) -> None:
        self._kept.append((parameter, gradient))
        if isinstance(gradient, SmallGradient):
            self._bytes += gradient.nbytes
        if (
            self._sum is not None
            or not isinstance(gradient, SmallGradient)
            or self._bytes > self._layout.length * self._dtype.itemsize
        ):
            self._add_up()

    def total(self) -> Tensor:
        """Return the flat sum [length of the bucket] of the round's gradients, and keep none of them."""
        found = self._add_up()
        self.clear()
        return found

    @torch.no_grad()
    def _add_up(self) -> Tensor:
        """Add the gradients in the order of their arrival to the flat sum, and free each."""
        if self._sum is None:
            device = self._layout.slots[0].parameter.device
            self._sum = torch.zeros(self._layout.length, dtype=self._dtype, device=device)
        while self._kept:
            parameter, gradient = self._kept.popleft()
            slot = self._places[id(parameter)]
            gradient.add_to(self._sum[slot.start : slot.stop].view(parameter.shape), overwrite=False)
        return self._sum
