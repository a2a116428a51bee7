"""Products of tiles: torch's scaled products on GPUs that have them, else an emulation with the same bits everywhere.

The emulation multiplies codes in float64 block by block. The sum of a block is exact in any order for up to 2^17
products of e4m3 codes. It is multiplied with its two scales, one after the other, and blocks are added in order. With
two levels of scales, codes times their e4m3 scales are multiplied, whose sums are exact for up to 1,024 columns; sums
of so many are added in order, and multiplied with the two scales of their rows. So neither threads nor other rows
change a number. Sums with e5m2 codes, whose range is wider, are exact to float64's rounding.

On a GPU, sums of a block are in fp32 or, within tensor cores, in fewer bits: benchmarks/gpu_check.sh measures how far
they are from the emulation.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite_kernels.implementation import current, on_gpu
from megalite_kernels.launch import chunk_elements
from megalite_kernels.recipes import Recipe
from megalite_kernels.tile_scales import Tiles
from megalite_kernels.tiles import values_of

EXACT_COLUMNS = 1024  # of products of e2m1 codes and their e4m3 scales
SCALES_OF_SQUARES = 4  # blocks of a column of scales: cuBLAS reads 16 bytes of them at once


@cache
def refusal(recipe: Recipe, device: torch.device) -> str | None:
    """Return why products of this recipe do not run on this device, in one line, or None if they do."""
    if not on_gpu(device):
        return None
    if recipe.name not in ("tensorwise", "blockwise"):
        return f"{recipe.name} runs on CPUs alone, emulated: no GPU that multiplies in it has run it yet"
    if device.type != "cuda":  # a plan
        return None
    if torch.version.hip is not None:
        return f"{recipe.name} runs on NVIDIA's GPUs and, emulated, on CPUs"
    capability = torch.cuda.get_device_capability(device)
    if recipe.name == "tensorwise":
        return (
            None
            if capability >= (8, 9)
            else f"tensorwise needs a GPU with fp8 (compute capability 8.9), not {_dotted(capability)}"
        )
    cuda = tuple(map(int, (torch.version.cuda or "0").split(".")[:2]))
    if capability[0] != 9 or cuda < (12, 9):
        return (
            f"blockwise needs a Hopper GPU (compute capability 9.0) and CUDA 12.9 or later, "
            f"not {_dotted(capability)} and {torch.version.cuda}"
        )
    return None


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def product(a: Tiles, b: Tiles, recipe: Recipe, dtype: torch.dtype) -> Tensor:
    """Return a @ b.T of tiles [rows, columns] and [outputs, columns], [rows, outputs].

    The emulation returns float64 as it is; other dtypes are rounded to fp32 first.

    Raises:
        ValueError: the device has no such product, see `refusal`, or not for these widths.
    """
    if not on_gpu(a.codes) or dtype == torch.float64 or current().choice == "reference":
        return product_reference(a, b, recipe, dtype)
    if problem := refusal(recipe, a.codes.device):
        raise ValueError(problem)
    (rows, columns), outputs = a.codes.shape, len(b.codes)
    unit = recipe.block or 16
    if columns % unit or outputs % unit:
        raise ValueError(
            f"a {recipe.name} product of {columns} columns and {outputs} outputs: a GPU multiplies multiples of {unit}"
        )
    if not rows:
        return a.codes.new_empty(0, outputs, dtype=dtype)
    kind = F.ScalingType
    if not recipe.block:
        scales = ((a.scales, kind.TensorWise), (b.scales, kind.TensorWise))
    else:
        padded = F.pad(b.scales, (0, -b.scales.shape[1] % SCALES_OF_SQUARES)).contiguous()
        scales = ((a.scales.t().contiguous().t(), kind.BlockWise1x128), (padded.t(), kind.BlockWise128x128))
    return F.scaled_mm(a.codes, b.codes.contiguous().t(), *scales[0], *scales[1], output_dtype=dtype)


def grouped_product(a: Tiles, b: Sequence[Tiles], offsets: Sequence[int], recipe: Recipe, dtype: torch.dtype) -> Tensor:
    """Multiply each row with the matrix of its group: tiles [rows, columns], each [outputs, columns].

    It is a product for each group: torch's grouped scaled product takes no scales of blocks in fp32.

    Args:
        offsets: [groups + 1], from 0 to the number of rows: group g has the rows from offsets[g] to offsets[g + 1].
    """
    output = a.codes.new_empty(len(a.codes), len(b[0].codes), dtype=dtype)
    for matrix, (start, stop) in zip(b, pairwise(offsets), strict=True):
        if start < stop:
            output[start:stop] = product(rows_of(a, start, stop), matrix, recipe, dtype)
    return output


def rows_of(tiles: Tiles, start: int, stop: int) -> Tiles:
    """Return the tiles of some rows of activations or gradients; a tensor's one scale stays."""
    codes, scales, outer = tiles
    of_rows = scales[start:stop] if scales.dim() else scales
    return Tiles(codes[start:stop], of_rows, None if outer is None else outer[start:stop])


# ------------------------------------------------------------------------------------------------- the emulation


def product_reference(a: Tiles, b: Tiles, recipe: Recipe, dtype: torch.dtype) -> Tensor:
    output = torch.empty(len(a.codes), len(b.codes), dtype=dtype, device=a.codes.device)
    second = _factors(b, recipe)
    size = max(chunk_elements(output.device) // max(len(b.codes), 1), 1)  # for temporaries that stay in the cache
    for start in range(0, len(output), size):
        found = _sums(_factors(rows_of(a, start, start + size), recipe), second, recipe)
        if a.outer is not None and b.outer is not None:
            found *= a.outer[start : start + size, None].double()
            found *= b.outer.double()
        output[start : start + size] = found if dtype == torch.float64 else found.float()
    return output


def _factors(tiles: Tiles, recipe: Recipe) -> tuple[Tensor, Tensor | None]:
    """Return factors of exact sums [rows, columns] in float64, and the scales of each block, [rows or 1, blocks]."""
    codes = values_of(tiles.codes, torch.float64)
    scales, rows, columns = tiles.scales.double(), *codes.shape
    if recipe.scaling == "two levels":
        return codes.mul_(scales.repeat_interleave(recipe.block, 1)[:, :columns]), None
    if recipe.block and len(scales) != rows:
        scales = scales.repeat_interleave(recipe.block, 0)[:rows]
    return codes, scales.view(-1, max(scales.shape[-1] if scales.dim() else 1, 1))


def _sums(a: tuple[Tensor, Tensor | None], b: tuple[Tensor, Tensor | None], recipe: Recipe) -> Tensor:
    """Add the products of blocks, each times its scales, in order."""
    (first, first_scales), (second, second_scales) = a, b
    size = EXACT_COLUMNS if first_scales is None else recipe.block or max(first.shape[1], 1)
    total, found = (first.new_zeros(len(first), len(second)) for _ in range(2))
    for part, start in enumerate(range(0, first.shape[1], size)):
        torch.mm(first[:, start : start + size], second[:, start : start + size].t(), out=found)
        if first_scales is not None and second_scales is not None:
            found.mul_(first_scales[:, part, None]).mul_(second_scales[:, part])
        total += found
    return total
