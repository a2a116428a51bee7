"""Memory that is taken to be the host's on a machine without a GPU: what CUDA would refuse is an error here.

    with host_arena() as arena:
        ...  # what `Transfers.on_host` allocates here is the host's

An operator, other than a copy, that mixes the host's memory with the device's fails. What operators make of the host's
memory alone is the host's, too; what `Tensor.to` returns, or is made of no tensor, may be either's. Threads of the
engine are not watched, and need not be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megalite.offload.transfers import Transfers
from megalite.torch_internals import TorchDispatchMode, storage_identity


class HostArena(TorchDispatchMode):
    """Storages of the host's memory.

    Attributes:
        allocated: bytes that the engines of copies have allocated.
    """

    def __init__(self) -> None:
        super().__init__()
        self.allocated = 0
        self._host = dict[int, torch.UntypedStorage]()  # kept alive, so that no identity is used twice
        self._either = dict[int, torch.UntypedStorage]()

    def add(self, tensor: Tensor) -> Tensor:
        """Declare a tensor's memory to be the host's."""
        self._host[storage_identity(tensor)] = tensor.untyped_storage()
        return tensor

    def add_moved(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor that may meet either the host's memory or the device's."""
        copy = tensor.detach().clone()
        self._host.pop(storage_identity(copy), None)
        self._either[storage_identity(copy)] = copy.untyped_storage()
        return copy

    def has(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is in the host's memory."""
        return storage_identity(tensor) in self._host

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = list(_tensors((*args, *kwargs.values()) if kwargs else args))
        on_host = [each for each in given if self.has(each)]
        result = func(*args, **(kwargs or {}))
        if all(storage_identity(each) in self._either for each in given):  # or there is none, and the device was named
            for each in _tensors((result,)):
                self._either[storage_identity(each)] = each.untyped_storage()
        if not on_host or func.name().partition(".")[0] == "aten::copy_":
            return result
        # A number of the host may meet tensors of the device, but not the other way round; which one it is is not told.
        others = [each for each in given if not (self.has(each) or each.dim() == 0)]
        if any(storage_identity(each) not in self._either for each in others):
            of_host, rest = ([tuple(each.shape) for each in those] for those in (on_host, others))
            raise AssertionError(f"{func.name()} mixes tensors of the host {of_host} and of the device {rest}")
        for each in _tensors((result,)):
            self.add(each)
        return result


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:  # there are few levels, and many operators
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


class _Moves(TorchFunctionMode):
    """Has `Tensor.to` move what it is given, as it does between two devices."""

    def __init__(self, arena: HostArena) -> None:
        super().__init__()
        self._arena = arena

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        to_place = any(isinstance(each, torch.device | Tensor) for each in (*args[1:], *(kwargs or {}).values()))
        return self._arena.add_moved(result) if func is Tensor.to and to_place else result


@contextmanager
def host_arena() -> Iterator[HostArena]:
    """Watch the operators of the block. What `Transfers.on_host` returns within it is the host's memory."""
    arena, allocate = HostArena(), Transfers.on_host

    def on_host(self: Transfers, elements: int, dtype: torch.dtype, **options: bool) -> Tensor:
        memory = allocate(self, elements, dtype, **options)
        arena.allocated += memory.nbytes
        return arena.add(memory)

    with mock.patch.object(Transfers, "on_host", on_host), arena, _Moves(arena):
        yield arena
