"""Products of linear layers with operands in 8 or 4 bits by a recipe.

A scale is for a part of one token's row, or for a tile of a weight, and ranks split rows where these end: so codes and
scales are the same on every layout. Of a tensor with one scale, all ranks that have a part of it take the largest
value; of a row with one, those that split it.

A backward has the codes of the input, and not its values, whose memory is freed. The gradient of a weight is that of
the product which the forward computed: of the output's gradient and of what these codes stand for. Where a backward
computes an activation again (the second matrix of experts, and with stored activations that of dense layers), it is of
what the activation returns there, unrounded. Only if asked are both rounded for it: their blocks run along tokens,
which follow the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from megalite.parallel import collectives
from megalite.parallel.mesh import Group
from megalite.parallel.parameter import Coded, DenseGradient, Gradient, LateGradient, Parameter
from megalite.parallel.products import ALONE, KeptInput, Products, as_matrix
from megalite.parallel.stage_module import Inside
from megalite_kernels.recipes import Recipe
from megalite_kernels.scaled_products import grouped_product, product
from megalite_kernels.tile_scales import Tiles, WeightTiles
from megalite_kernels.tiles import dequantize, largest, quantize, quantize_weight, transposed
from megalite_kernels.weight_parts import Matrices


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
class KeptCodes(KeptInput):
    """The input of a product, as a backward has it: its codes and scales."""

    tensors: Tiles
    rounding: Rounding

    def values(self, dtype: torch.dtype) -> Tensor:
        """See `KeptInput`."""
        return dequantize(self.tensors, self.rounding.recipe, dtype)

    def gather(self, group: Group) -> Callable[[], KeptInput]:
        """See `KeptInput`."""
        pending = _gathered(self.tensors, group)
        return lambda: replace(self, tensors=pending())

    def weight_gradient(self, gradient: Tensor, bound: Tensor | None) -> Gradient:
        """See `KeptInput`. With one scale of a tensor, the input has its codes already."""
        if not self.rounding.weight_gradients:
            return super().weight_gradient(gradient, bound)

        def made() -> Gradient:
            recipe, dtype = self.rounding.recipe, gradient.dtype
            along_tokens = quantize(gradient.t().contiguous(), recipe, recipe.backward, bound)
            if recipe.block:
                input = quantize(self.values(dtype).t().contiguous(), recipe, recipe.forward)
            else:
                input = Tiles(self.tensors.codes.t().contiguous(), self.tensors.scales)
            return DenseGradient(product(along_tokens, input, recipe, dtype))

        return LateGradient(made)


@dataclass(frozen=True)
class RoundedProducts(Products):
    """Products of operands that are rounded by a recipe.

    Attributes:
        rows: the ranks that split the outputs, as rows of the weight.
        columns: the ranks that split the inputs, as columns of the weight.
        sharers: the ranks that have parts of the same activations.
    """

    rounding: Rounding
    rows: Group = ALONE
    columns: Group = ALONE
    sharers: Group = ALONE

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

    def forward(self, input: Tensor, weight: Parameter, gathered: Group) -> tuple[Tensor, KeptInput]:
        """See `Products`. Codes are gathered, not values."""
        own = self._rounded(as_matrix(input))
        found = product(_gathered(own, gathered)(), self.tiles(weight).forward, self.rounding.recipe, input.dtype)
        return found.view(-1, *input.shape[1:-1], found.shape[1]), KeptCodes(own, self.rounding)

    def keep(self, values: Tensor, *, again: bool = False) -> KeptInput:
        """See `Products`."""
        if again and not self.rounding.weight_gradients:
            return super().keep(values)
        return KeptCodes(self._rounded(as_matrix(values)), self.rounding)

    def restored(self, tensors: tuple[Any, ...]) -> KeptInput:
        """See `Products`. Of a frozen weight, nothing is saved."""
        return KeptCodes(Tiles(*tensors), self.rounding) if tensors else super().restored(tensors)

    def bound(self, gradient: Tensor) -> Tensor | None:
        """See `Products`. If a tensor has one scale, ranks agree on it here."""
        return None if self.rounding.recipe.block else self._largest(gradient, self.sharers)

    def input_gradient(self, gradient: Tensor, weight: Parameter, gathered: Group, bound: Tensor | None) -> Tensor:
        """See `Products`."""
        every = _gathered(self._rounded(gradient, backward=True, bound=bound), gathered)()
        return product(every, self.tiles(weight).backward, self.rounding.recipe, gradient.dtype)

    def of_groups(
        self, rows: Tensor, weight: Parameter, offsets: Sequence[int], ends: Tensor, *, backward: bool = False
    ) -> tuple[Tensor, KeptInput]:
        """See `Products`. A row's scales are its own, whatever other rows a rank has of its group."""
        tiles, own = self.tiles(weight, len(offsets) - 1), self._rounded(rows, backward=backward)
        matrices = tiles.backward if backward else tiles.forward
        found = grouped_product(own, matrices, offsets, ends, self.rounding.recipe, rows.dtype)
        return found, KeptCodes(own, self.rounding)

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
        of_rows = self._largest(values, self.columns if recipe.block else self._sharers_of_weight)
        if of_rows is None or not recipe.block:
            return of_rows, None
        return of_rows, self._largest(transposed(values, groups), self.rows)

    def _largest(self, values: Tensor, group: Group) -> Tensor | None:
        """Return the largest value of a matrix, or of each row, over the ranks of a group; None: not needed."""
        top = largest(values, self.rounding.recipe)
        return None if top is None else collectives.all_reduce_(top, group, "max")

    def _rounded(self, values: Tensor, *, backward: bool = False, bound: Tensor | None = None) -> Tiles:
        """Round an input, or in backward the gradient of an output, of whose rows other ranks may have columns."""
        recipe = self.rounding.recipe
        format, over = (recipe.backward, self.rows) if backward else (recipe.forward, self.columns)
        if bound is None:
            bound = self._largest(values, over if recipe.block else self.sharers)
        return quantize(values, recipe, format, bound)


def _gathered(tiles: Tiles, group: Group) -> Callable[[], Tiles]:
    """Begin to join the rows of all ranks in one message of bytes: of each row the codes, then the scales."""
    if group.size == 1:
        return lambda: tiles
    by_row = [part for part in tiles if part is not None and part.dim()]
    sent = [part.reshape(len(part), -1).view(torch.uint8) for part in by_row]
    pending = collectives.all_gather_async(torch.cat(sent, dim=1), group)

    def wait() -> Tiles:
        found = pending.wait().split([part.shape[1] for part in sent], dim=1)
        pairs = zip(found, by_row, strict=True)
        codes, *scales = (each.contiguous().view(own.dtype).view(-1, *own.shape[1:]) for each, own in pairs)
        return Tiles(codes, *(scales or [tiles.scales]))

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
