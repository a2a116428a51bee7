"""Vectors for tests of any program that computes in few bits, and a comparison with one that is installed.

    python -m megalite_kernels.fp8_vectors --write FILE     # codes, scales and products, as safetensors
    python -m megalite_kernels.fp8_vectors --check torchao

docs/fp8_tables.md describes the file. The numbers are the same on every machine. Exit code 0: written, or all agrees;
1: the other program has other numbers; 2: wrong flags; 3: the file cannot be written; 64, as in megalite's programs:
the other program is not installed, or in a version that lacks what is compared.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from megalite_kernels.recipes import Recipe, recipe
from megalite_kernels.scaled_products import product
from megalite_kernels.tile_scales import Tiles
from megalite_kernels.tiles import largest, quantize_reference, quantize_weight, values_of

COLUMNS = 256
WEIGHT = (144, COLUMNS)  # its last squares are short
VARIANTS = {
    "tensorwise": recipe("tensorwise"),
    "tensorwise_hybrid": recipe("tensorwise", "hybrid"),
    "blockwise": recipe("blockwise"),
    "blockwise_hybrid": recipe("blockwise", "hybrid"),
    "blockwise_quotient": replace(recipe("blockwise"), scaling="quotient"),
    "mxfp8": recipe("mxfp8"),
    "mxfp8_ceiling": replace(recipe("mxfp8"), scaling="ceiling"),
    "nvfp4": recipe("nvfp4"),
}
"""Recipes by their names in the file; those that are not megalite's are what other programs do by default."""
EXIT_DIFFERENT, EXIT_NOT_WRITTEN, EXIT_NOT_INSTALLED = 1, 3, 64


def numbers(rows: int, columns: int, seed: int) -> Tensor:
    """Return numbers of many sizes, of 16 significant bits, that depend on the seed alone."""
    draw = random.Random(seed).getrandbits
    drawn = [(draw(17) - 2**16) * 2.0 ** (draw(3) - 20) for _ in range(rows * columns)]
    return torch.tensor(drawn, dtype=torch.float32).view(rows, columns)


def ties(by: Recipe) -> Tensor:
    """Return rows with every code and the middle of each two, of both signs; tiles have powers of two as scales."""
    e2m1 = by.backward == torch.float4_e2m1fn_x2
    codes = torch.arange(8 if e2m1 else 128, dtype=torch.uint8)
    known = values_of(codes if e2m1 else codes.view(by.backward), torch.float32)
    known = known[known.isfinite()]
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
    subnormal, zero, bad = numbers(3, COLUMNS, 1), torch.zeros(2, COLUMNS), numbers(4, COLUMNS, 2)
    subnormal = subnormal * torch.tensor([[2.0**-130], [2.0**-126], [2.0**-70]])
    zero[1] = -0.0
    bad[0, 5], bad[1, 140], bad[2, 255] = float("inf"), -float("inf"), float("nan")
    return {"tie": ties(by), "subnormal": subnormal, "zero": zero, "infinite": bad, "random": numbers(8, COLUMNS, 3)}


def quantized(values: Tensor, by: Recipe) -> Tiles:
    """Return the tiles of gradients, whose codes activations have, too, but for hybrid."""
    codes, scales, outer = quantize_reference(values, by, by.backward, largest(values, by))
    if by.name == "mxfp8" and scales.dtype == torch.float32:  # powers of two that were rounded up
        scales = (scales.view(torch.int32) >> 23 & 0xFF).to(torch.uint8).view(torch.float8_e8m0fnu)
    return Tiles(codes, scales, outer)


def quantized_weight(values: Tensor, by: Recipe) -> Tiles:
    if by.name == "mxfp8":  # also with scales rounded up, which elsewhere are those of squares
        return quantized(values, by)
    return quantize_weight(values, by).forward


def vectors() -> dict[str, Tensor]:
    """Return all tensors of the file by name, codes and scales of 8 bits as uint8."""
    values = numbers(*WEIGHT, 4)
    found = {"weight/values": values}
    for name, by in VARIANTS.items():
        weight = quantized_weight(values, by)
        found |= _named(f"{name}/weight", weight)
        for case, rows in cases(by).items():
            tiles = quantized(rows, by)
            found[f"{name}/{case}/values"] = rows
            found |= _named(f"{name}/{case}", tiles)
            found[f"{name}/{case}/product"] = product(tiles, weight, by, torch.float64)
    return found


def _named(name: str, tiles: Tiles) -> dict[str, Tensor]:
    parts = {"codes": tiles.codes, "scales": tiles.scales, "outer": tiles.outer}
    return {
        f"{name}/{part}": tensor.contiguous().view(torch.uint8) if tensor.itemsize == 1 else tensor.contiguous()
        for part, tensor in parts.items()
        if tensor is not None
    }


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
    installed = f"{flags.check} {version(flags.check)}"
    try:
        from megalite_kernels.torchao_comparison import compare_with_torchao
    except ImportError as error:
        print(f"fp8_vectors: {installed} has not all that is compared, as 0.18.0 has: {error}", file=sys.stderr)
        return EXIT_NOT_INSTALLED
    print(f"compared with {installed}")
    rows = compare_with_torchao()
    for row in rows:
        print(f"{row.what}: {row.result}")
    return 0 if all(row.agrees for row in rows) else EXIT_DIFFERENT


if __name__ == "__main__":
    sys.exit(main())
