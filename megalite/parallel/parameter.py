"""Parameters with a record of their place in the global model, and the kinds of gradients they receive."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from megalite.parallel.mesh import Group
from megalite.parallel.sharding import Piece, Sharding
from megalite.torch_internals import make_subclass
from megalite_kernels.grouped import add_grouped_products
from megalite_kernels.products import add_product
from megalite_kernels.tile_scales import WeightTiles
from megalite_kernels.weight_parts import Matrices


class Gradient(Protocol):
    """A contribution to a parameter's gradient that can add itself to the gradient buffer."""

    def add_to(self, target: Tensor, *, overwrite: bool) -> None:
        """Add to `target`, or set it if `overwrite`."""

    @property
    def kept_bytes(self) -> int | None:
        """Bytes that it takes until it is added, if it may be kept. None: it must be added at once."""
        return None


@dataclass(frozen=True)
class DenseGradient(Gradient):
    values: Tensor

    def add_to(self, target: Tensor, *, overwrite: bool) -> None:
        if overwrite:
            target.copy_(self.values)
        else:
            target.add_(self.values)


class _Nothing(Gradient):
    """A gradient that another one has in it."""

    def add_to(self, target: Tensor, *, overwrite: bool) -> None:
        if overwrite:
            target.zero_()


NOTHING = _Nothing()


@dataclass(frozen=True)
class ProductGradient(Gradient):
    """The weight gradient of a linear layer, output_gradient.T @ input."""

    output_gradient: Tensor  # [tokens, out]
    input: Tensor  # [tokens, in]

    def add_to(self, target: Tensor, *, overwrite: bool) -> None:
        add_product(target, self.output_gradient, self.input, overwrite=overwrite)


@dataclass(frozen=True)
class LateGradient(Gradient):
    """A gradient that is made when it is added, of what takes less memory or has not been gathered yet."""

    made: Callable[[], Gradient]

    def add_to(self, target: Tensor, *, overwrite: bool) -> None:
        self.made().add_to(target, overwrite=overwrite)


@dataclass(frozen=True)
class GroupedProductGradient(Gradient):
    """The weight gradient of a grouped linear layer: one product per expert.

    Rows are sorted by expert. Expert e has the rows from offsets[e] to offsets[e + 1], possibly none.
    """

    output_gradient: Tensor  # [rows, out]
    input: Tensor  # [rows, in]
    offsets: Sequence[int]  # [experts + 1]
    ends: Tensor  # offsets[1:], int32, on the device

    def add_to(self, target: Tensor, *, overwrite: bool) -> None:
        """Add to `target`, which has experts * out * in elements in this order."""
        matrices = target.view(len(self.offsets) - 1, self.output_gradient.shape[1], self.input.shape[1])
        add_grouped_products(matrices, self.output_gradient, self.input, self.offsets, self.ends, overwrite=overwrite)


@dataclass(frozen=True)
class RowsGradient(Gradient):
    """The gradient of an embedding table after a lookup of some of its rows."""

    rows: Tensor  # [tokens], integer
    values: Tensor  # [tokens, width]

    def add_to(self, target: Tensor, *, overwrite: bool) -> None:
        if overwrite:
            target.zero_()
        target.index_add_(0, self.rows, self.values.to(target.dtype))


class DeferredGradients:
    """A queue of gradients to be added later, in the order in which they were computed.

    The tensors that a gradient is computed from stay in memory until it is added.
    """

    def __init__(self) -> None:
        self._additions: deque[Callable[[], None]] = deque()

    def keep(self, addition: Callable[[], None]) -> None:
        """Append the call that adds a gradient."""
        self._additions.append(addition)

    @torch.no_grad()
    def add(self) -> None:
        """Add all gradients in order, and free each."""
        while self._additions:
            self._additions.popleft()()


class GradientBuffer(Protocol):
    """The buffer that accumulates gradients. All gradients enter it through `accumulate`."""

    @property
    def deferred(self) -> DeferredGradients | None:
        """The queue for gradients that are computed now; None if gradients are added immediately."""

    @property
    def frees_parameters(self) -> bool:
        """True if a parameter's values may be freed as soon as its gradient has been added or queued."""

    def accumulate(self, parameter: Parameter, gradient: Gradient, use: int = 0) -> None:
        """Accumulate a gradient of one use of the parameter. `use`: the number of the use."""


@dataclass(frozen=True)
class Coded:
    """A way to make codes of a weight whose values are read for nothing else: ZeRO 3 gathers codes in their place.

    Attributes:
        sharers: the ranks that have parts of a tensor with one scale.
    """

    matrices: Matrices
    sharers: Group


class Parameter(nn.Parameter):
    """A parameter with its `Sharding` and, once attached, the buffer that accumulates its gradient.

    It has no memory until a bucket or `allocate` provides it, so a sharded model is never unsharded on any rank.
    """

    sharding: Sharding
    gradient_buffer: GradientBuffer | None
    codes: WeightTiles | None = None
    """Codes and scales of the values; None: they are not made, or not kept."""
    keeps_codes = False
    """True if codes are kept once they are made (`rounded_products.kept_codes`)."""
    coded: Coded | None = None
    """Way to make codes, which are gathered in place of the values; None: values are gathered."""

    def __new__(cls, sharding: Sharding, dtype: torch.dtype, device: torch.device) -> Parameter:
        data = torch.zeros((), dtype=dtype, device=device).expand(sharding.local_shape)
        self = make_subclass(cls, data)
        self.sharding, self.gradient_buffer = sharding, None
        return self

    def __init__(self, sharding: Sharding, dtype: torch.dtype, device: torch.device) -> None:
        pass

    def allocate(self) -> None:
        """Allocate uninitialized memory if the parameter has none."""
        if not any(self.stride()):
            self.data = torch.empty(self.shape, dtype=self.dtype, device=self.device)

    def frozen_alias(self) -> Parameter:
        """Return a parameter with the same memory that needs no gradient."""
        alias = make_subclass(Parameter, self.detach())
        alias.requires_grad_(False)
        alias.sharding, alias.gradient_buffer = self.sharding, None
        return alias


def is_deferred(parameter: Parameter) -> bool:
    """Tell if a gradient that is accumulated now is queued to be added later."""
    return parameter.gradient_buffer is not None and parameter.gradient_buffer.deferred is not None


def accumulate_grad(parameter: Parameter, gradient: Gradient, use: int = 0) -> Tensor | None:
    """Accumulate the gradient of a use into the parameter's buffer. Backward functions call it.

    Returns:
        The value that the backward function must return to autograd: None, or the gradient if there is no buffer. That
        of a frozen parameter is not computed.
    """
    if not parameter.requires_grad:
        return None
    if parameter.gradient_buffer is not None:
        parameter.gradient_buffer.accumulate(parameter, gradient, use)
        return None
    plain = torch.empty_like(parameter, requires_grad=False)
    gradient.add_to(plain, overwrite=True)
    return plain


def named_pieces(module: nn.Module) -> Iterator[tuple[Parameter, Piece]]:
    """Yield each piece of each parameter of `module` once, in registration order.

    Raises:
        TypeError: a parameter has no sharding.
    """
    for name, parameter in module.named_parameters():
        if not isinstance(parameter, Parameter):
            raise TypeError(f"parameter {name} was created without a Sharding")
        for piece in parameter.sharding.pieces:
            yield parameter, piece
