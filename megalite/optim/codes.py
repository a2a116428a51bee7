"""Codes that ZeRO 3 gathers in place of the values of weights (--fp8-param-gather).

Each rank makes the codes of its own slice. Their scales follow from the largest magnitudes of tiles, of which slices of
several ranks have elements: the ranks take the maximum, so that the codes are those of the whole weight, bit for bit.
The values have no memory but in the slices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megalite.optim.layout import Slot
from megalite.parallel import collectives
from megalite.parallel.mesh import Group
from megalite.parallel.parameter import Coded


class BucketCodes:
    """Codes of a bucket of weights that products round."""

    def __init__(self, slots: Sequence[Slot], start: int, group: Group) -> None:
        """Take the memory of the weights' values away.

        Args:
            slots: the weights, all of which are `coded`.
            start: the first element of this rank's slice.
            group: the ranks that have the other slices.
        """
        self._slots, self._start, self._group = slots, start, group
        self._keeps = False
        self._own: Tensor | None = None
        self._scales: list[Tensor] = []  # of each weight's tiles
        for slot in slots:
            # Products find codes. Whatever else reads a value finds NaN.
            slot.parameter.data = slot.parameter.new_full((), math.nan).expand(slot.parameter.shape)
            slot.parameter.keeps_codes = True

    def keep(self) -> None:
        """Keep codes that are made from now on, until `drop`."""
        self._keeps, self._own = True, None

    def drop(self) -> None:
        self._keeps, self._own = False, None

    def of_slice(self, values: Tensor) -> Tensor:
        """Return the codes of this rank's slice, uint8, from its values. All ranks of the group call it together."""
        if self._own is not None:
            return self._own
        self._scales, factors = map(self._by_weight, _coded(self._slots[0]).matrices.scales(self._agreed(values)))
        own = torch.zeros(len(values), dtype=torch.uint8, device=values.device)
        for (coded, first, part), each in zip(self._parts(values), factors, strict=True):
            own[part] = coded.matrices.codes(values[part], first, each).view(torch.uint8)
        self._own = own if self._keeps else None
        return own

    def hand_over(self, codes: Tensor) -> None:
        """Give each weight its codes, uint8 [length of the bucket], with their scales."""
        for slot, scales in zip(self._slots, self._scales, strict=True):
            matrices = _coded(slot).matrices
            own = codes[slot.start : slot.stop].view(matrices.recipe.forward)
            slot.parameter.codes = matrices.tiles(own, scales)

    def _agreed(self, values: Tensor) -> Tensor:
        """Return the largest magnitudes of all tiles, [tiles], one weight after the other."""
        own = [coded.matrices.largest(values[part], first).flatten() for coded, first, part in self._parts(values)]
        tops = collectives.all_reduce_(torch.cat(own), self._group, "max")
        for slot, of_weight in zip(self._slots, self._by_weight(tops), strict=True):
            collectives.all_reduce_(of_weight, _coded(slot).sharers, "max")
        return tops

    def _by_weight(self, tiles: Tensor) -> list[Tensor]:
        """View numbers of all tiles, [tiles], as those of each weight."""
        grids = [_coded(slot).matrices.grid for slot in self._slots]
        parts = tiles.split([rows * columns for rows, columns in grids])
        return [part.view(grid) for part, grid in zip(parts, grids, strict=True)]

    def _parts(self, values: Tensor) -> Iterator[tuple[Coded, int, slice]]:
        """Yield, for each weight, the first of its elements in this rank's slice, and the place of all there."""
        for slot in self._slots:
            low, high = (min(max(end - self._start, 0), len(values)) for end in (slot.start, slot.stop))
            yield _coded(slot), self._start + low - slot.start if low < high else 0, slice(low, high)


def _coded(slot: Slot) -> Coded:
    assert slot.parameter.coded is not None
    return slot.parameter.coded
