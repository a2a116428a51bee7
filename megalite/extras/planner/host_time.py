"""Code on the meta device at the host's own speed, so that its time is that which the host takes beside a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.extras.planner.recording import fused_attention, value_on_host
from megalite.torch_internals import TorchDispatchMode
from megalite_kernels.launch import recorded_launches

_ASKING = ("item", "tolist", "cpu", "nonzero", "__bool__", "__float__", "__int__")
"""Methods of a tensor that ask the device for values. So do "to" and "copy_", if one of two tensors is the host's."""


@contextmanager
def host_speed() -> Iterator[None]:
    """Run code on the meta device without a record, and without going through Python for each operator.

    Launches of Triton kernels do nothing. Tensors give the host values that they do not have, as in a record.
    """
    methods = {name: _answering(getattr(Tensor, name), _asks) for name in _ASKING}
    methods |= {"to": _answering(Tensor.to, _moves), "copy_": _answering(Tensor.copy_, _copies)}
    own = {name: vars(Tensor).get(name) for name in methods}
    attention = F.scaled_dot_product_attention
    with recorded_launches(lambda name, tensors: None):
        for name, method in methods.items():
            setattr(Tensor, name, method)
        F.scaled_dot_product_attention = _attention(attention)
        try:
            yield
        finally:
            F.scaled_dot_product_attention = attention
            for name, inherited in own.items():
                if inherited is None:
                    delattr(Tensor, name)
                else:
                    setattr(Tensor, name, inherited)


class _HostValues(TorchDispatchMode):
    """Values for the host in place of those that a tensor on the meta device has not."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        value = value_on_host(func.overloadpacket.__name__, args, kwargs or {})
        return func(*args, **kwargs or {}) if value is None else value


def _answering(method: Callable[..., Any], asks: Callable[..., bool]) -> Callable[..., Any]:
    def call(tensor: Tensor, *args: Any, **options: Any) -> Any:
        if not asks(tensor, *args, *options.values()):
            return method(tensor, *args, **options)
        with _HostValues():
            return method(tensor, *args, **options)

    return call


def _asks(tensor: Tensor, *_: Any) -> bool:
    return tensor.is_meta


def _moves(tensor: Tensor, *targets: Any) -> bool:
    return tensor.is_meta and any(
        (torch.device(each) if isinstance(each, str) else each).type != "meta"
        for each in (target.device if isinstance(target, Tensor) else target for target in targets)
        if isinstance(each, torch.device | str)
    )


def _copies(tensor: Tensor, source: Tensor, *_: Any) -> bool:
    return source.is_meta and not tensor.is_meta


def _attention(otherwise: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(query: Tensor, *args: Any, **options: Any) -> Tensor:
        run = fused_attention if query.is_meta else otherwise
        return run(query, *args, **options)

    return call
