"""Weights in blocks of fp8 (e4m3), as `block_fp8.py` reads them: which matrices become blocks, and their tiles.

Those of linear layers and experts are in blocks, as in the published files of DeepSeek-V3. Embedding, output layer,
router, norms, biases, convolutions, what makes decays, and an indexer's weights of its heads stay as they are. Codes
and scales are those that products have with `--fp8-recipe blockwise` where their tiles cover the same rows.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.manifest import BLOCK
from megalite.checkpoint.tensors import Kind, Source
from megalite.conversion.block_fp8 import SCALE, TILE, tiles_of
from megalite.conversion.mapping import FileTensor, LastTensor
from megalite.errors import CheckpointError
from megalite.parallel.sharding import Box
from megalite_kernels.recipes import recipe
from megalite_kernels.tile_scales import Tiles
from megalite_kernels.tiles import quantize_weight

_MATRICES = re.compile(
    r"""(layers|mtp)\..*\.(
        attention\.(query|key_value|gate|output)
        | latent_attention\.(query|query_down|query_up|key_value_down|key_value_up|output|indexer\.(query|key))
        | mlp\.(gate_up|up|down) | moe\.(gate_up|up|down|latent_down|latent_up) | moe\.shared\.(gate_up|up|down)
        | mamba\.(z|x|B|C|dt|output) | gated_delta\.(query|key|value|z|output) | kimi_delta\.(query|key|value|output)
        | short_convolution\.(B|C|x|output)
    )""",
    re.VERBOSE,
)
"""Names of the logical tensors in blocks."""
_RECIPE = recipe("blockwise")
_WEIGHT = ".weight"


def matrices(mapping: Iterable[FileTensor]) -> dict[str, FileTensor]:
    """Return the tensors of files that are written in blocks, by name.

    Raises CheckpointError if one is no matrix [outputs, inputs], which no program reads in blocks.
    """
    found = {}
    for tensor in mapping:
        if not all(_MATRICES.fullmatch(logical) for logical, _, _ in tensor.boxes):
            continue
        view = tensor.boxes[0][2](torch.empty(tensor.shape, device="meta"))
        if len(tensor.shape) != 2 or view.stride(-1) != 1 or not tensor.name.endswith(_WEIGHT):
            raise CheckpointError(
                f"{tensor.name} {list(tensor.shape)} of this family is not one matrix [outputs, inputs], as it must be "
                "to be written in blocks of fp8: write it without --quantize"
            )
        found[tensor.name] = tensor
    return found


def quantization_config(mapping: Iterable[FileTensor], chosen: Iterable[str], head: str) -> dict[str, Any]:
    """Return what config.json says of files whose `chosen` tensors are in blocks, with all other matrices by name.

    `head`: name of the output layer, which is a matrix of other programs also if it is tied.
    """
    others = {*chosen, head}
    plain = [each.name for each in mapping if len(each.shape) == 2 and each.name not in others]
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [TILE, TILE],
        "activation_scheme": "dynamic",
        "modules_to_not_convert": [name.removesuffix(_WEIGHT) for name in (*plain, head) if name.endswith(_WEIGHT)],
    }


class InBlocks:
    """Tensors of files, some of them as codes beside their scales (a `Source`), made by bands: some rows of tiles."""

    def __init__(self, source: Source, chosen: Container[str]) -> None:
        """Create the source. `chosen`: names of the matrices in blocks."""
        self._source, self._chosen, self._last = source, chosen, LastTensor()
        self.tensors: dict[str, Kind] = {}
        for name, kind in source.tensors.items():
            self.tensors[name] = kind
            if name in chosen:
                self.tensors[name] = Kind(kind.shape, torch.float8_e4m3fn)
                self.tensors[name + SCALE] = Kind(tiles_of(kind.shape), torch.float32)

    def fill(self, name: str, box: Box, values: Tensor) -> None:
        """Fill `values` with a box of codes or scales. Raises CheckpointError if a weight is not finite."""
        matrix = name.removesuffix(SCALE)
        if matrix not in self._chosen:
            self._source.fill(name, box, values)
            return
        make, step = self._codes, self._rows_of_band(matrix)
        if matrix != name:
            make, step = self._scales, step // TILE
        for band in range(box.offset[0] // step, -(-(box.offset[0] + box.size[0]) // step)):
            made = self._last.get((name, band), partial(make, matrix, band))
            held = Box((band * step, 0), tuple(made.shape))
            both = held.intersection(box)
            if both is not None:
                values[both.relative_to(box).slices()].copy_(made[both.relative_to(held).slices()])

    def _rows_of_band(self, matrix: str) -> int:
        """Return the number of rows of a band, of about a block of a checkpoint's file: a multiple of a tile's."""
        kind = self._source.tensors[matrix]
        return TILE * max(BLOCK // (TILE * kind.shape[1] * kind.dtype.itemsize), 1)

    def _codes(self, matrix: str, band: int) -> Tensor:
        return self._band(matrix, band).codes

    def _scales(self, matrix: str, band: int) -> Tensor:
        return self._band(matrix, band).scales

    def _band(self, matrix: str, band: int) -> Tiles:
        """Read a band of a matrix and quantize it. Raises CheckpointError if it is not finite."""
        kind, step = self._source.tensors[matrix], self._rows_of_band(matrix)
        first, (rows, columns) = band * step, kind.shape
        values = torch.empty(min(step, rows - first), columns, dtype=kind.dtype)
        self._source.fill(matrix, Box((first, 0), tuple(values.shape)), values)
        tiles = quantize_weight(values, _RECIPE).forward
        if not tiles.scales.isfinite().all():
            raise CheckpointError(
                f"{matrix} has NaN or infinities in rows {first:,} to {first + len(values) - 1:,}, which blocks of fp8 "
                "cannot hold: write it without --quantize"
            )
        return tiles
