"""CPU time of emulated products in few bits, of quantizing both operands included, relative to an fp32 product's.

    python -m benchmarks.low_bits [--rounds 9]

2,048 rows of 1,024 columns times a weight of 1,024 outputs, on one thread; the products run in turn, round by round; a
figure is the median, with quartiles. Exit code 1 if blockwise takes more than 6 times as long as fp32.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from functools import partial

import torch
from torch import Tensor

from benchmarks.cpu_step import measure, quartiles, ratios
from benchmarks.results import write_results
from megalite.parallel.mesh import ParallelMesh
from megalite_kernels.recipes import Recipe, recipe
from megalite_kernels.scaled_products import product
from megalite_kernels.tiles import quantize, quantize_weight

ROWS, COLUMNS, OUTPUTS = 2048, 1024, 1024
MOST = 6.0
"""Times an fp32 product that a blockwise one may take."""


def quantized_product(values: Tensor, weight: Tensor, by: Recipe) -> Tensor:
    """Quantize both and multiply."""
    return product(quantize(values, by, by.forward), quantize_weight(weight, by).forward, by, torch.float32)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    values, weight = torch.randn(ROWS, COLUMNS), torch.randn(OUTPUTS, COLUMNS)
    names = ("tensorwise", "blockwise", "mxfp8", "nvfp4")
    steps = {name: partial(quantized_product, values, weight, recipe(name)) for name in names}
    times = measure(steps | {"fp32": partial(torch.mm, values, weight.t())}, arguments.rounds, ParallelMesh())
    compared = {name: ratios(times, name, "fp32") for name in names}
    print(f"torch {torch.__version__}, {ROWS} x {COLUMNS} x {OUTPUTS}, {arguments.rounds} rounds, CPU time, one thread")
    for name, found in compared.items():
        print(f"  {name:10} {quartiles(found)} of an fp32 product's time")
    print("written to", write_results("low_bits", {"times fp32": compared}))
    return 0 if statistics.median(compared["blockwise"]) <= MOST else 1


if __name__ == "__main__":
    sys.exit(main())
