"""Products of linear layers: in the precision of their operands, or with operands in 8 or 4 bits by a recipe.

Y = X W' contracts over the columns of X [tokens, in] and W [out, in]; the gradient of X, dY W, over those of dY
[tokens, out] and the rows of W; that of W, dY' X, over tokens. A scale is for a part of one token's row, or for a tile
of a weight, and ranks split rows where these end: so codes and scales are the same on every layout. Of a tensor with
one scale, all ranks that have a part of it take the largest value; of a row with one, those that split it.

A backward has the codes of the input, and not its values, whose memory is freed. The gradient of a weight is that of
the product which the forward computed: of the output's gradient and of what these codes stand for. Only if asked are
both rounded for it: their blocks run along tokens, which follow the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.parallel import collectives
from megalite.parallel.mesh import Group
from megalite.parallel.parameter import (
    Coded,
    Gradient,
    GroupedProductGradient,
    LateGradient,
    Parameter,
    ProductGradient,
)
from megalite.parallel.stage_module import Inside
from megalite_kernels.grouped import grouped_product
from megalite_kernels.recipes import Recipe
from megalite_kernels.scaled_products import grouped_product as scaled_grouped_product
from megalite_kernels.scaled_products import product
from megalite_kernels.tile_scales import Tiles, WeightTiles
from megalite_kernels.tiles import dequantize, largest, quantize, quantize_weight, transposed
from megalite_kernels.weight_parts import Matrices

ALONE = Group((0,), 0)
Kept = tuple[Tensor | None, ...]
"""Tensors from which a backward has the input of the forward."""


def as_matrix(tensor: Tensor) -> Tensor:
    """View [..., width] as [rows, width]."""
    return tensor.reshape(-1, tensor.shape[-1])


def saved_by(ctx: Any) -> Kept:
    """Return what a forward has saved, without its graph, which gradients that are added later must not keep."""
    return tuple(None if saved is None else saved.detach() for saved in ctx.saved_tensors)


class Products:
    """The three products of a linear layer, in the precision of their operands."""

    rounds = False
    """True if operands are rounded."""
    stores_activations = False
    """True if a backward computes activations again, of what `keep` keeps of their inputs."""

    @property
    def inside(self) -> Sequence[Inside]:
        """The collectives of forward with other ranks than the tensor-parallel ones."""
        return ()

    @property
    def inside_stored(self) -> Sequence[Inside]:
        """The collectives of `keep` in forward, and of `keep_again` in backward."""
        return ()

    def take(self, weight: Parameter, matrices: int = 1) -> None:
        """Take a weight, so many matrices one below the other, of which nothing but these products reads values."""

    def forward(self, input: Tensor, weight: Parameter, gathered: Group) -> tuple[Tensor, Kept]:
        """Multiply [n, ..., in] of the ranks of `gathered`, joined along the first dimension, with [out, in].

        Returns:
            The product, and what backward needs of this rank's input.
        """
        return F.linear(collectives.all_gather(input, gathered), weight), (input,)

    def keep(self, values: Tensor) -> Kept:
        """Return what to keep of [..., width], of which the ranks that split the inputs have other columns."""
        return (values,)

    def values(self, kept: Kept, dtype: torch.dtype) -> Tensor:
        """Return what is kept as a matrix [rows, width]."""
        (found,) = kept
        assert found is not None
        return as_matrix(found)

    def gather(self, kept: Kept, group: Group) -> Callable[[], Kept]:
        """Begin to join the rows that ranks keep. The function that is returned waits for them."""
        (own,) = kept
        assert own is not None
        pending = collectives.all_gather_async(own, group)
        return lambda: (pending.wait(),)

    def in_backward(self, gradient: Tensor) -> Products:
        """Return the products of a backward, from the gradient of this rank."""
        return self

    def input_gradient(self, gradient: Tensor, weight: Parameter, gathered: Group) -> Tensor:
        """Multiply [rows, out] of the ranks of `gathered`, joined, with [out, in]: [rows, in], a new tensor."""
        return collectives.all_gather(gradient, gathered) @ weight

    def weight_gradient(self, gradient: Tensor, kept: Kept) -> Gradient:
        """Return the gradient of the weight: the product of [tokens, out] and of the kept input [tokens, in]."""
        return ProductGradient(gradient, self.values(kept, gradient.dtype))

    def keep_again(self, input: Tensor) -> tuple[Products, Kept]:
        """Return how the weight gradient of an input is computed that backward has computed again, and what of it."""
        return PLAIN, (input,)

    def of_groups(
        self, rows: Tensor, weight: Parameter, offsets: Sequence[int], ends: Tensor, *, backward: bool = False
    ) -> tuple[Tensor, Kept]:
        """Multiply each row with the matrix of its group, as `forward` does, or `input_gradient` in backward.

        Args:
            weight: a matrix [out, in] for each group, one below the other.
            offsets, ends: see `grouped_product`.

        Returns:
            See `forward`.
        """
        matrices = _matrices(weight, offsets)
        return grouped_product(rows, matrices if backward else matrices.transpose(1, 2), offsets, ends), (rows,)

    def weight_gradient_of_groups(self, gradient: Tensor, kept: Kept, offsets: Sequence[int], ends: Tensor) -> Gradient:
        """Return the product of [rows, out] and of the rows [rows, in] that are kept, for each group."""
        return GroupedProductGradient(gradient, self.values(kept, gradient.dtype), offsets, ends)


PLAIN = Products()


@dataclass(frozen=True)
class Rounding:
    """Recipe by which operands are rounded, and for which products.

    Attributes:
        weight_gradients: True if weight gradients are products of rounded operands, too.
        gathers_codes: True if ZeRO 3 gathers the codes of weights, not their values.
        stores_activations: True if codes of the inputs of activations are kept, of which backward computes them again.
    """

    recipe: Recipe
    weight_gradients: bool = False
    gathers_codes: bool = False
    stores_activations: bool = False


@dataclass(frozen=True)
class Roundings:
    """Roundings of the operands in parts of a network.

    Attributes:
        of_layers: that of each layer; none: they do not, nor do layers beyond them.
    """

    of_layers: tuple[Rounding | None, ...] = ()
    of_depths: Rounding | None = None

    def of_layer(self, layer: int) -> Rounding | None:
        """Return that of a layer, by its number."""
        return self.of_layers[layer] if layer < len(self.of_layers) else None


UNROUNDED = Roundings()


@dataclass(frozen=True)
class RoundedProducts(Products):
    """Products of operands that are rounded by a recipe.

    Attributes:
        rows: the ranks that split the outputs, as rows of the weight.
        columns: the ranks that split the inputs, as columns of the weight.
        sharers: the ranks that have parts of the same activations.
        bound: the largest value of a gradient of which ranks have parts; None: not known, or not needed.
    """

    rounding: Rounding
    rows: Group = ALONE
    columns: Group = ALONE
    sharers: Group = ALONE
    bound: Tensor | None = None

    rounds = True

    @property
    def stores_activations(self) -> bool:  # type: ignore[override]
        """See `Products`."""
        return self.rounding.stores_activations

    @property
    def inside(self) -> Sequence[Inside]:
        """See `Products`: with the other context-parallel ranks."""
        return (Inside("largest values of a tensor", "tp x cp"),) if self.sharers.axis == "cp" else ()

    @property
    def inside_stored(self) -> Sequence[Inside]:
        """See `Products`."""
        return tuple(each._replace(backward=int(self.rounding.weight_gradients)) for each in self.inside)

    def take(self, weight: Parameter, matrices: int = 1) -> None:
        """See `Products`."""
        if self.rounding.gathers_codes:
            size = matrices, weight.shape[0] // matrices, weight.shape[1]
            sharers = ALONE if self.rounding.recipe.block else self._sharers_of_weight
            weight.coded = Coded(Matrices(self.rounding.recipe, size), sharers)

    def forward(self, input: Tensor, weight: Parameter, gathered: Group) -> tuple[Tensor, Kept]:
        """See `Products`. Codes are gathered, not values."""
        own = self._rounded(as_matrix(input), self.rounding.recipe.forward, self.columns)
        found = self._product(_gathered(own, gathered)(), self.tiles(weight).forward, input.dtype)
        return found.view(-1, *input.shape[1:-1], found.shape[1]), own

    def keep(self, values: Tensor) -> Kept:
        """See `Products`."""
        return self._rounded(as_matrix(values), self.rounding.recipe.forward, self.columns)

    def values(self, kept: Kept, dtype: torch.dtype) -> Tensor:
        """See `Products`."""
        return dequantize(_tiles(kept), self.rounding.recipe, dtype)

    def gather(self, kept: Kept, group: Group) -> Callable[[], Kept]:
        """See `Products`."""
        return _gathered(_tiles(kept), group)

    def in_backward(self, gradient: Tensor) -> Products:
        """See `Products`. If a tensor has one scale, ranks agree on it here."""
        if self.rounding.recipe.block or (bound := largest(gradient, self.rounding.recipe)) is None:
            return self
        return replace(self, bound=collectives.all_reduce_(bound, self.sharers, "max"))

    def input_gradient(self, gradient: Tensor, weight: Parameter, gathered: Group) -> Tensor:
        """See `Products`."""
        own = self._rounded(gradient, self.rounding.recipe.backward, self.rows, self.bound)
        return self._product(_gathered(own, gathered)(), self.tiles(weight).backward, gradient.dtype)

    def weight_gradient(self, gradient: Tensor, kept: Kept) -> Gradient:
        """See `Products`."""
        if self.rounding.weight_gradients:
            return RoundedProductGradient(gradient, _tiles(kept), self.rounding.recipe, self.bound)
        return LateGradient(partial(super().weight_gradient, gradient, kept))

    def keep_again(self, input: Tensor) -> tuple[Products, Kept]:
        """See `Products`."""
        return (self, self.keep(input)) if self.rounding.weight_gradients else (PLAIN, (input,))

    def of_groups(
        self, rows: Tensor, weight: Parameter, offsets: Sequence[int], ends: Tensor, *, backward: bool = False
    ) -> tuple[Tensor, Kept]:
        """See `Products`. A row's scales are its own, whatever other rows a rank has of its group."""
        recipe, tiles = self.rounding.recipe, self.tiles(weight, len(offsets) - 1)
        if backward:
            own, matrices = self._rounded(rows, recipe.backward, self.rows), tiles.backward
        else:
            own, matrices = self._rounded(rows, recipe.forward, self.columns), tiles.forward
        return scaled_grouped_product(own, matrices, offsets, ends, recipe, rows.dtype), own

    def weight_gradient_of_groups(self, gradient: Tensor, kept: Kept, offsets: Sequence[int], ends: Tensor) -> Gradient:
        """See `Products`."""
        return LateGradient(partial(super().weight_gradient_of_groups, gradient, kept, offsets, ends))

    def tiles(self, weight: Parameter, groups: int = 1) -> WeightTiles:
        """Return the codes and scales of a weight of so many matrices, made once while they are kept."""
        if weight.codes is not None:
            return weight.codes
        values = weight.detach()
        found = quantize_weight(values, self.rounding.recipe, groups, *self._tops(values, groups))
        if weight.keeps_codes:
            weight.codes = found
        return found

    @property
    def _sharers_of_weight(self) -> Group:
        return self.columns if self.columns.size > 1 else self.rows

    def _tops(self, values: Tensor, groups: int) -> tuple[Tensor | None, Tensor | None]:
        """Return the largest values of the matrices' rows and of their columns, over the ranks that split them.

        Of a matrix with one scale, all values count, and none of columns.
        """
        recipe = self.rounding.recipe
        of_rows = self._over(values, self.columns if recipe.block else self._sharers_of_weight)
        if of_rows is None or not recipe.block:
            return of_rows, None
        return of_rows, self._over(transposed(values, groups), self.rows)

    def _over(self, values: Tensor, group: Group) -> Tensor | None:
        """Return the largest value of a matrix, or of each row, over the ranks of a group; None: not needed."""
        top = largest(values, self.rounding.recipe)
        return None if top is None else collectives.all_reduce_(top, group, "max")

    def _rounded(self, values: Tensor, kind: torch.dtype, over: Group, bound: Tensor | None = None) -> Tiles:
        """Round [rows, columns], of which the ranks of `over` have other columns."""
        recipe = self.rounding.recipe
        if bound is None and (bound := largest(values, recipe)) is not None:
            bound = collectives.all_reduce_(bound, over if recipe.block else self.sharers, "max")
        return quantize(values, recipe, kind, bound)

    def _product(self, first: Tiles, second: Tiles, dtype: torch.dtype) -> Tensor:
        return product(first, second, self.rounding.recipe, dtype)


