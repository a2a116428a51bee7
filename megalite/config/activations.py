"""Table of the activations of the feed-forward layer: their flags, their kernels, and their names in other programs."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

TANH_GELU = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_accurate", "gelu_python_tanh")
_EXACT_GELU = ("gelu", "gelu_python")


@dataclass(frozen=True)
class Activation:
    """Activation of the feed-forward layer.

    Attributes:
        name: name of its function in `megalite_kernels.activation`.
        flags: fields of ModelConfig that are on for this activation, among those that choose an activation.
        gated: true if a gate is multiplied with the up projection.
        hugging_face: names in config.json; the first one is written.
        megatron: Megatron-LM's argument that is on for this activation; None: no argument is on, or Megatron-LM does
            not have this activation.
    """

    name: str
    flags: frozenset[str]
    gated: bool
    hugging_face: tuple[str, ...]
    megatron: str | None = None

    @property
    def matrices(self) -> int:
        """Number of matrices of the feed-forward layer."""
        return 3 if self.gated else 2


ACTIVATIONS = (
    Activation("gelu", frozenset(), False, TANH_GELU, "bias_gelu_fusion"),
    Activation("exact_gelu", frozenset({"exact_gelu"}), False, _EXACT_GELU),
    Activation("squared_relu", frozenset({"squared_relu"}), False, ("relu2",), "squared_relu"),
    Activation("swiglu", frozenset({"swiglu"}), True, ("silu", "swish"), "swiglu"),
    Activation("geglu", frozenset({"geglu"}), True, TANH_GELU),
    Activation("exact_geglu", frozenset({"geglu", "exact_gelu"}), True, _EXACT_GELU),
    Activation("quick_geglu", frozenset({"quick_geglu"}), True, ("quick_gelu",), "quick_geglu"),
)
FLAGS = tuple(sorted({flag for row in ACTIVATIONS for flag in row.flags}))


def activation_of(on: Set[str]) -> Activation:
    """Return the activation that the flags `on` choose; if they contradict each other, the one with most of them."""
    return max((row for row in ACTIVATIONS if row.flags <= on), key=lambda row: len(row.flags))


def has_exact_form(row: Activation) -> bool:
    """Tell whether the table has another row for this activation with an exact GELU."""
    return any(other.flags == row.flags | {"exact_gelu"} != row.flags for other in ACTIVATIONS)


def flags_by_megatron(arguments: Mapping[str, Any], *, biases: bool) -> dict[str, Any]:
    """Return the fields that choose the same activation as Megatron-LM's arguments.

    Megatron-LM's GELU is exact, unless it is fused with a bias.
    """
    found = {
        flag: arguments[row.megatron]
        for row in ACTIVATIONS
        if row.megatron is not None and arguments.get(row.megatron)
        for flag in row.flags
    }
    fused = biases and arguments.get("bias_gelu_fusion", True)
    return found or {"exact_gelu": not fused and not arguments.get("openai_gelu")}


def megatron_of(chosen: Activation) -> dict[str, bool]:
    """Return Megatron-LM's arguments for an activation; all are false if Megatron-LM does not have it."""
    return {row.megatron: row is chosen for row in ACTIVATIONS if row.megatron is not None}
