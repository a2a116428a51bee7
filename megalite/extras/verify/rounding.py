"""Other orders of the sums of a computation, which are equal in exact arithmetic and differ by rounding alone.

Tensor-parallel ranks, kernels and micro-batches add up the same products in other orders, with other roundings between.
How far such orders are apart, and from fp64, is what rounding explains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megalite.torch_internals import TorchDispatchMode, operator


@dataclass(frozen=True)
class Numerics:
    """Precision and order of sums of one computation.

    Attributes:
        parts: number of parts of each inner product that are rounded before they are added up, as ranks do; 1 for as
            torch adds.
        seed: seed of the order in which the terms are dealt to the parts; None for parts of neighbours.
        plain_attention: compute scores and their softmax as separate operations, rounded in between.
    """

    dtype: torch.dtype
    parts: int = 1
    seed: int | None = None
    plain_attention: bool = False
    other_choices: bool = False
    """Routers take the other choice where rounding might (`doubtful_choices.py`)."""

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Compute so during the block."""
        attention: Any = sdpa_kernel(SDPBackend.MATH) if self.plain_attention else nullcontext()
        with attention, _OtherOrder(self.parts, self.seed) if self.parts > 1 else nullcontext():
            yield


TRUTH = Numerics(torch.float64)


OTHER_CHOICES = Numerics(torch.float64, other_choices=True)


def emulations(dtype: torch.dtype, tensor_parallel_size: int, more: int = 0) -> tuple[Numerics, ...]:
    """Return several ways to compute in a precision: as torch does, as so many ranks do, and as one more would.

    `more`: number of further ways, which deal the terms of sums to the ranks at random.
    """
    ranks = max(tensor_parallel_size, 2)
    further = (Numerics(dtype, ranks + seed % 2, seed, plain_attention=seed % 4 < 2) for seed in range(2, 2 + more))
    return (
        Numerics(dtype),
        Numerics(dtype, parts=ranks, plain_attention=True),
        Numerics(dtype, parts=ranks + 1),
        *further,
    )


class _OtherOrder(TorchDispatchMode):
    """Computes matrix products as sums of `parts` products, each rounded to the dtype of the result."""

    def __init__(self, parts: int, seed: int | None) -> None:
        super().__init__()
        self._parts, self._seed = parts, seed

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = _PRODUCTS.get(function)
        kwargs = dict(kwargs or {})
        return function(*args, **kwargs) if found is None else found(self._product, *args, **kwargs)

    def _product(self, a: Tensor, b: Tensor) -> Tensor:
        """Return a @ b, for [..., n, k] and [..., k, m]."""
        inner = a.shape[-1]
        multiply = torch.mm if a.dim() == 2 else torch.bmm
        if inner < 2 * self._parts:
            return multiply(a, b)
        if self._seed is not None:
            order = torch.randperm(inner, generator=torch.Generator().manual_seed(self._seed + inner))
            a, b = a[..., order], b[..., order, :]
        terms = [multiply(*each) for each in zip(a.chunk(self._parts, -1), b.chunk(self._parts, -2), strict=True)]
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        return total


_Product = Callable[[Tensor, Tensor], Tensor]


def _mm(product: _Product, a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    found = product(a, b)
    return found if out is None else out.copy_(found)


def _addmm(
    product: _Product, c: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1, out: Tensor | None = None
) -> Tensor:
    found = product(a, b)
    found = found if alpha == 1 else found * alpha
    found = found if beta == 0 else found + (c if beta == 1 else c * beta)
    return found if out is None else out.copy_(found)


def _addmm_(product: _Product, c: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    return c.copy_(_addmm(product, c, a, b, beta=beta, alpha=alpha))


_PRODUCTS: Mapping[Any, Callable[..., Tensor]] = {
    operator("mm"): _mm,
    operator("mm", "out"): _mm,
    operator("bmm"): _mm,
    operator("bmm", "out"): _mm,
    operator("addmm"): _addmm,
    operator("addmm", "out"): _addmm,
    operator("addmm_"): _addmm_,
    operator("baddbmm"): _addmm,
    operator("baddbmm_"): _addmm_,
}
