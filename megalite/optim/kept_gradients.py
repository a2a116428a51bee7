"""Gradients of an embedding that is also the output layer: kept until the sum of the output layer is complete."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from megalite.optim.layout import BucketLayout
from megalite.parallel.parameter import Gradient, Parameter


class KeptGradients:
    """Sum of the gradients of one use over a round. They are kept if they take no more memory than their sum.

    It has the bits of a flat sum to which each gradient is added when it arrives, because they are added in the same
    order. That flat sum has memory only from when it is needed. If the gradients of the round can be kept, this is when
    `total` is called: then the sum and all of them take memory. Otherwise, it is from the first gradient on: then none
    of them does. It is also from a gradient on that must be added at once, or is so much larger than those before it
    that they cannot be kept.
    """

    def __init__(self, layout: BucketLayout, dtype: torch.dtype) -> None:
        self._layout, self._dtype = layout, dtype
        self._places = {id(slot.parameter): slot for slot in layout.slots}
        self._kept: deque[tuple[Parameter, Gradient]] = deque()
        self._bytes = self._due = 0
        self._sum: Tensor | None = None

    def begin_round(self, due: int) -> None:
        """Begin a new round, with this number of gradients of each parameter."""
        self._kept.clear()
        self._bytes, self._due, self._sum = 0, due * len(self._places), None

    def add(self, parameter: Parameter, gradient: Gradient) -> None:
        self._kept.append((parameter, gradient))
        if self._sum is not None or not self._can_keep(gradient.kept_bytes):
            self._add_up()

    def _can_keep(self, size: int | None) -> bool:
        """Tell whether the gradients of the round can be kept, if those due have this size in bytes."""
        if size is None or self._bytes + self._due * size > self._layout.length * self._dtype.itemsize:
            return False
        self._bytes, self._due = self._bytes + size, self._due - 1
        return True

    def total(self) -> Tensor:
        """Return the flat sum [length of the bucket] of the round's gradients, and keep none of them."""
        found, self._sum = self._add_up(), None
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
