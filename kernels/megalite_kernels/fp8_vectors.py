"""Vectors for tests of any program that computes in few bits, and a comparison with one that is installed.

    python -m megalite_kernels.fp8_vectors --write FILE     # codes, scales and products, as safetensors
    python -m megalite_kernels.fp8_vectors --check torchao

docs/fp8_tables.md describes the file. The numbers are the same on every machine. Exit code 0: written, or all is equal;
1: the other program has other numbers; 2: it is not installed; 3: the file cannot be written.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megalite_kernels.recipes import Recipe, recipe
from megalite_kernels.scaled_products import product
from megalite_kernels.tile_scales import Tiles
from megalite_kernels.tiles import dequantize, largest, quantize_reference, quantize_weight, values_of

COLUMNS = 256
WEIGHT = (144, COLUMNS)  # its last squares are short
VARIANTS = {
    "tensorwise": recipe("tensorwise"),
    "blockwise": recipe("blockwise"),
    "blockwise_quotient": replace(recipe("blockwise"), scaling="quotient"),
    "mxfp8": recipe("mxfp8"),
    "mxfp8_ceiling": replace(recipe("mxfp8"), scaling="ceiling"),
    "nvfp4": recipe("nvfp4"),
}
"""Recipes by their names in the file; those that are not megalite's are what other programs do by default."""
EXIT_DIFFERENT, EXIT_NOT_INSTALLED, EXIT_NOT_WRITTEN = 1, 2, 3
PRODUCT_TOLERANCE = 2.0**-8
"""Error of torchao's emulated product, rounded to bf16, relative to the sum of the magnitudes of its terms."""


def numbers(rows: int, columns: int, seed: int) -> Tensor:
    """Return numbers of many sizes, of 16 significant bits, that depend on the seed alone."""
    draw = random.Random(seed).getrandbits
    drawn = [(draw(17) - 2**16) * 2.0 ** (draw(3) - 20) for _ in range(rows * columns)]
    return torch.tensor(drawn, dtype=torch.float32).view(rows, columns)


def ties(by: Recipe) -> Tensor:
    """Return rows with every code and the middle of each two, of both signs; tiles have powers of two as scales."""
    e2m1 = by.forward == torch.float4_e2m1fn_x2
    codes = torch.arange(8 if e2m1 else 127, dtype=torch.uint8)
    known = values_of(codes if e2m1 else codes.view(by.forward), torch.float32)
    found = torch.cat([known, (known[1:] + known[:-1]) / 2])
    found = torch.cat([found, -found])
    width = (by.block or COLUMNS) - 1  # the first of each tile is the largest code
    tiles = _filled(found, width, known[-1])
    rows = _filled(torch.cat([known[-1].expand(len(tiles), 1), tiles], 1).flatten(), COLUMNS, known[-1])
    if e2m1:
        rows = rows * 256.0
        rows[:, -1] = 6.0 * 448.0  # so that the row's scale is 1
    return rows


def _filled(values: Tensor, width: int, last: Tensor) -> Tensor:
    """Return values as rows of this width, the last one filled up."""
    return torch.cat([values, last.expand(-len(values) % width)]).view(-1, width)


def cases(by: Recipe) -> dict[str, Tensor]:
    """Return fp32 values [rows, 256] by what is hard about them."""
    subnormal, zero, bad = numbers(3, COLUMNS, 1), torch.zeros(2, COLUMNS), numbers(3, COLUMNS, 2)
    subnormal = subnormal * torch.tensor([[2.0**-130], [2.0**-126], [2.0**-70]])
    zero[1] = -0.0
    bad[0, 5], bad[1, 140], bad[2, 255] = float("inf"), -float("inf"), float("nan")
    return {"tie": ties(by), "subnormal": subnormal, "zero": zero, "infinite": bad, "random": numbers(8, COLUMNS, 3)}


def _quantized(values: Tensor, by: Recipe) -> Tiles:
    return quantize_reference(values, by, by.forward, largest(values, by))


def _weight(values: Tensor, by: Recipe) -> Tiles:
    return _quantized(values, by) if by.block == 32 else quantize_weight(values, by).forward


def vectors() -> dict[str, Tensor]:
    """Return all tensors of the file by name, codes and scales of 8 bits as uint8."""
    weight = numbers(*WEIGHT, 4)
    found = {"weight/values": weight}
    for name, by in VARIANTS.items():
        tiles = _weight(weight, by)
        found |= _named(f"{name}/weight", tiles)
        for case, values in cases(by).items():
            found[f"{name}/{case}/values"] = values
            found |= _named(f"{name}/{case}", _quantized(values, by))
        found[f"{name}/product"] = product(_quantized(cases(by)["random"], by), tiles, by, torch.float64)
    return found


def _named(name: str, tiles: Tiles) -> dict[str, Tensor]:
    parts = {"codes": tiles.codes, "scales": tiles.scales, "outer": tiles.outer}
    return {
        f"{name}/{part}": tensor.contiguous().view(torch.uint8) if tensor.itemsize == 1 else tensor.contiguous()
        for part, tensor in parts.items()
        if tensor is not None
    }


# ------------------------------------------------------------------------------------------------- other programs


