"""Operations on existing memory that are also right under torch.compile.

torch 2.11 compiles an autograd function wrongly, in silence, if forward returns what an in-place operation returned, or
one that had nothing to do, such as `.to` with the same dtype: the gradients of this output are lost (pytorch issue
180642). So forward returns only what a new operation made; `changed` and `rounded` see to it, and
tests/unit/test_compiled_gradients.py finds those that do not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalite_kernels.implementation import on_gpu


def product_into(place: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Write first * second into `place`, which may be a view of a part of a larger tensor."""
    if torch.compiler.is_compiling():  # the compiler supports no such view as out=, and it fuses the copy
        return place.copy_(first * second)
    return torch.mul(first, second, out=place)


def add_product(target: Tensor, gradient: Tensor, input: Tensor, *, overwrite: bool) -> None:
    """Add gradient.T @ input to `target`, or set it if `overwrite`: [rows, out] and [rows, in] to [out, in].

    If the dtypes agree, or on CUDA GPUs, the product is added directly, without a temporary.
    """
    transposed, beta = gradient.t(), 0.0 if overwrite else 1.0  # 0 ignores old values, even NaN
    if target.dtype == input.dtype:
        torch.addmm(target, transposed, input, beta=beta, out=target)
    elif on_gpu(target) and torch.version.hip is None and target.dtype == torch.float32:
        torch.addmm(target, transposed, input, out_dtype=target.dtype, beta=beta, out=target)
    elif overwrite:
        target.copy_(transposed @ input)
    else:
        target.add_(transposed @ input)


def changed(values: Tensor, operation: str, *arguments: Tensor | float) -> Tensor:
    """Return what an operation, such as "mul", makes of the values: in their memory, or in new one in compiled code."""
    if torch.compiler.is_compiling():
        return rounded(getattr(values, operation)(*arguments), values.dtype)
    return getattr(values, operation + "_")(*arguments)


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values in this dtype: the same tensor if it has it."""
    return values if values.dtype == dtype else values.to(dtype)
