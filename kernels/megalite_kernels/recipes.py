"""Recipes of products in 8 and 4 bits: the formats of codes, what a scale covers, and how it follows from a maximum.

| recipe | codes | a scale covers | scale |
|---|---|---|---|
| `tensorwise` | e4m3; hybrid: gradients e5m2 | the tensor | fp32: 1 / (largest code / maximum) |
| `blockwise` | e4m3; hybrid: gradients e5m2 | 1 x 128 of a token's row, 128 x 128 of a weight | fp32, a power of two |
| `mxfp8` | e4m3 | 1 x 32 of a row | e8m0, the power of two of the maximum |
| `nvfp4` | e2m1 | 1 x 16 of a row | e4m3, times one of fp32 for each row |

docs/fp8_tables.md has the rules in full and says whose they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

RecipeName = Literal["tensorwise", "blockwise", "mxfp8", "nvfp4"]
FormatName = Literal["e4m3", "hybrid"]
Scaling = Literal["quotient", "ceiling", "floor", "two levels"]


@dataclass(frozen=True)
class Recipe:
    """A way to multiply in few bits.

    Attributes:
        name: its name in `--fp8-recipe`.
        forward: format of codes of activations and weights.
        backward: format of codes of gradients.
        block: elements along the contraction that share a scale; 0: all of the tensor's.
        scaling: how a scale follows from the largest magnitude below it: `tile_scales.scales_of`.
    """

    name: RecipeName
    forward: torch.dtype
    backward: torch.dtype
    block: int
    scaling: Scaling

    @property
    def in_squares(self) -> bool:
        """True if a weight's scales cover squares of `block` rows and columns, so that both its products share them."""
        return self.block > 0 and self.scaling in ("quotient", "ceiling")


_RECIPES = {
    "tensorwise": Recipe("tensorwise", torch.float8_e4m3fn, torch.float8_e4m3fn, 0, "quotient"),
    "blockwise": Recipe("blockwise", torch.float8_e4m3fn, torch.float8_e4m3fn, 128, "ceiling"),
    "mxfp8": Recipe("mxfp8", torch.float8_e4m3fn, torch.float8_e4m3fn, 32, "floor"),
    "nvfp4": Recipe("nvfp4", torch.float4_e2m1fn_x2, torch.float4_e2m1fn_x2, 16, "two levels"),
}


def recipe(name: str, format: str = "e4m3") -> Recipe:
    """Return the recipe of this name. With the format "hybrid", gradients are e5m2.

    Raises:
        ValueError: there is no such recipe or format, or the recipe has no hybrid.
    """
    if name not in _RECIPES:
        raise ValueError(f"no recipe {name!r}; choose one of {', '.join(_RECIPES)}")
    if format not in get_args(FormatName):
        raise ValueError(f"no format {format!r}; choose one of {', '.join(get_args(FormatName))}")
    found = _RECIPES[name]
    if format == "e4m3":
        return found
    if found.scaling in ("floor", "two levels"):
        raise ValueError(f"{name} has no hybrid format: training diverges with gradients of another format")
    return Recipe(found.name, found.forward, torch.float8_e5m2, found.block, found.scaling)