@dataclass(frozen=True)
class RoundedProductGradient(Gradient):
    """The weight gradient of a linear layer, output_gradient.T @ input, of operands with blocks along tokens."""

    output_gradient: Tensor  # [tokens, out]
    input: Tiles  # [tokens, in], with blocks along `in`
    recipe: Recipe
    bound: Tensor | None

    def add_to(self, target: Tensor, *, overwrite: bool) -> None:
        """Round along tokens and add. With one scale of a tensor, the input has its codes already."""
        recipe, dtype = self.recipe, self.output_gradient.dtype
        gradient = quantize(self.output_gradient.t().contiguous(), recipe, recipe.backward, self.bound)
        if recipe.block:
            input = quantize(dequantize(self.input, recipe, dtype).t().contiguous(), recipe, recipe.forward)
        else:
            input = Tiles(self.input.codes.t().contiguous(), self.input.scales)
        found = product(gradient, input, recipe, dtype)
        if overwrite:
            target.copy_(found)
        else:
            target.add_(found)


def _matrices(weight: Tensor, offsets: Sequence[int]) -> Tensor:
    """View the weight as [groups, out, in]."""
    return weight.detach().view(len(offsets) - 1, -1, weight.shape[-1])


def _tiles(kept: Kept) -> Tiles:
    codes, scales, outer = kept
    assert codes is not None
    assert scales is not None
    return Tiles(codes, scales, outer)


