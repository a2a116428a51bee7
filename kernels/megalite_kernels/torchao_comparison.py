"""Comparison of codes, scales and products with those of an installed torchao, whose references run on a CPU.

Compared are all vectors of `fp8_cases.py`, but for values of tiles that torchao treats otherwise on purpose, as
docs/fp8_tables.md lists them. Products are of the same codes and scales, and as near as torchao's sums are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torchao.float8.float8_training_tensor import (
    Float8TrainingTensor,
    GemmInputRole,
    LinearMMConfig,
    ScaledMMConfig,
)
from torchao.float8.float8_utils import amax_to_scale, to_fp8_saturated
from torchao.prototype.blockwise_fp8_training import kernels as blockwise
from torchao.prototype.blockwise_fp8_training.grouped_kernels import emulated_blockwise_scaled_grouped_mm
from torchao.prototype.mx_formats.kernels import pack_uint4, unpack_uint4
from torchao.prototype.mx_formats.mx_tensor import MXTensor, ScaleCalculationMode, to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, nvfp4_quantize, per_tensor_amax_to_scale
from torchao.quantization.quantize_.common import KernelPreference

from megalite_kernels.fp8_cases import COLUMNS, VARIANTS, cases, numbers, quantized, quantized_weight
from megalite_kernels.recipes import Recipe
from megalite_kernels.scaled_products import product
from megalite_kernels.tile_scales import LEAST_OUTER, Squares, Tiles
from megalite_kernels.tiles import dequantize_reference

E4M3 = torch.float8_e4m3fn
IN_FP32, IN_BF16, IN_BF16_THROUGHOUT = -16, -8, -6
"""Exponents of the largest error of a product, relative to the sum of its terms' magnitudes: of sums of 256 terms in
fp32, rounded to bf16, and of operands that are rounded to bf16, too."""


class Row(NamedTuple):
    """One line of the comparison."""

    what: str
    result: str
    agrees: bool


class Theirs(NamedTuple):
    """A recipe of torchao.

    Attributes:
        rows: makes the tiles of activations or gradients.
        weight: makes those of a weight.
        product: multiplies two operands' tiles.
        error: exponent of the product's largest error.
        least: magnitude from which the largest of a tile on it has a scale of its own.
        zeros: True if zeros are quantized to zeros.
        infinities: True if a tile with an infinity has no numbers.
    """

    rows: Callable[[Tensor], Tiles]
    weight: Callable[[Tensor], Tiles]
    product: Callable[[Tiles, Tiles], Tensor]
    error: int
    least: float = 1e-12
    zeros: bool = True
    infinities: bool = True


def compare_with_torchao() -> list[Row]:
    """Return a row for each case of each recipe, and for a weight."""
    squares, found = numbers(256, COLUMNS, 4), []
    for name, theirs in _recipes().items():
        by = VARIANTS[name]
        weight = quantized_weight(squares, by)
        found.append(Row(f"{name}, weight", *_same_tiles(squares, weight, theirs.weight(squares), by, theirs)))
        for case, values in cases(by).items():
            tiles = quantized(values, by)
            words, agrees = _same_tiles(values, tiles, theirs.rows(values), by, theirs)
            if case != "subnormal" or theirs.error == IN_FP32:  # bf16 has not the values of such tiles
                near = _near(tiles, weight, theirs.product(tiles, weight), by, 2.0**theirs.error)
                words += f"; product within 2^{theirs.error}" if near else "; product DIFFERENT"
                agrees = agrees and near
            found.append(Row(f"{name}, {case}", words, agrees))
    return found


def _recipes() -> dict[str, Theirs]:
    """Return what torchao has of the recipes of the vectors, by their names."""
    floor, up, least = _mxfp8(ScaleCalculationMode.FLOOR), _mxfp8(ScaleCalculationMode.RCEIL), 2.0**-116
    return {
        "tensorwise": Theirs(_tensorwise(E4M3), _tensorwise(E4M3), _tensorwise_product, IN_FP32),
        "tensorwise_hybrid": Theirs(_tensorwise(torch.float8_e5m2), _tensorwise(E4M3), _tensorwise_product, IN_FP32),
        "blockwise": Theirs(_powers(E4M3, 1), _powers(E4M3, 128), _blockwise_product, IN_BF16),
        "blockwise_hybrid": Theirs(_powers(torch.float8_e5m2, 1), _powers(E4M3, 128), _blockwise_product, IN_BF16),
        "blockwise_quotient": Theirs(
            lambda values: Tiles(*blockwise.torch_blockwise_scale_act_quant_lhs(values)),
            lambda values: Squares(*blockwise.torch_blockwise_scale_weight_quant(values)),
            _blockwise_product,
            IN_BF16_THROUGHOUT,
        ),
        "mxfp8": Theirs(floor, floor, _mxfp8_product, IN_FP32, least, infinities=False),
        "mxfp8_ceiling": Theirs(up, up, _mxfp8_product, IN_FP32, least, infinities=False),
        "nvfp4": Theirs(_nvfp4, _nvfp4, _nvfp4_product, IN_FP32, LEAST_OUTER * 6 * 448, zeros=False),
    }


def _tensorwise(format: torch.dtype) -> Callable[[Tensor], Tiles]:
    def quantize(values: Tensor) -> Tiles:
        factor = amax_to_scale(values.abs().amax(), format)
        return Tiles(to_fp8_saturated(values * factor, format), 1.0 / factor)

    return quantize


def _powers(format: torch.dtype, height: int) -> Callable[[Tensor], Tiles]:
    """Return what makes tiles of so many rows and 128 columns with torchao's powers of two as scales."""

    def quantize(values: Tensor) -> Tiles:
        blocks = values.unflatten(1, (-1, 128)).unflatten(0, (-1, height))
        factors = amax_to_scale(blocks.abs().amax((1, 3)), format, round_scales_to_power_of_2=True)
        codes = to_fp8_saturated(blocks * factors[:, None, :, None], format)
        return (Tiles if height == 1 else Squares)(codes.view(values.shape), 1.0 / factors)

    return quantize


