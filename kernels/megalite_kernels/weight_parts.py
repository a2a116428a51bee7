"""Codes of a part of a weight, with the bits that `quantize_weight` gives the whole one.

Ranks that have each a part first take the largest magnitude of every tile among their elements. The maximum over ranks
is exact in any order, and all scales follow from it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite_kernels.formats import TILE_FORMATS
from megalite_kernels.recipes import Recipe
from megalite_kernels.tile_scales import Squares, Tiles, WeightTiles, scales_of
from megalite_kernels.tiles import for_both, round_to_codes


@dataclass(frozen=True)
class Matrices:
    """Matrices [out, in], one behind the other, that a recipe rounds in squares, or one with one scale.

    Attributes:
        size: (number of matrices, out, in).
    """

    recipe: Recipe
    size: tuple[int, int, int]

    @property
    def _tile(self) -> tuple[int, int]:
        """The rows and the columns of a tile."""
        return (self.recipe.block, self.recipe.block) if self.recipe.block else self.size[1:]

    @property
    def _rows_of_tiles(self) -> int:
        """The number of rows of tiles of a matrix."""
        return -(-self.size[1] // self._tile[0])

    @property
    def grid(self) -> tuple[int, int]:
        """The number of rows of tiles of all matrices, and the number of tiles of a row."""
        return self.size[0] * self._rows_of_tiles, -(-self.size[2] // self._tile[1])

    def largest(self, values: Tensor, start: int) -> Tensor:
        """Return the largest magnitude of each tile, fp32 [rows of tiles, tiles], infinity for NaN, zero without any.

        Args:
            values: elements of the flattened matrices, in any dtype.
            start: the number of the first one.
        """
        blocks, row = self._blocks(values, start)
        tops = blocks.abs().amax(-1).nan_to_num_(nan=math.inf, posinf=math.inf)
        return tops.new_zeros(self.grid).scatter_reduce_(0, row[:, None].expand_as(tops), tops, "amax")

    def scales(self, tops: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scales of any tiles, and what values are multiplied with. `tops`: maxima over ranks."""
        return scales_of(tops, self.recipe, TILE_FORMATS[self.recipe.forward].largest)

    def codes(self, values: Tensor, start: int, factors: Tensor) -> Tensor:
        """Return the codes of these elements, [elements]. `factors`: of all tiles, as `grid` says."""
        blocks, row = self._blocks(values, start)
        codes = round_to_codes(blocks * factors[row][..., None], self.recipe.forward)
        before = start % self.size[2]
        return codes.flatten(1)[:, : self.size[2]].flatten()[before : before + len(values)]

    def tiles(self, codes: Tensor, scales: Tensor) -> WeightTiles:
        """Return the operands that the matrices are, from the codes of all elements and the scales of all tiles."""
        rows = codes.view(-1, self.size[2])
        return for_both(Squares(rows, scales) if self.recipe.block else Tiles(rows, scales.view(())), self.size[0])

    def _blocks(self, values: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Return the rows that elements are of, fp32 [rows, tiles, columns of a tile], and the row of tiles of each.

        Other elements of these rows are zeros, as is what a short tile lacks.
        """
        (_, out, columns), (high, wide) = self.size, self._tile
        first, last = start // columns, -(-(start + len(values)) // columns)
        before = start - first * columns
        filled = F.pad(values.to(torch.float32), (before, (last - first) * columns - before - len(values)))
        rows = F.pad(filled.view(-1, columns), (0, -columns % wide))
        number = torch.arange(first, last, device=values.device)
        return rows.unflatten(1, (-1, wide)), number // out * self._rows_of_tiles + number % out // high
