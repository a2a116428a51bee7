"""Quantization to tiles at the shapes used in training: activations and gradients by recipe, and weights in squares."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from megalite_kernels.case import Case, dtype_names
from megalite_kernels.recipes import Recipe, recipe
from megalite_kernels.tiles import dequantize, largest, quantize, quantize_weight

ROWS_OF_WEIGHT = 16
"""Rows of a weight for each token: their number stays a multiple of 16, as it is of every weight."""


def _rows(width: int, dtype: torch.dtype, tokens: int, device: str) -> list[Tensor]:
    return [torch.randn(tokens, width, dtype=dtype, device=device)]


def _along_tokens(rows: int, block: int, tokens: int, device: str) -> list[Tensor]:
    """Make the transposed gradient of an output, of whole blocks of tokens."""
    return [torch.randn(rows, tokens * block, dtype=torch.bfloat16, device=device)]


def _there_and_back(values: Tensor, *, by: Recipe, format: torch.dtype) -> Tensor:
    return dequantize(quantize(values, by, format), by, values.dtype)


def _alone(inputs: Sequence[Tensor], *, by: Recipe, format: torch.dtype) -> Callable[[], object]:
    return partial(quantize, inputs[0], by, format, largest(inputs[0], by))


def _weight(width: int, dtype: torch.dtype, tokens: int, device: str) -> list[Tensor]:
    return [torch.randn(tokens * ROWS_OF_WEIGHT, width, dtype=dtype, device=device)]


def _weight_there_and_back(values: Tensor, *, by: Recipe) -> tuple[Tensor, Tensor]:
    found = quantize_weight(values, by)
    return dequantize(found.forward, by, values.dtype), dequantize(found.backward, by, values.dtype)


def _weight_alone(inputs: Sequence[Tensor], *, by: Recipe) -> Callable[[], object]:
    return partial(quantize_weight, inputs[0], by)


def _traffic(copies: int, inputs: Sequence[Tensor], _: Sequence[Tensor]) -> tuple[int, int]:
    """Count the values, which are read, and the codes, of one byte, which are written."""
    return inputs[0].nbytes + copies * inputs[0].numel(), 0


def tile_cases() -> Iterator[Case]:
    """Yield the quantization of activations and gradients by recipe, dtype and format, then that of weights."""
    for name, dtype, format in (
        ("tensorwise", torch.bfloat16, torch.float8_e4m3fn),
        ("blockwise", torch.bfloat16, torch.float8_e4m3fn),
        ("blockwise", torch.bfloat16, torch.float8_e5m2),
        ("blockwise", torch.float32, torch.float8_e4m3fn),
        ("mxfp8", torch.float32, torch.float8_e4m3fn),
        ("nvfp4", torch.float32, torch.float4_e2m1fn_x2),
    ):
        by = recipe(name)
        run, alone = partial(_there_and_back, by=by, format=format), partial(_alone, by=by, format=format)
        title = f"quantize {name} 4096 {dtype_names(dtype, format)}"
        yield Case("tiles", title, 4096, partial(_rows, 4096, dtype), run, traffic=partial(_traffic, 1), timed=alone)
    by = recipe("blockwise")
    inputs, run = partial(_along_tokens, 32, by.block), partial(_there_and_back, by=by, format=by.backward)
    alone = partial(_alone, by=by, format=by.backward)
    title, traffic = "quantize blockwise along tokens", partial(_traffic, 1)
    yield Case("tiles", title, 32 * by.block, inputs, run, traffic=traffic, timed=alone)
    for dtype in (torch.bfloat16, torch.float32):
        of_weight, of_weight_alone = partial(_weight_there_and_back, by=by), partial(_weight_alone, by=by)
        title = f"quantize_weight blockwise 4096 {dtype_names(dtype, by.forward)}"
        inputs, traffic = partial(_weight, 4096, dtype), partial(_traffic, 2)
        yield Case("tiles", title, 4096 * ROWS_OF_WEIGHT, inputs, of_weight, traffic=traffic, timed=of_weight_alone)
