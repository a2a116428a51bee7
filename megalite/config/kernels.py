"""Options of the fused operations and of compilation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class KernelsConfig:
    """Options of how operations are computed; the results are the same except for rounding."""

    kernels: Literal["auto", "triton", "reference"] = "auto"
    """Triton's kernels, plain PyTorch (reference), or Triton if there is a GPU and PyTorch if not (auto)."""
    persist_layer_norm: bool = True
    """Norms by their kernels. Off: in plain PyTorch, whatever kernels says; the same for the next fusion flags."""
    bias_dropout_fusion: bool = True
    """Add a residual in the kernel of the norm that follows."""
    bias_gelu_fusion: bool = True
    """GELU by its kernels. --no-bias-gelu-fusion also makes it exact, as in Megatron-LM."""
    bias_swiglu_fusion: bool = True
    """SwiGLU and GeGLU by their kernels."""
    rope_fusion: bool = True
    """Rotary position embeddings by their kernel."""
    cross_entropy_loss_fusion: bool = True
    """The loss by its kernels."""
    fused_linear_cross_entropy: bool = False
    """Compute the loss with the output layer, in chunks of tokens: never all logits at once, recomputed in backward."""
    compile: bool = False
    """Compile each layer by torch.compile: what is between its matrix products, attention and Triton's kernels."""

    @property
    def to_reference(self) -> tuple[str, ...]:
        """Operations of megalite_kernels that run in plain PyTorch."""
        operations = {
            "norm": self.persist_layer_norm,
            "residual_norm": self.persist_layer_norm and self.bias_dropout_fusion,
            "gelu": self.bias_gelu_fusion,
            "swiglu": self.bias_swiglu_fusion,
            "rotary": self.rope_fusion,
            "cross_entropy": self.cross_entropy_loss_fusion,
        }
        return tuple(operation for operation, fused in operations.items() if not fused)
