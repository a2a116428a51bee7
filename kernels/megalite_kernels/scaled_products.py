"""Products of tiles: on GPUs torch's or those of Triton's kernel, else an emulation with the same bits everywhere.

With a scale for a tensor they are torch's. With scales for blocks, torch has a product on Hopper alone, of activations,
a multiple of four rows, and a weight whose widths are multiples of a block. Triton's kernel is for all others, those of
experts, which are one launch whatever the number of groups, and those along tokens, whose operands both have scales of
parts of rows.

The emulation multiplies codes in float64 block by block. The sum of a block is exact in any order for up to 2^17
products of e4m3 codes. It is multiplied with its two scales, one after the other, and blocks are added in order. With
two levels of scales, codes times their e4m3 scales are multiplied, whose sums are exact for up to 1,024 columns; sums
of so many are added in order, and multiplied with the two scales of their rows. So neither threads nor other rows
change a number. Sums with e5m2 codes, whose range is wider, are exact to float64's rounding.

On a GPU, sums of a block are in fp32 or, within tensor cores, in fewer bits: benchmarks/gpu_check.sh measures how far
they are from the emulation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite_kernels.implementation import current, is_installed, on_gpu
from megalite_kernels.launch import chunk_elements
from megalite_kernels.recipes import Recipe
from megalite_kernels.tile_scales import Squares, Tiles
from megalite_kernels.tiles import filled, values_of

EXACT_COLUMNS = 1024  # of products of e2m1 codes and their e4m3 scales
UNIT = 16  # widths of torch's products are multiples of it
SCALES_AT_ONCE = 4  # of a column of scales, of which cuBLAS reads 16 bytes at once


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
    if (capability := torch.cuda.get_device_capability(device)) < (8, 9):
        dotted = ".".join(map(str, capability))
        return f"{recipe.name} needs a GPU with fp8 (compute capability 8.9), not {dotted}"
    if recipe.block and not is_installed():
        return f"{recipe.name} needs Triton on a GPU, which is not installed: pip install triton"
    return None


def product(a: Tiles, b: Tiles, recipe: Recipe, dtype: torch.dtype) -> Tensor:
    """Return a @ b.T of tiles [rows, columns] and [outputs, columns], [rows, outputs].

    The emulation returns float64 as it is; other dtypes are rounded to fp32 first.

    Raises:
        ValueError: the device has no such product, see `refusal`, or not for so many outputs.
    """
    if _is_emulated(a, recipe, dtype):
        return product_reference(a, b, recipe, dtype)
    if recipe.block and not _takes_scaled_mm(a, b, recipe):
        return _by_triton(a, b, None, recipe, dtype)
    return _by_torch(a, b, recipe, dtype)


def grouped_product(
    a: Tiles, b: Tiles, offsets: Sequence[int], ends: Tensor, recipe: Recipe, dtype: torch.dtype
) -> Tensor:
    """Multiply each row with the matrix of its group: tiles [rows, columns] and [groups * outputs, columns].

    A recipe with one scale for a tensor has no such product.

    Args:
        offsets: [groups + 1], from 0 to the number of rows: group g has the rows from offsets[g] to offsets[g + 1].
        ends: offsets[1:] as an int32 tensor on the device.

    Raises:
        ValueError: the device has no such product, see `refusal`.
    """
    if recipe.block and not _is_emulated(a, recipe, dtype):
        return _by_triton(a, b, ends, recipe, dtype)
    groups = len(offsets) - 1
    output = a.codes.new_empty(len(a.codes), len(b.codes) // groups, dtype=dtype)
    for matrix, (start, stop) in zip(each_of(b, groups), pairwise(offsets), strict=True):
        if start < stop:
            output[start:stop] = product(rows_of(a, start, stop), matrix, recipe, dtype)
    return output


def _is_emulated(a: Tiles, recipe: Recipe, dtype: torch.dtype) -> bool:
    """Tell whether the product is emulated. Raises ValueError if it is not, and the device has none."""
    if dtype == torch.float64 or current().choice == "reference":
        return True
    if problem := refusal(recipe, a.codes.device):  # of a GPU
        raise ValueError(problem)
    return not (on_gpu(a.codes) or (recipe.in_squares and current().runs_triton("scaled_products", a.codes)))


def _takes_scaled_mm(a: Tiles, b: Tiles, recipe: Recipe) -> bool:
    """Tell whether torch has the product: of rows and squares of whole blocks, on Hopper. Plans are of such GPUs."""
    device = b.codes.device
    on_hopper = device.type == "meta" or (device.type == "cuda" and torch_multiplies_blocks(device))
    whole = isinstance(b, Squares) and not any(width % recipe.block for width in b.codes.shape)
    return on_hopper and whole and len(a.codes) % SCALES_AT_ONCE == 0


@cache
def torch_multiplies_blocks(device: torch.device) -> bool:
    """Tell whether torch has products with scales of blocks on a GPU: on Hopper, with CUDA 12.9."""
    cuda = tuple(map(int, (torch.version.cuda or "0").split(".")[:2]))
    return torch.cuda.get_device_capability(device)[0] == 9 and cuda >= (12, 9)


def _by_torch(a: Tiles, b: Tiles, recipe: Recipe, dtype: torch.dtype) -> Tensor:
    """Multiply tiles with one scale, or rows and squares of whole blocks. Raises ValueError for some widths."""
    rows, outputs = len(a.codes), len(b.codes)
    if outputs % UNIT:
        raise ValueError(f"a {recipe.name} product has {outputs} outputs: a GPU's have multiples of {UNIT}")
    if not rows:
        return a.codes.new_empty(0, outputs, dtype=dtype)
    kind = F.ScalingType
    if not recipe.block:
        scales = ((a.scales, kind.TensorWise), (b.scales, kind.TensorWise))
    else:
        missing = -b.scales.shape[1] % SCALES_AT_ONCE
        padded = F.pad(b.scales, (0, missing)) if missing else b.scales.contiguous()
        scales = ((a.scales.t().contiguous().t(), kind.BlockWise1x128), (padded.t(), kind.BlockWise128x128))
    first, second = filled(a.codes, UNIT), filled(b.codes, UNIT)  # columns of a weight gradient are tokens
    return F.scaled_mm(first, second.t(), *scales[0], *scales[1], output_dtype=dtype)


def _by_triton(a: Tiles, b: Tiles, ends: Tensor | None, recipe: Recipe, dtype: torch.dtype) -> Tensor:
    from megalite_kernels.scaled_products_kernels import launch_product

    return launch_product(a, b, ends, recipe.block, dtype)


def each_of(tiles: Tiles, number: int) -> Iterator[Tiles]:
    """Yield the tiles of each of so many matrices, one below the other."""
    parts = ([None] * number if part is None else part.unflatten(0, (number, -1)) for part in tiles)
    return (type(tiles)(*matrix) for matrix in zip(*parts, strict=True))


def rows_of(tiles: Tiles, start: int, stop: int) -> Tiles:
    """Return the tiles of some rows of activations or gradients; a tensor's one scale stays."""
    of_rows = tiles.scales[start:stop] if tiles.scales.dim() else tiles.scales
    return Tiles(tiles.codes[start:stop], of_rows, None if tiles.outer is None else tiles.outer[start:stop])


# ------------------------------------------------------------------------------------------------- the emulation


def product_reference(a: Tiles, b: Tiles, recipe: Recipe, dtype: torch.dtype) -> Tensor:
    output = torch.empty(len(a.codes), len(b.codes), dtype=dtype, device=a.codes.device)
    second = _factors(b, recipe)
    size = max(chunk_elements(output.device) // max(len(b.codes), 1), 1)  # for temporaries that stay in the cache
    for start in range(0, len(output), size):
        found = _sums(_factors(rows_of(a, start, start + size), recipe), second, recipe)
        if a.outer is not None and b.outer is not None:
            found.mul_(a.outer[start : start + size, None].double()).mul_(b.outer.double())
        output[start : start + size] = found if dtype == torch.float64 else found.float()
    return output


def _factors(tiles: Tiles, recipe: Recipe) -> tuple[Tensor, Tensor | None]:
    """Return factors of exact sums [rows, columns] in float64, and the scales of each block, [rows or 1, blocks]."""
    codes, scales = values_of(tiles.codes, torch.float64), tiles.scales_of_rows(recipe.block).double()
    if recipe.scaling == "two levels":
        return codes.mul_(scales.repeat_interleave(recipe.block, 1)[:, : codes.shape[1]]), None
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
