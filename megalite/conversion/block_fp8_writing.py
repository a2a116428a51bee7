"""Weights in blocks of fp8 (e4m3), as `block_fp8.py` reads them: which matrices become blocks, and their tiles.

Those of linear layers and experts are in blocks, as in the published files of DeepSeek-V3. Embedding, output layer,
router, norms, biases, convolutions, what makes decays, and an indexer's weights of its heads stay as they are. Codes and
scales are those that products have with `--fp8-recipe blockwise` where their tiles cover the same rows.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.tensors import Kind, Source
from megalite.conversion.block_fp8 import SCALE, TILE, tiles_of
from megalite.conversion.mapping import FileTensor, LastTensor
from megalite.errors import CheckpointError
from megalite.parallel.sharding import Box
from megalite_kernels.recipes import recipe
from megalite_kernels.tiles import Tiles, quantize_weight

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


def quantization_config(mapping: Iterable[FileTensor], chosen: Container[str]) -> dict[str, Any]:
    """Return what config.json says of files whose `chosen` tensors are in blocks, with all other matrices by name."""
    plain = [each.name for each in mapping if len(each.shape) == 2 and each.name not in chosen]
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [TILE, TILE],
        "activation_scheme": "dynamic",
        "modules_to_not_convert": [name.removesuffix(_WEIGHT) for name in plain if name.endswith(_WEIGHT)],
    }


class InBlocks:
    """Tensors of files, some of them as codes beside their scales (a `Source`), made by rows of tiles."""

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
        elif matrix != name:
            for row, own in zip(box.indices(0), values, strict=True):
                own.copy_(self._tiles(matrix, row).scales[0, box.slices()[1]])
        else:
            for row, rows in _rows_of_tiles(box):
                codes = self._last.get((name, row), partial(self._codes, name, row))
                first = row * TILE
                part = codes[rows.start - first : rows.stop - first, box.slices()[1]]
                values[rows.start - box.offset[0] : rows.stop - box.offset[0]].copy_(part)

    def _codes(self, matrix: str, row: int) -> Tensor:
        return self._tiles(matrix, row).codes

    def _tiles(self, matrix: str, row: int) -> Tiles:
        """Return a row of tiles of a matrix."""
        kind = self._source.tensors[matrix]
        rows, columns = kind.shape
        band = Box((row * TILE, 0), (min(TILE, rows - row * TILE), columns))
        values = torch.empty(band.size, dtype=kind.dtype)
        self._source.fill(matrix, band, values)
        tiles = quantize_weight(values, _RECIPE).forward
        if not tiles.scales.isfinite().all():
            raise CheckpointError(
                f"{matrix} has NaN or infinities in rows {band.offset[0]:,} to {band.offset[0] + band.size[0] - 1:,}, "
                "which blocks of fp8 cannot hold: write it without --quantize"
            )
        return tiles


def _rows_of_tiles(box: Box) -> Iterator[tuple[int, range]]:
    """Yield the rows of tiles that a box meets, each with the box's rows in it."""
    rows = box.indices(0)
    for row in range(rows.start // TILE, -(-rows.stop // TILE)):
        yield row, range(max(rows.start, row * TILE), min(rows.stop, (row + 1) * TILE))
