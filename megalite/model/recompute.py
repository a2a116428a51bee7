"""Choice of the activations that are computed again in backward instead of saved."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Recompute:
    """Megatron's choices: recompute parts of every layer, or complete layers.

    Attributes:
        attention: recompute the attention core of every layer.
        moe: save only the input of each layer's experts and router.
        mlp_parts: number of parts of the sequence on which dense feed-forward layers run one after another, each part
            recomputed. 1 leaves these layers whole.
        method: "uniform" saves only the input of each run of `layers` layers. "block" saves only the input of each of
            the first `layers` layers, and recomputes no others. None recomputes no complete layers.
    """

    attention: bool = False
    moe: bool = False
    mlp_parts: int = 1
    method: str | None = None
    layers: int = 1

    def spans(self, total: int) -> list[tuple[int, int, bool]]:
        """Split `total` layers into runs (start, stop, recomputed)."""
        if self.method == "uniform":
            return [(start, min(start + self.layers, total), True) for start in range(0, total, self.layers)]
        if self.method == "block":
            recomputed = min(self.layers, total)
            return [(layer, layer + 1, True) for layer in range(recomputed)] + [(recomputed, total, False)]
        return [(0, total, False)]
