"""Options of the fused operations and of compilation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class KernelsConfig:
    """Options of how operations are computed; the results are the same except for rounding."""

    kernels: Literal["auto", "triton", "reference"] = "auto"
    """Triton's kernels, plain PyTorch (reference), or Triton on GPUs and PyTorch elsewhere (auto)."""
    persist_layer_norm: bool = True
    """Compute norms by their kernels. Off: in plain PyTorch, whatever kernels says; the same for the fusions below."""
    bias_dropout_fusion: bool = True
    """Add a residual in the kernel of the norm that follows."""
    bias_gelu_fusion: bool = True
    """Compute GELU by its kernels. --no-bias-gelu-fusion also makes it exact, as in Megatron-LM."""
    bias_swiglu_fusion: bool = True
    """Compute SwiGLU and GeGLU by their kernels."""
    rope_fusion: bool = True
    """Compute rotary position embeddings by their kernel."""
    cross_entropy_loss_fusion: bool = True
    """Compute the loss by its kernels."""
    fused_linear_cross_entropy: bool = False
    """Compute output layer and loss together, over chunks of tokens: only a part of the logits exists at a time, and
    backward computes them again."""
    compile: bool = False
    """Compile each layer by torch.compile, except for its matrix products, attention and Triton's kernels."""

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
