"""Products in 8 bits at the shapes used in training. Not every GPU has them, so they are no part of `cases.cases`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from megalite_kernels.case import Case
from megalite_kernels.recipes import Recipe, recipe
from megalite_kernels.scaled_products import grouped_product, product
from megalite_kernels.tiles import quantize, quantize_weight


def _inputs(shapes: tuple[tuple[int, int], ...], tokens: int, device: str) -> list[Tensor]:
    """Make matrices in bf16, those of 0 rows with one for each token."""
    return [torch.randn(rows or tokens, columns, dtype=torch.bfloat16, device=device) for rows, columns in shapes]


def _groups_inputs(groups: int, shapes: tuple[tuple[int, int], ...], tokens: int, device: str) -> list[Tensor]:
    ends = [tokens * number // groups for number in range(1, groups + 1)]
    return [*_inputs(shapes, tokens, device), torch.tensor(ends, dtype=torch.int32, device=device)]


def _whole(rows: Tensor, weight: Tensor, *, by: Recipe) -> Tensor:
    return product(quantize(rows, by, by.forward), quantize_weight(weight, by).forward, by, rows.dtype)


def _of_rows(gradient: Tensor, input: Tensor, *, by: Recipe) -> Tensor:
    """Multiply as for the gradient of a weight: the transposed gradient and input, whose columns are tokens."""
    return product(quantize(gradient, by, by.backward), quantize(input, by, by.forward), by, input.dtype)


def _of_groups(rows: Tensor, weight: Tensor, ends: Tensor, *, by: Recipe, backward: bool) -> Tensor:
    offsets = [0, *([0] * len(ends) if ends.is_meta else ends.tolist())]  # for the emulation
    matrices = quantize_weight(weight, by, len(ends))
    a = quantize(rows, by, by.backward if backward else by.forward)
    return grouped_product(a, matrices.backward if backward else matrices.forward, offsets, ends, by, rows.dtype)


def product_cases() -> Iterator[Case]:
    """Yield products of groups, forward and backward, of two matrices of rows, and of widths that are not aligned."""
    groups, width, out = 16, 2048, 1536
    for by, format in ((recipe("blockwise"), "e4m3"), (recipe("blockwise", "hybrid"), "hybrid")):
        for backward, columns in ((False, width), (True, out)):
            inputs = partial(_groups_inputs, groups, ((0, columns), (groups * out, width)))
            run = partial(_of_groups, by=by, backward=backward)
            name = f"grouped_product{'_back' * backward} {groups} of {width} to {out} {format}"
            yield Case("scaled_products", name, columns, inputs, run, indexed=True)
        inputs, run = partial(_inputs, ((0, width), (out, width))), partial(_of_rows, by=by)
        yield Case("scaled_products", f"product_of_rows {width} to {out} {format}", width, inputs, run, indexed=True)
    inputs, run = partial(_inputs, ((0, 1000), (200, 1000))), partial(_whole, by=recipe("blockwise"))
    yield Case("scaled_products", "product 1000 to 200 e4m3", 1000, inputs, run, indexed=True)
