"""Elements of shards that are updated on the host, where their optimizer state is."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from megalite.offload.transfers import Copy, Direction, Ready, Transfers
from megalite.optim.buckets import Bucket
from megalite.optim.layout import BucketShardSpec
from megalite.optim.learning_rate import Rates
from megalite.optim.update_rule import UpdateRule
from megalite_kernels.moments import BLOCK

COPIED_ELEMENTS = 1 << 22
"""Most elements of one copy: those before are updated while it travels."""


@dataclass(frozen=True)
class HostState:
    """Options of a rank whose optimizer has state on the host."""

    transfers: Transfers
    fraction: float
    """Share of the elements that this rank updates whose state is there."""
    overlap: bool = False
    """Copy gradients while backward runs, and weights while the next forward runs."""
    pin_gradients: bool = True
    """Let the buffers of gradients be page-locked."""
    pin_parameters: bool = True

    def parts(self, specs: Sequence[BucketShardSpec]) -> list[HostPart | None]:
        """Return the part on the host of each shard."""
        counts = elements_on_host(specs, self.fraction)
        return [HostPart(count, self) if count else None for count in counts]


@dataclass(frozen=True)
class HostPart:
    """The first elements of a shard, which have their state on the host."""

    elements: int
    options: HostState

    def mirror(self, parameters: Tensor) -> Tensor:
        """Return a copy on the host of these elements of a shard's parameters."""
        own = parameters[: self.elements]
        return self.options.transfers.copied_to_host(own, pinned=self.options.pin_parameters)

    def buffer(self, gradients: Tensor) -> Tensor:
        """Return a buffer on the host for these elements of a shard's gradients."""
        return self.options.transfers.on_host(self.elements, gradients.dtype, pinned=self.options.pin_gradients)


class HostCopy:
    """Consecutive elements of a shard on the host: their gradients come, and their new weights go.

    The weights on the host are those of the device, but while an update and the copy after it run.
    """

    def __init__(
        self,
        bucket: Bucket,
        transfers: Transfers,
        start: int,
        stop: int,
        device: tuple[Tensor, Tensor],
        host: tuple[Tensor, Tensor],
    ) -> None:
        """Describe elements [start, stop) of a bucket.

        Args:
            bucket: the bucket.
            transfers: runs the copies.
            start, stop: the elements.
            device: their parameters and gradients on the device.
            host: the same on the host; the parameters may be one tensor with those of the bucket.
        """
        self.start, self.stop = start, stop
        self.bucket, self._transfers = bucket, transfers
        (self._parameters, self._gradients), (self._mirror, self._buffer) = device, host
        self._is_mirror = bucket.slice_on_host
        self._coming: Copy | None = None
        self._going: Copy | None = None

    def fetch_gradients(self, after: Ready | None = None) -> Copy:
        """Begin to copy the gradients to the host, once `after` has ended, unless they are on their way."""
        if self._coming is None:
            self._coming = self._transfers.begin("to host", self._gradients, self._buffer, after)
        return self._coming

    def begin_update(self) -> None:
        """Wait for the gradients, and until the weights of the last update have left."""
        self.fetch_gradients().wait()
        self._coming = None
        self.begin_change()

    def begin_change(self) -> None:
        """Wait until the weights of the last update have left."""
        if self._going is not None:
            self._going.release()
        self._going = None
        if self._is_mirror:
            self.bucket.release_slice()

    def drop_gradients(self) -> None:
        """Forget gradients that no update has used: those of a step that was skipped."""
        if self._coming is not None:
            self._coming.wait()
            self._coming = None

    def send_parameters(self) -> None:
        """Begin to copy the weights to the device. The bucket waits for them before anything reads them there."""
        if not self._is_mirror:
            self._going = self._transfers.begin("to device", self._mirror, self._parameters)
            self.bucket.arriving.append(self._going)

    def take_parameters(self) -> None:
        """Copy the weights from the device, where something other than an update has set them."""
        if self._going is not None:
            self._going.release()
        if not self._is_mirror:
            self._transfers.begin("to host", self._parameters, self._mirror).wait()


