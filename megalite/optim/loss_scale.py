"""The factor that keeps fp16 gradients from vanishing (arXiv:1710.03740), in Megatron-LM's form.

The loss is multiplied by it before backward, and the gradients are divided by it in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

GROWTH, BACKOFF = 2.0, 0.5


@dataclass(frozen=True)
class LossScale:
    """The scale of a step, and what decides the next one's. A constant scale has no `window`."""

    value: float = 1.0
    minimum: float = 1.0
    window: int | None = None
    """Steps without an overflow after which the scale grows."""
    hysteresis: int = 1
    """Overflows since the last growth after which each further one, and this, lowers the scale."""
    good_steps: int = 0
    overflows_left: int = 1

    @staticmethod
    def dynamic(initial: float, minimum: float, window: int, hysteresis: int) -> LossScale:
        return LossScale(initial, minimum, window, hysteresis, overflows_left=hysteresis)

    def state(self) -> dict[str, float]:
        """State that a checkpoint keeps; the rule itself is the flags'."""
        return {"value": self.value, "good_steps": self.good_steps, "overflows_left": self.overflows_left}

    def restored(self, state: Mapping[str, float]) -> LossScale:
        """The same rule, gone on from a state."""
        return replace(
            self,
            value=float(state["value"]),
            good_steps=int(state["good_steps"]),
            overflows_left=int(state["overflows_left"]),
        )

    @property
    def can_shrink(self) -> bool:
        """True if a skipped step is a search for the right scale rather than a sign of divergence."""
        return self.window is not None and self.value > self.minimum

    def after(self, *, overflow: bool) -> LossScale:
        """The scale of the step that follows one with or without an overflow."""
        if self.window is None:
            return self
        if overflow:
            left = self.overflows_left - 1
            value = max(self.value * BACKOFF, self.minimum) if left <= 0 else self.value
            return replace(self, value=value, good_steps=0, overflows_left=left)
        if self.good_steps + 1 < self.window:
            return replace(self, good_steps=self.good_steps + 1)
        return replace(self, value=self.value * GROWTH, good_steps=0, overflows_left=self.hysteresis)
