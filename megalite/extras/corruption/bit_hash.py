"""Hash of the bits of a tensor, on its device, in exact integers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.functional import pad

_WORDS_OF_CPU, _WORDS_OF_GPU = 1 << 15, 1 << 22
"""Words of 8 bytes that are multiplied at once: in a core's cache, or enough for all of a GPU."""
_MIX, _NEXT = -0x61C8864680B583EB, 0x2545F4914F6CDD1D
"""Odd numbers with irregular bits: for the factors of the words of a block, and that of the blocks before."""


class BitHash:
    """Hash of 64 bits: the sum, modulo 2^64, of all words, times odd factors that depend on their positions.

    If only one word differs, so does the hash: the difference times an odd number is not zero. If more differ, hashes
    are equal by chance alone. All ranks must have one kind of device.
    """

    def __init__(self, device: torch.device) -> None:
        size = _WORDS_OF_GPU if device.type == "cuda" else _WORDS_OF_CPU
        mixed = torch.arange(1, size + 1, dtype=torch.int64, device=device) * _MIX
        self._factors = ((mixed ^ (mixed >> 29)) * _MIX) | 1

    def of_all(self, tensors: Iterable[Tensor]) -> Tensor:
        """Return the hash of several tensors, in this order."""
        total = torch.zeros((), dtype=torch.int64, device=self._factors.device)
        for tensor in tensors:
            total = total * _NEXT + self.of(tensor)
        return total

    @torch.no_grad()
    def of(self, values: Tensor) -> Tensor:
        """Return the hash of a tensor of any dtype, as int64 [] on the device of this hash."""
        raw = values.detach().reshape(-1).view(torch.uint8).to(self._factors.device)
        if raw.numel() % 8 or raw.storage_offset() % 8:
            raw = pad(raw.clone(), (0, -raw.numel() % 8))
        total = torch.zeros((), dtype=torch.int64, device=raw.device)
        for block in raw.view(torch.int64).split(len(self._factors)):
            total = total * _NEXT + (block * self._factors[: len(block)]).sum()
        return total