def fetch_gradients(copies: Sequence[HostCopy], after: Ready | None = None) -> Sequence[Copy]:
    """Begin to copy the gradients of consecutive elements to the host, once `after` has ended."""
    first, *others = copies
    return [first.fetch_gradients(after), *(copy.fetch_gradients() for copy in others)]


class OnHost(UpdateRule):
    """Rule that updates on the host: gradients come before it, and new weights go after it."""

    def __init__(self, rule: UpdateRule, copies: Sequence[HostCopy]) -> None:
        self.rule, self.copies = rule, copies

    def fetch_gradients(self) -> None:
        """Begin to copy the gradients that are not on their way."""
        fetch_gradients(self.copies)

    def update(self, rates: Rates, step: int, factor: float) -> None:
        for copy in self.copies:
            copy.begin_update()
        self.rule.update(rates, step, factor)
        for copy in self.copies:
            copy.send_parameters()

    def collectives(self) -> Iterable[tuple[str, tuple[int, ...]]]:
        return self.rule.collectives()


class ElementCopy(NamedTuple):
    """Copy that belongs to an update: elements [start, stop) of a bucket.

    Gradients leave once their sum over the ranks is complete, and are there before the update of these elements. Their
    weights leave after it, and are there before the bucket is gathered or used.
    """

    direction: Direction
    bucket: int
    start: int
    stop: int


def declared_copies(rules: Iterable[UpdateRule], buckets: Sequence[Bucket]) -> list[ElementCopy]:
    """Return the copies of an update by these rules; those of each direction begin in this order."""
    copies = [copy for rule in rules if isinstance(rule, OnHost) for copy in rule.copies]
    coming = [ElementCopy("to host", buckets.index(copy.bucket), copy.start, copy.stop) for copy in copies]
    return [
        *coming,
        *(each._replace(direction="to device") for each in coming if not buckets[each.bucket].slice_on_host),
    ]


def check_copies(copies: Sequence[ElementCopy], on_host: Sequence[range], there: Collection[int]) -> None:
    """Prove that each element whose state is on the host comes and goes once in an update.

    Args:
        copies: those of an update.
        on_host: the elements of each bucket whose state is on the host.
        there: numbers of the buckets that keep their weights on the host: these do not go.

    Raises RuntimeError; the message names the elements.
    """
    for direction in ("to host", "to device"):
        for number, wanted in enumerate(on_host):
            own = sorted(each for each in copies if (each.direction, each.bucket) == (direction, number))
            end = wanted.start
            for each in own:
                if each.start != end:
                    raise RuntimeError(
                        f"elements {end} to {each.start} of bucket {number} are not copied {direction} once"
                    )
                end = each.stop
            if end != (wanted.start if direction == "to device" and number in there else wanted.stop):
                raise RuntimeError(
                    f"elements {end} to {wanted.stop} of bucket {number} are not copied {direction} once"
                )


def elements_on_host(specs: Sequence[BucketShardSpec], fraction: float) -> list[int]:
    """Return how many of the first elements of each shard of a rank have their state on the host.

    The first buckets have the last layers: backward completes their gradients first, and forward needs their weights
    last. A shard is divided at a multiple of 256 elements from the start of a parameter group, so that state in 8 bits
    has the same blocks as on the device.
    """
    lengths = [stop - start for start, stop in (spec.updated for spec in specs)]
    left, found = math.ceil(fraction * sum(lengths)), []
    for spec, length in zip(specs, lengths, strict=True):
        start, stop = spec.updated
        end = start + min(left, length)
        for _, _, first, last in spec.layout.stretches() if start < end < stop else ():
            low, high = max(first, start), min(last, stop)
            if low < end < high:
                end = min(low - -(end - low) // BLOCK * BLOCK, high)
                break
        found.append(end - start)
        left -= min(left, length)
    return found


def cuts(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield [start, stop) in ranges of at most COPIED_ELEMENTS."""
    for first in range(start, stop, COPIED_ELEMENTS):
        yield first, min(first + COPIED_ELEMENTS, stop)
