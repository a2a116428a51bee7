"""Loss scale: a factor that prevents underflow of fp16 gradients (arXiv:1710.03740), with Megatron-LM's update rule.

The loss is multiplied by it before backward. The gradients are divided by it in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

GROWTH, BACKOFF = 2.0, 0.5


@dataclass(frozen=True)
class LossScale:
    """Scale of a step, with the state that determines the scale of the next step. A constant scale has no `window`."""

    value: float = 1.0
    minimum: float = 1.0
    window: int | None = None
    """Number of consecutive steps without an overflow after which the scale grows."""
    hysteresis: int = 1
    """Number of overflows since the last growth from which on each overflow lowers the scale (this one included)."""
    good_steps: int = 0
    """Number of consecutive steps without an overflow so far."""
    overflows_left: int = 1
    """Number of overflows until the scale is lowered, counting the one that lowers it."""

    @staticmethod
    def dynamic(initial: float, minimum: float, window: int, hysteresis: int) -> LossScale:
        return LossScale(initial, minimum, window, hysteresis, overflows_left=hysteresis)

    def state(self) -> dict[str, float]:
        """Return the state to save in a checkpoint. The other fields come from flags."""
        return {"value": self.value, "good_steps": self.good_steps, "overflows_left": self.overflows_left}

    def restored(self, state: Mapping[str, float]) -> LossScale:
        """Return this loss scale with the state from a checkpoint."""
        return replace(
            self,
            value=float(state["value"]),
            good_steps=int(state["good_steps"]),
            overflows_left=int(state["overflows_left"]),
        )

    @property
    def can_shrink(self) -> bool:
        """True if the scale can be lowered. A skipped step is then not yet a sign of divergence."""
        return self.window is not None and self.value > self.minimum

    def after(self, *, overflow: bool) -> LossScale:
        """Return the loss scale of the next step, given whether this step had an overflow."""
        if self.window is None:
            return self
        if overflow:
            left = self.overflows_left - 1
            value = max(self.value * BACKOFF, self.minimum) if left <= 0 else self.value
            return replace(self, value=value, good_steps=0, overflows_left=left)
        if self.good_steps + 1 < self.window:
            return replace(self, good_steps=self.good_steps + 1)
        return replace(self, value=self.value * GROWTH, good_steps=0, overflows_left=self.hysteresis)
