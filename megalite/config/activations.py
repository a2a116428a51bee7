"""The activations of the feed-forward layer, a row each: by flags, in the kernels, and in the files of others."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

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
    """

    name: str
    flags: frozenset[str]
    gated: bool
    hugging_face: tuple[str, ...]

    @property
    def matrices(self) -> int:
        """Matrices of the feed-forward layer."""
        return 3 if self.gated else 2


ACTIVATIONS = (
    Activation("gelu", frozenset(), False, TANH_GELU),
    Activation("exact_gelu", frozenset({"exact_gelu"}), False, _EXACT_GELU),
    Activation("squared_relu", frozenset({"squared_relu"}), False, ("relu2",)),
    Activation("swiglu", frozenset({"swiglu"}), True, ("silu", "swish")),
    Activation("geglu", frozenset({"geglu"}), True, TANH_GELU),
    Activation("exact_geglu", frozenset({"geglu", "exact_gelu"}), True, _EXACT_GELU),
)
FLAGS = tuple(sorted({flag for row in ACTIVATIONS for flag in row.flags}))


def activation_of(on: Set[str]) -> Activation:
    """Return the activation that these flags choose; of flags that do not go together, the one that most of them do."""
    return max((row for row in ACTIVATIONS if row.flags <= on), key=lambda row: len(row.flags))
