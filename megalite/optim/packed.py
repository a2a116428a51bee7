"""State in fewer bits than its values have: what a checkpoint reads of it, and how it is set.

An update rule reads and writes such state itself; for everyone else its values are fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megalite_kernels.launch import chunk_elements
from megalite_kernels.master_weights import joined, split_


class Packed(Protocol):
    """The values of a run's elements, packed."""

    def tensors(self) -> tuple[Tensor, ...]:
        """The memory that is for them alone."""

    def read(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop), in fp32."""

    def write(self, values: Tensor) -> None:
        """Set all elements; `values` may be on another device."""


@dataclass(frozen=True)
class Remainders:
    """Masters of bf16 parameters, by what rounding takes off them (`megalite_kernels.master_weights`)."""

    parameters: Tensor
    remainders: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.remainders,)

    def read(self, start: int, stop: int) -> Tensor:
        return joined(self.parameters[start:stop], self.remainders[start:stop])

    @torch.no_grad()
    def write(self, values: Tensor) -> None:
        """Write the values, and the parameters as well: masters are parameter + remainder."""
        for part in chunks(len(values), self.parameters.device):
            split_(values[part].to(self.parameters.device), self.parameters[part], self.remainders[part])


@dataclass(frozen=True)
class View:
    """Elements [start, stop) of what is packed; a slice of it is one, too."""

    packed: Packed
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


def chunks(elements: int, device: torch.device) -> Iterator[slice]:
    """So few at a time that temporaries take little memory."""
    size = chunk_elements(device)
    for start in range(0, elements, size):
        yield slice(start, start + size)