def _gathered(tiles: Tiles, group: Group) -> Callable[[], Tiles]:
    """Begin to join the rows of all ranks in one message of bytes: of each row the codes, then the scales."""
    if group.size == 1:
        return lambda: tiles
    by_row = [None if part is None or part.dim() == 0 else part for part in tiles]
    sent = [part.reshape(len(tiles.codes), -1).view(torch.uint8) for part in by_row if part is not None]
    pending = collectives.all_gather_async(torch.cat(sent, dim=1), group)

    def wait() -> Tiles:
        received = iter(pending.wait().split([part.shape[1] for part in sent], dim=1))

        def restored(part: Tensor | None, own: Tensor | None) -> Tensor | None:
            if part is None:
                return own
            return next(received).contiguous().view(part.dtype).view(-1, *part.shape[1:])

        return _tiles(tuple(restored(part, own) for part, own in zip(by_row, tiles, strict=True)))

    return wait


@contextmanager
def kept_codes(networks: Iterable[nn.Module]) -> Iterator[None]:
    """Keep the codes of each weight from its first product in this context to the end of it.

    The values of weights must not change meanwhile. Codes are dropped when the values of a weight are freed. Those that
    are gathered in their place stay as they are.
    """
    every = (each for network in networks for each in network.parameters() if isinstance(each, Parameter))
    weights = [each for each in every if not each.keeps_codes]
    for weight in weights:
        weight.keeps_codes = True
    try:
        yield
    finally:
        for weight in weights:
            weight.keeps_codes, weight.codes = False, None