def _mxfp8(mode: ScaleCalculationMode) -> Callable[[Tensor], Tiles]:
    def quantize(values: Tensor) -> Tiles:
        scales, codes = to_mx(values, E4M3, 32, mode)
        return Tiles(codes, scales)

    return quantize


def _nvfp4(values: Tensor) -> Tiles:
    outer = per_tensor_amax_to_scale(values.abs().amax(1))
    scales, pairs = nvfp4_quantize(values, 16, outer[:, None])
    return Tiles(unpack_uint4(pairs), scales, outer)


def _tensorwise_product(a: Tiles, b: Tiles) -> Tensor:
    emulated = ScaledMMConfig(emulate=True)
    flags = LinearMMConfig(emulated, emulated, emulated)
    first, second = (
        Float8TrainingTensor(codes, 1.0 / scales, torch.float32, flags, role)
        for codes, scales, role in (
            (a.codes, a.scales, GemmInputRole.INPUT),
            (b.codes.t(), b.scales, GemmInputRole.WEIGHT),
        )
    )
    return torch.mm(first, second)


def _blockwise_product(a: Tiles, b: Tiles) -> Tensor:
    found: Tensor = emulated_blockwise_scaled_grouped_mm(
        *(a.codes, b.codes.t()[None], a.scales, blockwise.BLOCKWISE_1X128_SCALING_TYPE.value),
        *(b.scales.t()[None], blockwise.BLOCKWISE_128X128_SCALING_TYPE.value),
        *(torch.tensor([len(a.codes)], dtype=torch.int32), torch.bfloat16),
    )
    return found


def _mxfp8_product(a: Tiles, b: Tiles) -> Tensor:
    first, second = (
        MXTensor(codes, scales, E4M3, 32, torch.float32, KernelPreference.EMULATED, None, False)
        for codes, scales, _ in (a, b)
    )
    return torch.mm(first, second.t())


def _nvfp4_product(a: Tiles, b: Tiles) -> Tensor:
    """Multiply what torchao's tiles stand for: it emulates no product with a scale for each row."""
    first, second = (
        NVFP4Tensor(pack_uint4(codes)[:, None], scales[:, None], 16, torch.float32, outer[:, None, None])
        for codes, scales, outer in (a, b)
        if outer is not None
    )
    return first.dequantize(torch.float32)[:, 0] @ second.dequantize(torch.float32)[:, 0].t()


# ------------------------------------------------------------------------------------------------- what is the same


def _same_tiles(values: Tensor, ours: Tiles, theirs: Tiles, by: Recipe, rules: Theirs) -> tuple[str, bool]:
    """Compare the bits of codes and scales, and return the result in words, and whether they are the same.

    Of tiles of zeros the codes count alone, since their scales mean nothing, and of tiles with values that are no
    numbers that both stand for NaN.
    """
    shape = values.shape
    width = COLUMNS if by.scaling == "two levels" else by.block or values.numel()
    top = values.reshape(-1, width).abs().amax(1, keepdim=True).expand(-1, width).reshape(shape)
    codes = _bits(ours.codes) == _bits(theirs.codes)
    scales = ours._replace(scales=_bits(ours.scales) == _bits(theirs.scales)).scales_of_rows(by.block)
    scales = scales.repeat_interleave(by.block, 1) if by.block else scales
    if ours.outer is not None and theirs.outer is not None:
        scales = scales & (ours.outer == theirs.outer)[:, None]
    number, zero = top.isfinite() & (top >= rules.least), (top == 0.0) & rules.zeros
    none = top.isnan() | (top.isinf() & rules.infinities)
    nans = [dequantize_reference(tiles, by, torch.float64).isnan() for tiles in (ours, theirs)]
    same = torch.where(number, codes & scales, torch.where(none, nans[0] & nans[1], codes))
    judged = number | zero | none
    if not same[judged].all():
        return "codes or scales DIFFERENT", False
    if not judged.any():
        return "codes and scales not compared", True
    what = "codes" if zero.all() else "codes and scales"
    part = "" if judged.all() else f" for {int(judged.sum()):,} of {judged.numel():,} values"
    return f"{what} equal{part}", True


def _bits(part: Tensor) -> Tensor:
    return part.contiguous().view(torch.uint8 if part.itemsize == 1 else torch.int32)


def _near(a: Tiles, b: Tiles, theirs: Tensor, by: Recipe, tolerance: float) -> bool:
    """Tell whether a product is within the tolerance of the exact one of the same tiles, and NaN where that is."""
    ours = product(a, b, by, torch.float64)
    first, second = (dequantize_reference(tiles, by, torch.float64).abs() for tiles in (a, b))
    error, terms = (theirs.double() - ours).abs(), first @ second.t()
    return torch.equal(ours.isnan(), theirs.isnan()) and bool((error <= tolerance * terms)[~ours.isnan()].all())
