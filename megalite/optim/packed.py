"""Packed state: state that is stored in fewer bits than fp32, with conversion from and to fp32 for checkpoints.

Update rules read and write the packed form directly. All other code reads and writes fp32 values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megalite_kernels.launch import chunk_elements
from megalite_kernels.master_weights import joined, split_


class Readable(Protocol):
    """Values of consecutive elements."""

    def read(self, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) in fp32."""


class Packed(Readable, Protocol):
    """Values of consecutive elements, in packed form."""

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors that store only these values (not, for example, the parameters)."""

    def write(self, values: Tensor) -> None:
        """Set all elements; `values` may be on another device."""


@dataclass(frozen=True)
class Remainders:
    """Masters of bf16 parameters, stored as differences from the parameters (`megalite_kernels.master_weights`)."""

    parameters: Tensor
    remainders: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.remainders,)

    def read(self, start: int, stop: int) -> Tensor:
        return joined(self.parameters[start:stop], self.remainders[start:stop])

    @torch.no_grad()
    def write(self, values: Tensor) -> None:
        """Write the values. This sets the parameters too, because a master is parameter + remainder."""
        for part in chunks(len(values), self.parameters.device):
            split_(values[part].to(self.parameters.device), self.parameters[part], self.remainders[part])


@dataclass(frozen=True)
class Rounded:
    """Values in another precision than that in which they are kept."""

    kept: Tensor
    dtype: torch.dtype

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.kept,)

    def read(self, start: int, stop: int) -> Tensor:
        return self.kept[start:stop].to(self.dtype)

    def write(self, values: Tensor) -> None:
        self.kept.copy_(values)


@dataclass(frozen=True)
class View:
    """View of elements [start, stop) of packed values. A slice of a view is a view."""

    packed: Readable
    start: int
    stop: int
    dtype = torch.float32

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, part: slice) -> View:
        start, stop, _ = part.indices(len(self))
        return View(self.packed, self.start + start, self.start + stop)

    def read(self) -> Tensor:
        return self.packed.read(self.start, self.stop)


@dataclass(frozen=True)
class Joined:
    """Values of consecutive elements that are in several places, read on one device."""

    parts: Sequence[Tensor | View]
    device: torch.device

    def read(self, start: int, stop: int) -> Tensor:
        found, first = [], 0
        for part in self.parts:
            own = part[max(start - first, 0) : max(stop - first, 0)]
            found.append((own if isinstance(own, Tensor) else own.read()).to(self.device))
            first += len(part)
        return torch.cat(found)


def chunks(elements: int, device: torch.device) -> Iterator[slice]:
    """Yield slices that are small enough to limit the memory of temporary tensors."""
    size = chunk_elements(device)
    for start in range(0, elements, size):
        yield slice(start, start + size)
