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
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from megalite_kernels.fp8_cases import VARIANTS, WEIGHT, cases, numbers, quantized, quantized_weight
from megalite_kernels.scaled_products import product
from megalite_kernels.tile_scales import Tiles

EXIT_DIFFERENT, EXIT_NOT_WRITTEN, EXIT_NOT_INSTALLED = 1, 3, 64


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
            multiplied = product(tiles, weight, by, torch.float64)  # CPUs differ in the bits of NaN
            found[f"{name}/{case}/product"] = multiplied.where(~multiplied.isnan(), torch.nan)
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
