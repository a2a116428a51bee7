"""The meta device without torch's descriptions in Python, which take longer than all else that the host does.

torch describes the results of most operators there by Python functions that FakeTensor needs too, tens of microseconds
each. A GPU's operators have nothing like it. Where torch has a description in C++, it is as quick as on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

IN_CPP = ("Meta", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", "CompositeImplicitAutograd")
"""Keys of torch's dispatcher under which an operator has a description in C++, or is made of others there."""


def describe_quickly() -> Library:
    """Use descriptions in C++ in the rest of this process, and Python's for operators that have none.

    Operators of which layers have many get short ones here. They hold until the returned library is deleted.
    """
    from torch import _meta_registrations as registrations
    from torch._decomp import global_decomposition_table

    registrations._meta_lib_dont_use_me_use_register_meta._destroy()
    found: dict[Any, Callable[..., Any]] = {}
    for kind in ("meta", "post_autograd", "pre_autograd"):
        found = global_decomposition_table[kind] | found
    library = Library("aten", "IMPL", "Meta")
    for operator, function in found.items():
        if isinstance(operator, torch._ops.OpOverload) and operator.namespace == "aten" and not operator.is_view:
            name = operator.name()
            if name.removeprefix("aten::") not in SHORT and not any(
                torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in IN_CPP
            ):
                library.impl(operator, function)
    for name, function in SHORT.items():
        library.impl(name, function)
    return library


def _flash(query: Tensor, key: Tensor, *_: Any, **__: Any) -> tuple[Any, ...]:
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    state = query.new_empty(2, dtype=torch.uint64)
    return torch.empty_like(query), lse, None, None, query.shape[2], key.shape[2], state, state, lse


def _flash_backward(gradient: Tensor, *inputs: Any, **_: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(each) for each in inputs[:3])


def _layer_norm(x: Tensor, shape: list[int], *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows = [*x.shape[: x.dim() - len(shape)], *(1 for _ in shape)]
    mean, inverse = (x.new_empty(rows, dtype=torch.float32) for _ in range(2))
    return torch.empty_like(x), mean, inverse


def _layer_norm_backward(
    gradient: Tensor, x: Tensor, shape: list[int], mean: Tensor, inverse: Tensor, weight: Tensor, bias: Tensor, *_: Any
) -> tuple[Tensor, ...]:
    return torch.empty_like(x), torch.empty_like(weight), torch.empty_like(bias)


def _addmm(
    input: Tensor, left: Tensor, right: Tensor, dtype: torch.dtype, *, beta: float = 1, alpha: float = 1, out: Tensor
) -> Tensor:
    return out


def _grouped_mm(left: Tensor, right: Tensor, offs: Tensor, *_: Any, **__: Any) -> Tensor:
    groups = (len(offs),) if right.dim() == 2 else ()  # of columns of the one and rows of the other, else of rows
    return left.new_empty(*groups, len(left), right.shape[-1])


SHORT: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "native_layer_norm": _layer_norm,
    "native_layer_norm_backward": _layer_norm_backward,
    "addmm.dtype_out": _addmm,
    "_grouped_mm": _grouped_mm,
}
