"""Memory that a launch in the interpreter may access, and a record of the accesses of its programs."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

LARGEST_TRACKED = 1 << 24  # elements; of a larger tensor only the ends are watched
NOBODY, SEVERAL = -1, -2  # beside the number of a program


class KernelFault(Exception):
    """A kernel did what a GPU would not have told."""


class Storage:
    """The memory behind one or several arguments, and which program touched which of its elements."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        self.names = [name]
        self.start, self.bytes = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
        self.itemsize = tensor.element_size()
        count = self.bytes // self.itemsize
        self.tracked = count <= LARGEST_TRACKED
        if self.tracked:
            self.held = np.zeros(count, bool)
            self.stored, self.loaded = (np.full(count, NOBODY, np.int64) for _ in range(2))
        self.hold(tensor)

    def hold(self, tensor: Tensor) -> None:
        if self.tracked and tensor.numel():
            places = np.array([tensor.storage_offset()])
            for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
                places = np.add.outer(places, np.arange(size if stride else 1) * stride)
            self.held[places.ravel()] = True

    def touch(self, addresses: np.ndarray, program: int, *, store: bool) -> None:
        places = (addresses - np.uint64(self.start)).astype(np.int64) // self.itemsize
        does = "stores" if store else "loads"
        name = " and ".join(self.names)
        if not self.tracked:
            return
        if not self.held[places].all():
            place = places[~self.held[places]][0]
            raise KernelFault(f"out of bounds: program {program} {does} element {place} of the memory of {name}")
        for verb, others in (("stored", self.stored), ("loaded", self.loaded))[: 1 + store]:
            owners = others[places]
            strange = (owners != NOBODY) & (owners != program)
            if strange.any():
                raise KernelFault(
                    f"two programs: {program} {does} element {places[strange][0]} of {name}, "
                    f"which another program {verb} (number {owners[strange][0]}; {SEVERAL} for several)"
                )
        if store:
            self.stored[places] = program
        else:
            readers = self.loaded[places]
            self.loaded[places] = np.where((readers == NOBODY) | (readers == program), program, SEVERAL)


class Launch:
    """The memory of one launch's arguments, and the program that runs."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.program = 0
        storages: dict[int, Storage] = {}
        for name, tensor in arguments.items():
            if isinstance(tensor, Tensor) and tensor.untyped_storage().nbytes():
                known = storages.get(tensor.untyped_storage().data_ptr())
                if known is None:
                    storages[tensor.untyped_storage().data_ptr()] = Storage(name, tensor)
                else:
                    known.names.append(name)
                    known.hold(tensor)
        self.storages = sorted(storages.values(), key=lambda storage: storage.start)
        self.starts = np.array([storage.start for storage in self.storages], np.uint64)
        self.ends = np.array([storage.start + storage.bytes for storage in self.storages], np.uint64)

    def touch(self, addresses: np.ndarray, mask: np.ndarray, *, store: bool) -> None:
        active = np.broadcast_to(addresses, mask.shape)[mask]
        if not active.size:
            return
        index = np.searchsorted(self.starts, active, side="right") - 1
        if not self.storages or (index < 0).any() or (active >= self.ends[index]).any():
            does = "stores to" if store else "loads from"
            raise KernelFault(f"out of bounds: program {self.program} {does} memory that no argument has")
        for number in np.unique(index):
            self.storages[number].touch(active[index == number], self.program, store=store)