def compare_with_torchao() -> dict[str, bool]:
    """Return, by what was compared, whether torchao has the same codes and scales, and products as near as bf16 is.

    Tiles that it treats otherwise on purpose are left out: those with an infinity, and of less than 1e-12.
    """
    from torchao.float8.float8_utils import amax_to_scale, to_fp8_saturated
    from torchao.prototype.blockwise_fp8_training import kernels as blockwise
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    format = torch.float8_e4m3fn

    def tensorwise(values: Tensor) -> tuple[Tensor, ...]:
        scale = amax_to_scale(values.abs().amax(), format)
        return to_fp8_saturated(values * scale, format), 1.0 / scale

    def mxfp8(values: Tensor, mode: ScaleCalculationMode) -> tuple[Tensor, ...]:
        scales, codes = to_mx(values, format, 32, mode)
        return codes, scales

    def nvfp4(values: Tensor) -> tuple[Tensor, ...]:
        outer = per_tensor_amax_to_scale(values.abs().amax(1))
        scales, pairs = nvfp4_quantize(values, 16, outer[:, None])
        return torch.stack((pairs & 15, pairs >> 4), -1).flatten(1), scales, outer

    theirs: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
        "tensorwise": tensorwise,
        "blockwise_quotient": blockwise.torch_blockwise_scale_act_quant_lhs,
        "mxfp8": lambda values: mxfp8(values, ScaleCalculationMode.FLOOR),
        "mxfp8_ceiling": lambda values: mxfp8(values, ScaleCalculationMode.RCEIL),
        "nvfp4": nvfp4,
    }
    found = {}
    for name, quantize in theirs.items():
        for case in ("tie", "random"):
            values = cases(VARIANTS[name])[case]
            found[f"{name}, {case}"] = _equal(_quantized(values, VARIANTS[name]), quantize(values))
    squares = numbers(256, COLUMNS, 4)
    weight = _weight(squares, VARIANTS["blockwise_quotient"])
    found["blockwise_quotient, weight"] = _equal(weight, blockwise.torch_blockwise_scale_weight_quant(squares))
    return found | {"blockwise, product": _product_agrees(squares)}


def _equal(ours: Tiles, theirs: Sequence[Tensor]) -> bool:
    """Compare the bits, and scales that are powers of two by their exponents."""
    pairs = zip((part for part in ours if part is not None), theirs, strict=True)
    return all(torch.equal(_bits(one, other), _bits(other, one)) for one, other in pairs)


def _bits(part: Tensor, like: Tensor) -> Tensor:
    if part.itemsize == 4 and like.itemsize == 1:
        part = (part.view(torch.int32) >> 23).to(torch.uint8)
    return part.contiguous().reshape(-1).view(torch.uint8)


def _product_agrees(squares: Tensor) -> bool:
    """Tell whether torchao's emulated product of the same tiles is within the tolerance."""
    from torchao.prototype.blockwise_fp8_training import kernels as blockwise
    from torchao.prototype.blockwise_fp8_training.grouped_kernels import emulated_blockwise_scaled_grouped_mm

    by = VARIANTS["blockwise"]
    a, b = _quantized(cases(by)["random"], by), _weight(squares, by)
    theirs = emulated_blockwise_scaled_grouped_mm(
        *(a.codes, b.codes.t()[None], a.scales, blockwise.BLOCKWISE_1X128_SCALING_TYPE.value),
        *(b.scales.t()[None], blockwise.BLOCKWISE_128X128_SCALING_TYPE.value),
        *(torch.tensor([len(a.codes)], dtype=torch.int32), torch.bfloat16),
    )
    terms = dequantize(a, by, torch.float64).abs() @ dequantize(b, by, torch.float64).abs().t()
    error = (theirs.double() - product(a, b, by, torch.float64)).abs() / terms
    return error.max().item() <= PRODUCT_TOLERANCE


def _write(path: Path, data: bytes) -> None:
    """Write a file that appears under its name complete, or not at all. Raises OSError, also if a device is there."""
    if path.exists() and not path.is_file():
        raise OSError(None, "it is no regular file")
    temporary = path.parent / f"{path.name}.{os.getpid()}.tmp"
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the vectors, or compare a program with them, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--write", metavar="FILE", help="write the vectors")
    chosen.add_argument("--check", choices=("torchao",), help="compare an installed program")
    flags = parser.parse_args(arguments)
    if flags.write:
        from safetensors.torch import save

        found = vectors()
        try:
            _write(Path(flags.write), save(found))
        except OSError as error:
            print(f"fp8_vectors: --write {flags.write}: cannot be written: {error.strerror}", file=sys.stderr)
            return EXIT_NOT_WRITTEN
        print(f"{flags.write}: {len(found)} tensors")
        return 0
    if importlib.util.find_spec(flags.check) is None:
        print(f"fp8_vectors: {flags.check} is not installed here: pip install {flags.check}", file=sys.stderr)
        return EXIT_NOT_INSTALLED
    rows = compare_with_torchao()
    for name, same in rows.items():
        print(f"{name}: {'equal' if same else 'DIFFERENT'}")
    return 0 if all(rows.values()) else EXIT_DIFFERENT


if __name__ == "__main__":
    sys.exit(main())
