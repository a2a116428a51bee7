"""Host memory into which the state is copied, so that training continues while the copy is written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from megalite.checkpoint.plan import Region
from megalite.parallel import device

_ALIGNMENT = 64


class Staging:
    """Memory for the regions that a rank saves, made once and used for every save."""

    def __init__(self, regions: Sequence[Region], place: torch.device) -> None:
        """Make memory of the sizes of `regions`, whose values are on the device `place`."""
        self._device = place
        starts = [0]
        for region in regions:
            starts.append(starts[-1] + math.ceil(region.part.size / _ALIGNMENT) * _ALIGNMENT)
        self._memory = device.host_memory(starts[-1], place)
        self._copies = [
            self._memory[start : start + region.part.size].view(region.part.dtype)
            for region, start in zip(regions, starts, strict=False)
        ]

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self._memory.nbytes

    @torch.no_grad()
    def take(self, regions: Sequence[Region]) -> list[Region]:
        """Return the same regions with copies of their values; the copies are complete."""
        for region, copy in zip(regions, self._copies, strict=True):
            copy.copy_(region.values.flatten(), non_blocking=True)
        device.synchronize(self._device)
        return [replace(region, kept=copy) for region, copy in zip(regions, self._copies, strict=True)]
