"""Options of matrix products in 8 and in 4 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megalite.config.fields import NonNegativeInt

RecipeName = Literal["tensorwise", "blockwise", "mxfp8", "nvfp4"]
BLOCKS: dict[RecipeName, int] = {"tensorwise": 1, "blockwise": 128, "mxfp8": 32, "nvfp4": 16}
"""Elements of a product's inner dimension that share a scale; a scale of a whole tensor has no borders."""


@dataclass(frozen=True)
class LowPrecisionConfig:
    """Options of matrix products in fewer bits than the weights have."""

    fp8_format: Literal["e4m3", "hybrid"] | None = None
    """Multiply in FP8: all in e4m3, or gradients in e5m2 (hybrid); unset: in the precision of the weights."""
    fp8_recipe: Literal["tensorwise", "blockwise", "mxfp8"] | None = None
    """Scales of FP8: one a tensor, one for 128 channels of a token and 128 x 128 of a weight, or one for 32 channels
    (mxfp8, whose scales are powers of two); unset: blockwise, while Megatron-LM's default is delayed."""
    fp4_format: Literal["e2m1"] | None = None
    """Multiply in FP4 by NVIDIA's recipe: a scale for 16 channels, and one for the row that they are in."""
    fp8_wgrad: bool = False
    """Round both operands of weight gradients, too."""
    fp8_param_gather: bool = False
    """Gather weights as codes and scales of FP8 under ZeRO 3, not in their precision; no number changes."""
    activation_func_fp8_input_store: bool = False
    """Keep the inputs of activations of feed-forward layers and experts in FP8, and compute these again in backward."""
    first_last_layers_bf16: bool = False
    """Leave the first and the last layers in the precision of the weights."""
    num_layers_at_start_in_bf16: NonNegativeInt = 1
    """First layers that first-last-layers-bf16 leaves."""
    num_layers_at_end_in_bf16: NonNegativeInt = 1
    """Last layers that first-last-layers-bf16 leaves."""

    @property
    def recipe(self) -> RecipeName | None:
        """Name of the recipe by which operands are rounded; None: they are not."""
        if self.fp4_format is not None:
            return "nvfp4"
        return None if self.fp8_format is None else self.fp8_recipe or "blockwise"

    @property
    def flag(self) -> str:
        """The flag that asks for the recipe, in errors."""
        return "--fp4-format e2m1" if self.fp4_format is not None else f"--fp8-recipe {self.recipe}"

    def is_rounded(self, layer: int, layers: int) -> bool:
        """Tell whether a layer of the network has rounded products, by its number."""
        if self.recipe is None or not self.first_last_layers_bf16:
            return self.recipe is not None
        return self.num_layers_at_start_in_bf16 <= layer < layers - self.num_layers_at_end_in_bf16
