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
        self._unreleased: list[_Late] = []

    def _begin(self, direction: Direction, source: Tensor, target: Tensor, after: Ready | None) -> Copy:
        for copy in self._unreleased:
            copy.check()
        self._unreleased = [each for each in self._unreleased if each.source.data_ptr() != source.data_ptr()]
        copy = _Late(source.detach(), target.detach(), after, self._waiting[direction])
        self._waiting[direction].append(copy)
        if direction == "to device":  # what waits for it is the device: the host may still be ahead of the copy
            self._unreleased.append(copy)
        return copy


@dataclass(eq=False)
class _Late:
    source: Tensor
    target: Tensor
    after: Ready | None
    waiting: list[_Late] = field(repr=False)
    copied: Tensor | None = None
    released: bool = False

    def wait(self) -> None:
        """Copy, after those that began before, as an engine does."""
        while self in self.waiting:
            first = self.waiting.pop(0)
            if first.after is not None:
                first.after.wait()
            if isinstance(first.after, _Late):  # the copy comes after that one: it may overwrite what that one reads
                first.after.released = True
            with torch.no_grad():
                first.target.copy_(first.source)
                first.copied = first.source.clone()

    def release(self) -> None:
        self.wait()
        self.check()
        self.released = True

    def check(self) -> None:
        """Assert that the source has not been overwritten before `release`."""
        if self.copied is not None and not self.released:
            ours, theirs = (each.contiguous().view(torch.uint8) for each in (self.source, self.copied))
            assert torch.equal(ours, theirs), "the host has overwritten a source that may still be on its way"
