"""Products in few bits on a GPU: codes and scales against the CPU's, products against the emulation, and their time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from benchmarks.gpu_scaled_products import moved
from megalite_kernels.implementation import Kernels, current, use
from megalite_kernels.measure import ELEMENTS, Step, case_step, copy_rate, time_interleaved, traffic
from megalite_kernels.recipes import Recipe, recipe
from megalite_kernels.scaled_products import product, refusal
from megalite_kernels.tile_cases import tile_cases
from megalite_kernels.tile_scales import Tiles
from megalite_kernels.tiles import dequantize, quantize, quantize_weight
from megalite_kernels.weight_parts import Matrices

BANDWIDTH = 0.8
"""Share of a copy's bandwidth that quantizing reaches."""
STEP = 0.8
"""Time of a blockwise product with what it quantizes, of a bf16 product's."""
RECIPES = ("tensorwise", "blockwise", "mxfp8", "nvfp4")
Result = TypeVar("Result")


def hard_values(rows: int, columns: int) -> Tensor:
    """Return numbers of all sizes, rows of zeros and of subnormal ones, an infinity and a NaN."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(rows, columns, generator=generator)
    values = torch.ldexp(values, torch.randint(-12, 12, (rows, columns), generator=generator))
    values[0], values[1] = 0.0, values[1] * 1e-40
    values[2, 3], values[3, columns - 1] = math.inf, math.nan
    return values


def different_codes(device: str) -> dict[str, int]:
    """Return how many bytes of codes and scales are not the CPU's, by recipe and by what is quantized."""
    found = {}
    for name in RECIPES:
        by = recipe(name)
        for kind, values in {"hard": hard_values(67, 1000), "plain": hard_values(300, 2048)[4:]}.items():
            pairs = [
                (quantize(values.to(device), by, format), _on_cpu(partial(quantize, values, by, format)))
                for format in dict.fromkeys((by.forward, torch.float8_e5m2 if name == "blockwise" else by.backward))
            ]
            found[f"{name} {kind}"] = sum(_difference(*pair) for pair in pairs)
        weight = hard_values(384, 1024)
        both = zip(quantize_weight(weight.to(device), by), _on_cpu(partial(quantize_weight, weight, by)), strict=True)
        found[f"{name} weight"] = sum(_difference(*pair) for pair in both)
    return found | {
        f"{name} weight in parts": different_codes_of_parts(device, name) for name in ("tensorwise", "blockwise")
    }


def different_codes_of_parts(device: str, name: str) -> int:
    """Return how many bytes of codes and scales of matrices that ranks have parts of are not the CPU's of the whole."""
    by, size, parts = recipe(name), (3 if name == "blockwise" else 1, 130, 1000), 7
    whole = hard_values(size[0] * size[1], size[2])
    ends = [whole.numel() * number // parts for number in range(parts + 1)]
    cut = [(whole.flatten()[start:stop].to(device), start) for start, stop in pairwise(ends)]
    matrices = Matrices(by, size)
    scales, factors = matrices.scales(torch.stack([matrices.largest(*part) for part in cut]).amax(0))
    ours = matrices.tiles(torch.cat([matrices.codes(*part, factors) for part in cut]), scales)
    theirs = _on_cpu(partial(quantize_weight, whole, by, size[0]))
    return sum(_difference(*pair) for pair in zip(ours, theirs, strict=True))


def _on_cpu(run: Callable[[], Result]) -> Result:
    before = current()
    use(Kernels("reference"))
    try:
        return run()
    finally:
        use(before)


def _difference(ours: Tiles, theirs: Tiles) -> int:
    pairs = [
        (one.cpu(), other) for one, other in zip(ours, theirs, strict=True) if one is not None and other is not None
    ]
    return sum(int((_bits(one) != _bits(other)).sum()) for one, other in pairs)


def _bits(part: Tensor) -> Tensor:
    part = part.nan_to_num(-1.0) if part.dtype == torch.float32 else part
    return part.contiguous().reshape(-1).view(torch.uint8)


def product_errors(device: str) -> dict[str, float | str]:
    """Return the largest error of products against the emulation by recipe, or why the device has none."""
    found: dict[str, float | str] = {}
    generator = torch.Generator().manual_seed(2)
    for name in RECIPES:
        by = recipe(name)
        if problem := refusal(by, torch.device(device)):
            found[name] = problem
            continue
        # Columns of nine blocks: cuBLAS reads the scales of a weight in fours.
        values, weight = (torch.randn(rows, 1152, generator=generator) for rows in (512, 768))
        a, b = quantize(values, by, by.forward), quantize_weight(weight, by).forward
        exact = product(a, b, by, torch.float64)
        terms = dequantize(a, by, torch.float64).abs() @ dequantize(b, by, torch.float64).abs().t()
        ours = product(moved(a, device), moved(b, device), by, torch.bfloat16)
        found[name] = ((ours.cpu().double() - exact).abs() / terms).max().item()
    return found


def bandwidths(device: str) -> Iterator[tuple[str, float]]:
    """Yield the bandwidth of each quantization, relative to a copy's."""
    gpu = device == "cuda"
    copy = copy_rate(torch.device(device), 2**30 if gpu else 2**20)
    for case in tile_cases():
        inputs = case.make_inputs((ELEMENTS if gpu else 2**16) // case.width, device)
        ((seconds, *_),) = time_interleaved([case_step(case, inputs)], inputs[0].device)
        yield case.name, traffic(case, inputs).forward / seconds / copy


def product_times(device: str) -> dict[str, float]:
    """Return the time of products of 8,192 tokens at hidden 4,096, values quantized and weights before, of bf16's."""
    rows, width = (8192, 4096) if device == "cuda" else (128, 256)
    values, weight = (torch.randn(size, width, device=device).bfloat16() for size in (rows, width))
    names = [name for name in ("tensorwise", "blockwise") if refusal(recipe(name), torch.device(device)) is None]
    steps: list[Step] = [_step(partial(torch.mm, values, weight.t()))]
    for name in names:
        by = recipe(name)
        steps.append(_step(partial(_quantized_product, values, quantize_weight(weight, by).forward, by)))
    (plain,), *others = time_interleaved(steps, values.device)
    return {name: seconds / plain for name, (seconds,) in zip(names, others, strict=True)}


def _quantized_product(values: Tensor, weight: Tiles, by: Recipe) -> Tensor:
    return product(quantize(values, by, by.forward), weight, by, torch.bfloat16)


def _step(run: partial[Tensor]) -> Step:
    return lambda mark: run()
