"""Weights in blocks of fp8 (e4m3), as DeepSeek-V3, Kimi K2 and MiniMax-M2 are published: how they are read.

A matrix NAME.weight is stored in fp8 beside NAME.weight_scale_inv in fp32, bf16 or e8m0, with a number for each tile
of 128 x 128, by which the values of the tile are multiplied. Tiles at the right and at the bottom may be smaller. Such
files are made by `block_fp8_writing.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.manifest import dtype_name
from megalite.checkpoint.tensors import Kind
from megalite.conversion.config_keys import Json, Keys
from megalite.conversion.mapping import LastTensor, Stored
from megalite.errors import CheckpointError
from megalite.process.output import say
from megalite.small_files import shown

SCALE = "_scale_inv"
TILE = 128
_KNOWN: dict[str, tuple[Any, ...]] = {
    "quant_method": ("fp8",),
    "weight_block_size": ([TILE, TILE],),
    "fmt": ("e4m3", "float8_e4m3fn"),
    "activation_scheme": ("dynamic",),  # here, activations are not quantized
    "scale_fmt": ("ue8m0", "float"),  # how scales were rounded: their dtype is that of the files
}
_NO_EFFECT = ("modules_to_not_convert", "ignored_layers")  # the files show it
_OTHERWISE = ": load the model with transformers, call model.dequantize(), and save it"
_SCALES = (torch.float32, torch.bfloat16, torch.float8_e8m0fnu)
"""Dtypes of scales: fp32 has the values of all."""
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def quantization() -> Keys:
    """Return the entry for quantized weights, which may be in such blocks. What writes them writes their keys."""

    def read(config: Json) -> dict[str, Any]:
        found = config.get("quantization_config") or {}
        if found and "quant_method" not in found:
            raise CheckpointError(f"quantization_config is {shown(found)}, it has no quant_method")
        for name, value in found.items():
            if name not in _NO_EFFECT and value not in _KNOWN.get(name, ()):
                supported = " or ".join(map(repr, _KNOWN.get(name, ()))) or "no such key"
                found_there = f"{name[:80]} of quantization_config is {shown(value)}"
                raise CheckpointError(f"{found_there}, but only {supported} is supported{_OTHERWISE}")
        if found:
            _dtype(config)
        return {}

    return Keys(("quantization_config",), read, lambda _: {})


def _dtype(config: Json) -> torch.dtype:
    """Return the dtype of the weights that a config.json names, bf16 if it names none."""
    name = config.get("torch_dtype") or config.get("dtype") or "bfloat16"
    if not isinstance(name, str) or name not in _DTYPES:
        raise CheckpointError(f"torch_dtype is {shown(name)}, but only {', '.join(_DTYPES)} are supported")
    return _DTYPES[name]


def unpacked(stored: Stored, config: Json) -> Stored:
    """Return the tensors with each pair of values and scales replaced by the weight, which is made when it is read.

    Weights have the dtype that config.json names. Raises CheckpointError if a pair is incomplete, has other dtypes, or
    its shapes do not fit together.
    """
    found, last, warned = dict(stored), LastTensor(), set[str]()
    for scale in [name for name in stored if name.endswith(f".weight{SCALE}")]:
        name = scale.removesuffix(SCALE)
        scales, read_scales = found.pop(scale)
        if name not in found:
            raise CheckpointError(f"{scale} has no {name} beside it")
        values, read_values = found[name]
        if values.dtype != torch.float8_e4m3fn or scales.dtype not in _SCALES:
            dtypes = f"{name} is {dtype_name(values.dtype)}, and {scale} {dtype_name(scales.dtype)}"
            raise CheckpointError(
                f"{dtypes}: only float8_e4m3fn with {' or '.join(map(dtype_name, _SCALES))} is supported{_OTHERWISE}"
            )
        if len(values.shape) != 2 or tiles_of(values.shape) != scales.shape:
            raise CheckpointError(
                f"{name} {list(values.shape)} and {scale} {list(scales.shape)} are not fp8 in blocks of 128 x 128"
            )
        dtype = _dtype(config)
        make = partial(_multiply, read_values, read_scales, dtype, scale, warned)
        found[name] = Kind(values.shape, dtype), partial(last.get, name, make)
    return found


def tiles_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the numbers of tiles along the sides of a matrix."""
    return tuple(-(-size // TILE) for size in shape)


def all_tiles_are_full(stored: Stored) -> bool:
    """Tell if no tile is smaller than others, as transformers 5.24 needs it to make weights of blocks."""
    in_blocks = (kind for name, (kind, _) in stored.items() if name + SCALE in stored)
    return all(size % TILE == 0 for kind in in_blocks for size in kind.shape)


def _multiply(
    read_values: Callable[[], Tensor],
    read_scales: Callable[[], Tensor],
    dtype: torch.dtype,
    name: str,
    warned: set[str],
) -> Tensor:
    """Return a weight, each value multiplied in fp32 and rounded once, computed for a row of tiles after the other.

    A scale of 0 beside codes that are not has a warning, once for those of this name, which `warned` has then. Raises
    CheckpointError if one of the scales is none.
    """
    values, scales = read_values(), read_scales().float()
    wrong = ~(scales.isfinite() & (scales >= 0))
    if wrong.any():
        row, column = wrong.nonzero()[0].tolist()
        raise CheckpointError(f"{name} has {scales[row, column]} for tile {row}, {column}: a scale is 0 or more")
    weight = torch.empty(values.shape, dtype=dtype)
    for tile, row in enumerate(scales):
        rows = slice(tile * TILE, (tile + 1) * TILE)
        codes = values[rows].float()
        weight[rows] = codes * row.repeat_interleave(TILE)[: values.shape[1]]
        for column in (row == 0.0).nonzero().flatten().tolist():
            if name not in warned and codes[:, column * TILE : (column + 1) * TILE].any():
                warned.add(name)
                say(f"WARNING: {name} has 0 for tile {tile}, {column}, whose weights become zeros", to_error=True)
    return weight
