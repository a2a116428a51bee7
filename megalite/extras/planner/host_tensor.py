"""Tensors of the host in code that runs on the meta device. They have no values either; their device is the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megalite.offload.transfers import Transfers
from megalite.torch_internals import make_wrapper, no_torch_function, tree_leaves, tree_map


class HostTensor(Tensor):
    """Tensor of the host without values. Operators on it run on `stand_in`, which is on the meta device."""

    stand_in: Tensor
    __torch_function__ = no_torch_function

    @staticmethod
    def around(stand_in: Tensor) -> HostTensor:
        """Return the tensor of the host in place of one of the meta device."""
        made = make_wrapper(HostTensor, stand_in, torch.device("cpu"))
        made.stand_in = stand_in
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator. Its results are on the host, unless it is told another device or has a tensor of it."""
        kwargs = dict(kwargs or {})
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if func.overloadpacket.__name__ == "_local_scalar_dense":
            return 1.0 if given[0].is_floating_point() else 1
        elsewhere = any(each.is_meta for each in given)
        if (device := kwargs.get("device")) is not None:
            elsewhere = torch.device(device).type == "meta"
            kwargs["device"] = torch.device("meta")
        inner = {id(each): _inner(each) for each in given}
        outer = {id(inner[id(each)]): each for each in given}

        def opened(value: Any) -> Any:
            return inner[id(value)] if isinstance(value, Tensor) else value

        def closed(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if id(value) in outer:  # written in place
                return outer[id(value)]
            return value if elsewhere else cls.around(value)

        return tree_map(closed, func(*tree_map(opened, args), **tree_map(opened, kwargs)))


def _inner(tensor: Tensor) -> Tensor:
    if isinstance(tensor, HostTensor):
        return tensor.stand_in
    return tensor if tensor.is_meta else torch.empty_like(tensor, device="meta")


@contextmanager
def host_tensors() -> Iterator[None]:
    """Let what offloading allocates on the host beside the meta device be tensors of the host within the block."""
    before = Transfers.zeros_beside_meta
    first = HostTensor.around(torch.empty(0, device="meta"))
    Transfers.zeros_beside_meta = staticmethod(  # type: ignore[method-assign]
        lambda elements, dtype: first.new_empty(elements, dtype=dtype)
    )
    try:
        yield
    finally:
        Transfers.zeros_beside_meta = staticmethod(before)  # type: ignore[method-assign]
