"""Engine that copies at the last moment that the code allows: when a target is read, or a source overwritten.

With `ThreadTransfers`, which copies as soon as it can, it bounds what any machine may do: code that trains the same
under both reads nothing before it has come, and overwrites nothing before it has left.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from megalite.offload.transfers import Copy, Direction, Ready, Transfers


class LateTransfers(Transfers):
    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._waiting: dict[Direction, list[_Late]] = {"to host": [], "to device": []}

    def _begin(self, direction: Direction, source: Tensor, target: Tensor, after: Ready | None) -> Copy:
        copy = _Late(source.detach(), target.detach(), after, self._waiting[direction])
        self._waiting[direction].append(copy)
        return copy


@dataclass(eq=False)
class _Late:
    source: Tensor
    target: Tensor
    after: Ready | None
    waiting: list[_Late] = field(repr=False)

    def wait(self) -> None:
        """Copy, after those that began before, as an engine does."""
        while self in self.waiting:
            first = self.waiting.pop(0)
            if first.after is not None:
                first.after.wait()
            with torch.no_grad():
                first.target.copy_(first.source)

    release = wait
