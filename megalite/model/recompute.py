"""Choice of the activations that are computed again in backward instead of being kept."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Recompute:
    """Megatron's choices: the attention core of every layer, or whole layers.

    "uniform": every run of `layers` layers keeps only its input. "block": the first `layers` layers do, one by one.
    """

    attention: bool = False
    method: str | None = None
    layers: int = 1

    def spans(self, total: int) -> list[tuple[int, int, bool]]:
        """Cut `total` layers into runs (start, stop, recomputed)."""
        if self.method == "uniform":
            return [(start, min(start + self.layers, total), True) for start in range(0, total, self.layers)]
        if self.method == "block":
            recomputed = min(self.layers, total)
            return [(layer, layer + 1, True) for layer in range(recomputed)] + [(recomputed, total, False)]
        return [(0, total, False)]
