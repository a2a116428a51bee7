"""Successive messages that travel packed, with error feedback: what one leaves out is added to the next one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.extras.synchronization.compressor import Compressor
from megalite.optim.layout import BucketLayout

CompressorAt = Callable[[int], Compressor]
"""Function from the number of applied updates to the compressor of the next step."""


@dataclass(frozen=True)
class Packing:
    """Options of messages of one kind.

    Attributes:
        compressor_at: the compressor of each step.
        warmup: number of updates before messages are packed.
        residual_dtype: dtype of what messages leave out, which is that of the sums of gradients; None: it is lost.
    """

    compressor_at: CompressorAt
    warmup: int
    residual_dtype: torch.dtype | None

    def begins(self, updates: int) -> bool:
        """Return True if the messages of the step after this number of updates are packed."""
        return updates >= self.warmup


class Packer:
    """Packer of the messages of one bucket, and what they have left out.

    The residual is replaced by `keep`, when it is known that the step is applied.
    """

    def __init__(self, packing: Packing, layout: BucketLayout, begin: int, end: int) -> None:
        """Allocate the residual of messages of the elements [begin, end) of a bucket."""
        self.packing, self._key, self._padding = packing, key_of(layout), padding(layout, begin, end)
        self.state: dict[str, Tensor] = {}
        """State of this rank, by name: `residual`, without the loss scale."""
        if packing.residual_dtype is not None:
            device = layout.slots[0].parameter.device
            self.state["residual"] = torch.zeros(end - begin, dtype=packing.residual_dtype, device=device)
        self._corrected = self._left_out = torch.empty(0)
        self._updates, self._loss_scale = 0, 1.0

    def begin_step(self, updates: int, loss_scale: float) -> None:
        self._updates, self._loss_scale = updates, loss_scale
        self._left_out = torch.empty(0)

    @property
    def packs(self) -> bool:
        """True if the messages of this step are packed."""
        return self.packing.begins(self._updates)

    def pack(self, values: Tensor) -> Tensor:
        """Add to values [parts, length], in place, what earlier messages have left out, and pack them.

        They must not change before `keep`.
        """
        self._correct(values)
        if not self.state:
            return self._compressor.pack(values, self._key_of_step)
        packed, self._left_out = self._compressor.pack_with_residual(values, self._key_of_step)
        self._corrected = values
        return packed

    def restore(self, packed: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        """Return what `pack` has made of [parts, length]."""
        return self._compressor.restore(packed, length, dtype, self._key_of_step)

    def sum(self, packed: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        """Return the sum [length] of what several ranks have packed."""
        return self._compressor.sum(packed, length, dtype, self._key_of_step)

    def keep(self) -> None:
        """Keep what the message of this step, if there was one, has left out."""
        if len(self._left_out):
            zero(self._left_out.view(-1), self._padding)
            self._keep(self._corrected, self._left_out)
            self._corrected = self._left_out = torch.empty(0)

    def _correct(self, values: Tensor) -> None:
        if self.state:
            values.add_(self.state["residual"].view(values.shape), alpha=self._loss_scale)

    def _keep(self, corrected: Tensor, left_out: Tensor) -> None:
        torch.div(left_out, self._loss_scale, out=self.state["residual"].view(left_out.shape))

    @property
    def _compressor(self) -> Compressor:
        return self.packing.compressor_at(self._updates)

    @property
    def _key_of_step(self) -> int:
        return self._key + self._updates


def key_of(layout: BucketLayout) -> int:
    """Return a number of the bucket that is the same on all ranks that have it, and differs between buckets."""
    names = [piece.tensor.name for slot in layout.slots for piece in slot.parameter.sharding.pieces]
    return int.from_bytes(hashlib.blake2b("\n".join(names).encode(), digest_size=7).digest(), "little")


def padding(layout: BucketLayout, begin: int, end: int) -> list[slice]:
    """Return those of the elements [begin, end) of a bucket that belong to no weight, counted from `begin`."""
    found, position = [], begin
    for start, stop in sorted((start, stop) for _, start, stop in layout.pieces(begin, end)):
        if position < start:
            found.append(slice(position - begin, start - begin))
        position = stop
    if position < end:
        found.append(slice(position - begin, end - begin))
    return found


def zero(values: Tensor, parts: Iterable[slice]) -> Tensor:
    """Set parts to zero, in place. A compressor may have made noise of the zeros of padding."""
    for part in parts:
        values[part].zero_()
    return values
