"""Copies between the device and the host beside the computation: on streams of a GPU, or threads for the CPU.

On the CPU both ends are in the host's memory, and the copies are as real: what reads a target too early, or overwrites
a source too early, computes wrong numbers there as on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from megalite.parallel.device import host_memory

Direction = Literal["to host", "to device"]


class Ready(Protocol):
    """Something that is waited for before a source may be read, such as a collective in progress."""

    def wait(self) -> object: ...


class Copy(Protocol):
    """A copy in progress."""

    def wait(self) -> None:
        """Let what follows read the target: of the host, or of the device's current stream."""

    def release(self) -> None:
        """Let what follows overwrite the source: of the host, or of the device's current stream."""


class Transfers:
    """Engine that runs copies, those of each direction in the order in which they begin.

    Attributes:
        begun: called with the direction and the number of bytes of each copy; None: nobody listens.
        holds: the tensors of the device are kept until the `wait` or `release` of their copies. Otherwise a GPU's
            memory is not used again before the host has seen the end of the copies, and the host is far ahead.
    """

    begun: Callable[[Direction, int], None] | None = None
    holds: bool = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def begin(self, direction: Direction, source: Tensor, target: Tensor, after: Ready | None = None) -> Copy:
        """Begin to copy `source` to `target`, both of one shape, once `after` has ended and all that was queued before.

        The target may be read after `wait`, and the source overwritten after `release`, of the copy that is returned.
        """
        if self.begun is not None:
            self.begun(direction, target.nbytes)
        return self._begin(direction, source, target, after)

    def _begin(self, direction: Direction, source: Tensor, target: Tensor, after: Ready | None) -> Copy:
        """Copy at once: on the meta device, where nothing is computed."""
        if after is not None:
            after.wait()
        target.copy_(source)
        return Ended()

    @staticmethod
    def zeros_beside_meta(elements: int, dtype: torch.dtype) -> Tensor:
        """Return what is in host memory where the meta device stands for a device. A recorder replaces this."""
        return torch.zeros(elements, dtype=dtype, device="meta")

    def on_host(self, elements: int, dtype: torch.dtype, *, pinned: bool = True) -> Tensor:
        """Return zeros [elements] in host memory; `pinned`: page-locked, so that copies run beside a GPU's work."""
        if self.device.type == "meta":
            return self.zeros_beside_meta(elements, dtype)
        if not pinned:
            return torch.zeros(elements, dtype=dtype)
        return host_memory(elements * dtype.itemsize, self.device).view(dtype)

    def copied_to_host(self, values: Tensor, *, pinned: bool = True) -> Tensor:
        """Return a copy of flat values in host memory, complete; `pinned` as in `on_host`."""
        copy = self.on_host(len(values), values.dtype, pinned=pinned)
        self.begin("to host", values, copy).wait()
        return copy


class Ended:
    """Copy that has ended."""

    def wait(self) -> None:
        pass

    release = wait


class ThreadTransfers(Transfers):
    """Copies of the CPU, by one thread per direction."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._threads = {
            direction: ThreadPoolExecutor(1, thread_name_prefix=f"copy {direction}")
            for direction in ("to host", "to device")
        }

    def _begin(self, direction: Direction, source: Tensor, target: Tensor, after: Ready | None) -> Copy:
        return _InThread(self._threads[direction].submit(_copy, source.detach(), target.detach(), after))


def _copy(source: Tensor, target: Tensor, after: Ready | None) -> None:
    if after is not None:
        after.wait()
    target.copy_(source)


@dataclass(frozen=True)
class _InThread:
    future: Future[None]

    def wait(self) -> None:
        self.future.result()

    release = wait


class StreamTransfers(Transfers):
    """Copies of a GPU, by one stream per direction."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._streams = {direction: torch.cuda.Stream(device) for direction in ("to host", "to device")}

    def _begin(self, direction: Direction, source: Tensor, target: Tensor, after: Ready | None) -> Copy:
        stream = self._streams[direction]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            if after is not None:
                after.wait()
            target.copy_(source, non_blocking=True)
        if not self.holds:
            on_device = source if direction == "to host" else target
            on_device.record_stream(stream)  # its memory is not used for another tensor before the copy has ended
        return _OnStream(stream.record_event(), direction)


@dataclass(frozen=True)
class _OnStream:
    event: torch.cuda.Event
    direction: Direction

    def wait(self) -> None:
        if self.direction == "to host":
            self.event.synchronize()
        else:
            self.event.wait()

    def release(self) -> None:
        if self.direction == "to host":
            self.event.wait()
        else:
            self.event.synchronize()


def make_transfers(device: torch.device) -> Transfers:
    """Return the engine of a device."""
    kinds = {"cuda": StreamTransfers, "cpu": ThreadTransfers}
    return kinds.get(device.type, Transfers)(device)
