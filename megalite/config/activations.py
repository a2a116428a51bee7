"""The activations of the feed-forward layer, a row each: by flags, in the kernels, and in the files of others."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

TANH_GELU = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_accurate", "gelu_python_tanh")
_EXACT_GELU = ("gelu", "gelu_python")


@dataclass(frozen=True)
class Activation:
    """One of them.

    Attributes:
        name: of its function in `megalite_kernels.activation`.
        flags: the fields of ModelConfig that are on for it, of those that choose an activation.
        gated: whether a gate is multiplied with the up projection.
        hugging_face: names in config.json; the first is the one that is written.
        megatron: Megatron-LM's argument that is on for it; None: it is what is left, or Megatron-LM does not have it.
    """

    name: str
    flags: frozenset[str]
    gated: bool
    hugging_face: tuple[str, ...]
    megatron: str | None = None

    @property
    def matrices(self) -> int:
        """Matrices of the feed-forward layer."""
        return 3 if self.gated else 2


ACTIVATIONS = (
    Activation("gelu", frozenset(), False, TANH_GELU, "bias_gelu_fusion"),
    Activation("exact_gelu", frozenset({"exact_gelu"}), False, _EXACT_GELU),
    Activation("squared_relu", frozenset({"squared_relu"}), False, ("relu2",), "squared_relu"),
    Activation("swiglu", frozenset({"swiglu"}), True, ("silu", "swish"), "swiglu"),
    Activation("geglu", frozenset({"geglu"}), True, TANH_GELU),
    Activation("exact_geglu", frozenset({"geglu", "exact_gelu"}), True, _EXACT_GELU),
)
FLAGS = tuple(sorted({flag for row in ACTIVATIONS for flag in row.flags}))
MEGATRON_ALONE = sorted({"squared_relu", "swiglu", "quick_geglu"} - {row.megatron for row in ACTIVATIONS})
"""Megatron-LM's arguments that choose an activation which is no row."""


def activation_of(on: Set[str]) -> Activation:
    """Return the activation that these flags choose; of flags that do not go together, the one that most of them do."""
    return max((row for row in ACTIVATIONS if row.flags <= on), key=lambda row: len(row.flags))


def has_exact_form(row: Activation) -> bool:
    """Tell if the same with an exact GELU is a row of its own."""
    return any(other.flags == row.flags | {"exact_gelu"} != row.flags for other in ACTIVATIONS)


def flags_by_megatron(arguments: Mapping[str, Any], *, biases: bool) -> dict[str, Any]:
    """Return the fields that choose what Megatron-LM's arguments choose, with the values given there.

    Its GELU is exact, but for the one that is fused with a bias.
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
    """Return Megatron-LM's arguments for an activation; those of no other, where it does not have it."""
    return {row.megatron: row is chosen for row in ACTIVATIONS if row.megatron is not None}
