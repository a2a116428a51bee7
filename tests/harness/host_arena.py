"""Memory that is taken to be the host's on a machine without a GPU: what CUDA would refuse is an error here.

    with host_arena() as arena:
        ...  # what `Transfers.on_host` allocates here is the host's

An operator, other than a copy, that mixes the host's memory with other memory fails. What operators make of the host's
memory alone is the host's, too. Threads of the engine that copies are not watched, and need not be.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megalite.offload.transfers import Transfers
from megalite.torch_internals import TorchDispatchMode, storage_identity, tree_leaves

COPIES = ("aten::copy_",)


class HostArena(TorchDispatchMode):
    """Storages of the host's memory.

    Attributes:
        allocated: bytes that the engines of copies have allocated.
    """

    def __init__(self) -> None:
        super().__init__()
        self.allocated = 0
        self._storages: dict[int, torch.UntypedStorage] = {}  # kept alive, so that no identity is used twice

    def add(self, tensor: Tensor) -> Tensor:
        """Declare a tensor's memory to be the host's."""
        self._storages[storage_identity(tensor)] = tensor.untyped_storage()
        return tensor

    def has(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is in the host's memory."""
        return storage_identity(tensor) in self._storages

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = [each for each in tree_leaves((args, kwargs or {})) if isinstance(each, Tensor)]
        on_host = [self.has(each) for each in given]
        result = func(*args, **(kwargs or {}))
        if not any(on_host) or func.name().partition(".")[0] in COPIES:
            return result
        # A number of the host may meet tensors of the device, but not the other way round; which one it is is not told.
        if not all(there or each.dim() == 0 for each, there in zip(given, on_host, strict=True)):
            shapes = ", ".join(
                f"{tuple(each.shape)} of the {'host' if there else 'device'}"
                for each, there in zip(given, on_host, strict=True)
            )
            raise AssertionError(f"{func.name()} mixes host and device: {shapes}")
        for each in tree_leaves(result):
            if isinstance(each, Tensor):
                self.add(each)
        return result


@contextmanager
def host_arena() -> Iterator[HostArena]:
    """Watch the operators of the block. What `Transfers.on_host` returns within it is the host's memory."""
    arena, allocate = HostArena(), Transfers.on_host

    def on_host(self: Transfers, elements: int, dtype: torch.dtype) -> Tensor:
        memory = allocate(self, elements, dtype)
        arena.allocated += memory.nbytes
        return arena.add(memory)

    with mock.patch.object(Transfers, "on_host", on_host), arena:
        yield arena
